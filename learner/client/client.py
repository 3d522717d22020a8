"""The trainer's side of the network: a small synchronous client that any trainer can drive.

Must not know torch, libp2p or trio. Control messages go over a Unix socket in the run directory; bulk goes through
files there (micro-batches, chunks), never through the socket.

    client = LearnerClient.connect(run_dir)
    start = client.resume()                     # epoch, step, checkpoint to load or None
    client.publish(start.step, tensors)         # first version: an anchor
    while step < steps:
        for batch in client.batches(step):      # MicroBatch; the last one has .last
            ...accumulate gradients...
        ...optimizer step; step += 1; write a checkpoint, fsynced...
        client.commit(step, checkpoint)         # names the checkpoint and marks the step's groups consumed, atomically
        client.publish(step, tensors)           # the new weights
        client.log(step, metrics)
    client.finish()

`examples/own_trainer.py` is that in plain PyTorch; set `external_trainer = true` for the learner that waits for it.

**Calls** come from one thread, in this order, each blocking until the head has answered; between two calls a trainer may take
as long as it likes. `steps` must be the learner's `trainer.steps`: nothing is generated for steps beyond it. One trainer
an epoch: a second one is refused, since it would train on groups that the first has taken.

**Errors.** Every call may raise HeadGone: the head closed the socket, was silent for 30 s, or refused (its reason is in the
message: a step out of order, a second trainer, a full disk on its side). The connection is of no use after that; end the
process and start learner and trainer again, the learner with --resume. ValueError and RuntimeError are mistakes of the
caller, told before anything was sent. OSError comes from the run directory's disk: nothing that was published or committed
before is harmed. A trainer that cannot train on what it was handed (a gradient that is not finite) calls `discard` before
it ends, or every later life would be handed the same groups.

**What is durable when.** `commit` returns after one transaction with fsync: from then on the checkpoint is what a resume
starts from, and the groups of all steps before it are never handed out again. The checkpoint itself is the caller's: whole
and synced before `commit` names it, and kept until two commits later (a crash may come between save and commit). `publish`
returns when the version is written and signed; the nodes get it afterwards, and a version is not durable: a resumed run
publishes anew. `batches` hands out groups that the journal holds as finished; handing out changes nothing there.

**What a crash costs.** Of the trainer (which ends the learner, too), the head or the machine: the optimizer steps since
the last commit. Their groups were not marked consumed: those generated under versions up to that commit are handed out
again, those with tokens of later versions are dropped and their prompts drawn again. So on the history that survives each
group was trained on exactly once. Commit before publish, each step, and no node ever holds weights that a crash
takes back. Of a node: nothing that this side notices.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgpack
import numpy as np
from msgspec.structs import replace

from learner.client import messages
from learner.client.port import ResumeInfo, Weights, WeightSource
from learner.client.reference_states import Reference, keep_first, load_first
from learner.trajectory import MicroBatch, unpack_groups
from p2p.codec import warm
from p2p.codec.classes import Changes, apply
from p2p.errors import ShoalError
from p2p.files import write_whole
from p2p.layout import Layout
from p2p.limits import MAX_FRAME
from p2p.protocol.wire import encode
from p2p.version import Version
from p2p.weights.encode import NOTHING_FOUND, encode_version
from p2p.weights.state import FlatState, state_digest
from p2p.weights.store import ChunkFolder

Answer = TypeVar("Answer")


class HeadGone(ShoalError):
    """The head closed the socket, stopped answering, or refused a request (the message says which). Nothing more can be asked
    over this connection."""


@contextmanager
def _told_of(what: str) -> Iterator[None]:
    """Around what the head must have done within SILENCE_S: a HeadGone says what it has not, or how the socket ended."""
    try:
        yield
    except TimeoutError:
        raise HeadGone(f"the head has not {what} for {messages.SILENCE_S:.0f} s") from None
    except OSError as error:
        raise HeadGone(f"the head is gone: {error}") from None


class LearnerClient:
    """Implements `learner.client.port.TrainerClient` over the head's socket. One thread drives it."""

    def __init__(self, sock: socket.socket, run_dir: Path) -> None:
        self._sock, self.run_dir = sock, run_dir
        self._start: messages.Start | None = None
        # The head decides what is dropped: this side only adds.
        self._store = ChunkFolder(run_dir / "versions" / "chunks")
        self._published: Reference | None = None
        self._source: WeightSource | None = None
        """where what was published last came from, if it told its changes"""
        self._first: Reference | None = None
        self._milestone: Reference | None = None
        """what the next cumulative delta of this epoch is told against"""
        self._free: list[FlatState] = []
        self._publications = 0
        self.stages: dict[str, float] = {}
        """seconds of the last publication: "copy" of the weights, "encode" and "digest" of what all nodes get"""

    @classmethod
    def connect(cls, run_dir: str | os.PathLike[str], timeout: float = 30.0) -> LearnerClient:
        """Connect to the head that runs on `run_dir`. HeadGone when none answers within `timeout` seconds."""
        path, deadline = Path(run_dir), time.monotonic() + timeout
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.settimeout(messages.SILENCE_S)
            try:
                with messages.socket_path(path) as name:
                    sock.connect(name)
                return cls(sock, path)
            except OSError as error:
                sock.close()
                if time.monotonic() > deadline:
                    raise HeadGone(
                        f"no learner answers in {path}: {error} (is `shoal learner` running there?)"
                    ) from None
                time.sleep(0.05)

    # --- the port ----------------------------------------------------------------------------------------------------

    def resume(self) -> ResumeInfo:
        """Where to go on: call once, first. HeadGone when this epoch had its trainer already."""
        warm()
        start = self._ask(messages.Resume(os.getpid()), messages.Start)
        self._start = start
        return ResumeInfo(start.epoch, start.step, Path(start.checkpoint) if start.checkpoint else None)

    def batches(self, step: int) -> Iterator[MicroBatch]:
        """Micro-batches of this step as their groups finish; blocks between them, ends after the last one.

        Each group once, always in one order: asked again from the start, it begins with the same groups in that order.
        `batch.total` is how many groups the step will have. Take the optimizer step only after the last one: the next call
        that names a later step says that this one's groups were trained on.
        """
        seen = 0
        while True:
            answer = self._ask(messages.NextBatch(step, seen), messages.Batch)
            path = self.run_dir / answer.file
            groups = unpack_groups(path.read_bytes())
            path.unlink()
            seen += len(groups)
            yield MicroBatch(step, groups, answer.last, answer.total)
            if answer.last:
                return

    def commit(self, step: int, checkpoint: Path) -> None:
        """`checkpoint` (a file or folder) is whole and synced: name it, and mark what steps before `step` consumed as trained on.
        ValueError when there is no such path."""
        if not Path(checkpoint).exists():
            raise ValueError(f"commit of step {step}: there is no checkpoint {checkpoint}")
        self._ask(messages.CommitStep(step, str(Path(checkpoint).resolve())), messages.Ok)

    def due(self, step: int) -> bool:
        """Whether a version is to be published after `step` steps: the first and the last are, and as many between as the run's
        `rollout.publish_every` says, or what it costs to bring them to the nodes. Who always publishes does no harm."""
        return self._ask(messages.Due(step), messages.IsDue).due

    def publish(self, step: int, tensors: Weights) -> None:
        """Send out the weights after `step` steps: name -> (dtype name, unsigned integer bits in the tensor's shape), named as
        in the model that nodes build from its config.json (parameters, tied ones once, and persistent buffers). The arrays
        are read before this returns, and not kept. RuntimeError before `resume`; ValueError when `step` is not past the
        last published one, or the table of names, dtypes and shapes changed within this epoch. In place of a mapping it may be a
        `WeightSource`, which says what changed since it was last published here.

        The first version of an epoch is an anchor; later ones are deltas against the one before. Beside them, for joiners and
        those who were away: every `anchor_every` publications an anchor, and a cumulative delta against the run's first version
        (so that who has the model it began with needs no anchor); every `squash_every` a cumulative delta over so many.
        """
        if self._start is None:
            raise RuntimeError("call resume() first")
        if isinstance(tensors, Mapping):
            layout = Layout.build([(name, dtype, bits.shape) for name, (dtype, bits) in tensors.items()])
        else:
            layout = tensors.layout
        base = self._published
        if base is not None and step <= base.version.step:
            raise ValueError(f"step {step} cannot be published after step {base.version.step}")
        if base is not None and base.state.layout.digest != layout.digest:
            raise ValueError("the tensor table changed within an epoch")
        started = time.perf_counter()
        state = self._free.pop() if self._free else FlatState.in_memory(layout)
        changes: dict[int, Changes] = {}
        source, self._source = self._source, None  # until this one is out
        if isinstance(tensors, Mapping):
            for name, (_, bits) in tensors.items():
                state.write_tensor(name, bits)
        else:
            if source is not tensors:  # what it knows is not what was published last
                tensors.forget()
            changes = self._take(tensors, state, base)
        self.stages = {"copy": time.perf_counter() - started}
        told = {base.version} if base is not None else set()
        if base is None:
            published = self._send_version(step, "anchor", state, None)
            self._first = load_first(self.run_dir / "versions", layout) or keep_first(self.run_dir / "versions", published)
            self._send_cumulative(published, self._first, told)
            self._milestone = published if self._start.squash_every > 1 else None
        else:
            published = self._send_version(step, "delta", state, base, changes)
            self._publications += 1
            if self._milestone is not None and self._publications % self._start.squash_every == 0:
                self._send_cumulative(published, self._milestone, told)
                self._milestone, passed = published, self._milestone
                if passed.state is not base.state:
                    self._free.append(passed.state)
            if self._publications % self._start.anchor_every == 0:
                self._send_version(step, "anchor", state, None)
                self._send_cumulative(published, self._first, told)
            if self._milestone is None or base.state is not self._milestone.state:
                self._free.append(base.state)
        self._published = published
        self._source = None if isinstance(tensors, Mapping) else tensors

    def discard(self, step: int, group_ids: Sequence[int], reason: str) -> None:
        """Training on these groups of `step` failed and this trainer stops: no later epoch gets them again."""
        self._ask(messages.Discard(step, tuple(group_ids), reason[:2000]), messages.Ok)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl; the head adds the network's own."""
        self._ask(messages.Log(step, json.dumps(dict(metrics), default=float)), messages.Ok)

    def finish(self) -> None:
        """Training is complete: the head waits for the nodes to hold the last version, says goodbye to them, and ends."""
        self._ask(messages.Finish(self._published.version.step if self._published else 0), messages.Ok)

    def close(self) -> None:
        """Leave without finishing: the learner ends, and can be resumed."""
        self._sock.close()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _send_cumulative(self, published: Reference, base: Reference | None, told: set[Version]) -> None:
        """`published` again, against `base`; not if that has the same bits, or the version was `told` against it already."""
        if base is not None and base.digest != published.digest and base.version not in told:
            told.add(base.version)
            self._send_version(published.version.step, "cumulative", published.state, base)

    def _take(self, source: WeightSource, state: FlatState, base: Reference | None) -> dict[int, Changes]:
        """Bring `state` to what `source` has now; what changed against `base`, of the segments whose changes it told."""
        assert self._start is not None
        changes: dict[int, Changes] = {}
        for segment in state.layout.segments(self._start.segment_bytes):
            found, words = source.take(segment), state.words(segment)
            if isinstance(found, np.ndarray):
                words[...] = found
            elif base is None or not apply(base.state.words(segment), found, words):
                raise ValueError(f"segment {segment.index}: changes that do not fit what was published before")
            else:
                changes[segment.index] = found
        return changes

    def _send_version(
        self, step: int, kind: str, state: FlatState, base: Reference | None, changes: Mapping[int, Changes] = NOTHING_FOUND
    ) -> Reference:
        assert self._start is not None
        started = time.perf_counter()
        folder = self.run_dir / "versions"
        table = folder / f"layout-{state.layout.digest.hex()[:16]}.msgpack"
        if not table.exists():
            write_whole(table, msgpack.packb(state.layout.to_wire()))
        begin = messages.Begin(step, kind, None, str(table.relative_to(self.run_dir)))
        if base is not None:
            begin = replace(begin, base=base.version.step, base_epoch=base.version.epoch, base_digest=base.digest)
        begun = self._ask(begin, messages.Begun)
        segments = encode_version(
            state, base.state if base else None, self._store, segment_bytes=self._start.segment_bytes,
            chunk_bytes=begun.chunk_bytes, threads=len(os.sched_getaffinity(0)), changes=changes,
        )  # fmt: skip
        for s in segments:
            digests = b"".join(s.digests)
            self._tell(messages.SegmentDone(begun.mid, s.index, size=s.size, digests=digests, changed=s.changed, words=s.words))
        self.stages.setdefault("encode", time.perf_counter() - started)
        tensor_digests = state.tensor_digests()
        spent = time.perf_counter() - started
        self.stages.setdefault("digest", spent - self.stages["encode"])
        digest = state_digest(state.layout, tensor_digests)
        self._ask(messages.SealVersion(begun.mid, b"".join(tensor_digests), digest, spent), messages.Ok)
        return Reference(Version(self._start.epoch, step), digest, state)

    def _tell(self, message: object) -> None:
        """Send what the head does not answer (`SegmentDone`)."""
        data = encode(message)
        with _told_of(f"taken {type(message).__name__}"):
            self._sock.sendall(struct.pack(">I", len(data)) + data)

    def _ask(self, request: object, expect: type[Answer]) -> Answer:
        self._tell(request)
        answer: object = messages.Wait()
        with _told_of(f"answered {type(request).__name__}"):
            while isinstance(answer, messages.Wait):
                (size,) = struct.unpack(">I", self._read(4))
                if size > MAX_FRAME:
                    raise HeadGone(f"the head sent a frame of {size} bytes")
                answer = messages.decode(self._read(size))
        if isinstance(answer, messages.Error):
            raise HeadGone(f"the head refused {type(request).__name__}: {answer.reason}")
        if not isinstance(answer, expect):
            raise HeadGone(f"the head answered {type(request).__name__} with {type(answer).__name__}")
        return answer

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self._sock.recv(size - len(data))
            if not piece:
                raise HeadGone("the head closed the connection")
            data += piece
        return data
