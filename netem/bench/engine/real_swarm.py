"""A real node at work for a real head, in `shoal bench engine`: libp2p links on loopback, the journal on disk, `shoal node` as a
process. What is not real: the trainer (nothing is trained), the tokenizer, and a task whose prompts are random tokens."""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack
import psutil
import trio

from learner.client.messages import Begin, SealVersion, SegmentDone
from learner.config import build_config
from learner.head.head import Head
from learner.journal.journal import Journal
from learner.rollouts.controller import Rollouts
from learner.rollouts.group_spec import RolloutSettings
from learner.rollouts.outcomes import Sampling
from learner.service import calm_gc
from learner.tasks.port import Prompt, Score, Task
from netem.bench.engine.models import Model, prompt
from netem.processes.children import Children, LoggedProcess
from p2p.errors import ShoalError
from p2p.identity import Identity
from p2p.membership.admission import make_ticket
from p2p.protocol.descriptor import pack_descriptor
from p2p.protocol.generation import Assign, Tokens
from p2p.weights.encode import encode_version
from p2p.weights.state import FlatState

RUN = "bench-engine"
WAIT_S = 300.0
STEPS = 1000
"""More measurements than anybody makes; each is a step's groups."""


class Numbered(Task):
    """Prompt number i is the text of i."""

    name = "numbered"

    def prompt(self, index: int) -> Prompt:
        return Prompt(index, str(index), None)

    def score(self, prompt: Prompt, completion: str) -> Score:
        return Score(0.0, False)


class RandomPrompts:
    """Makes random tokens of a prompt's number."""

    chat_template = None

    def __init__(self, length: int, vocabulary: int) -> None:
        self._length, self._vocabulary = length, vocabulary

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(prompt(int(text), self._length, self._vocabulary))

    def decode(self, ids: Any, **_: Any) -> str:
        return ""


class BenchHead:
    """The head, and how long what it hands out takes."""

    def __init__(self, head: Head, process: LoggedProcess, count: int) -> None:
        self._head, self._process, self._count = head, process, count
        self._rollouts = head.rollouts
        self._rounds = self._accepted = 0
        self._first = self._last = 0.0
        take, send = head.rollouts.on_tokens, head.rollouts._send

        def on_tokens(peer: str, message: Tokens) -> int:
            accepted = take(peer, message)
            self._accepted += accepted
            self._last = time.perf_counter()
            return accepted

        def first_send(peer: str, message: object) -> None:
            if isinstance(message, Assign) and not self._first:
                self._first = time.perf_counter()
            send(peer, message)

        head.rollouts.on_tokens = on_tokens  # type: ignore[method-assign]
        head.rollouts._send = first_send

    async def generate(self) -> dict[str, Any]:
        """The next `count` prompts, from the first assignment to the last token that the head accepted."""
        self._rounds += 1
        self._accepted, self._first = 0, 0.0
        before = self._cpu_s()
        want = self._rounds * self._count
        self._rollouts.buffers.stop_at(self._rounds)
        self._rollouts.need_dispatch()
        await self.until(lambda: len(self._rollouts.buffers.finished) >= want, "every completion")
        if self._head.reports:
            raise ShoalError(f"the head refused tokens of the bench's node: {self._head.reports[0]}")
        cpu_s = {name: after - before[name] for name, after in self._cpu_s().items()}
        return {"seconds": self._last - self._first, "tokens": self._accepted, "cpu_s": cpu_s}

    def _cpu_s(self) -> dict[str, float]:
        """Processor seconds so far of the head (this process), the agent and its engine."""
        agent = psutil.Process(self._process.pid)
        engine = agent.children(recursive=True)
        return {name: sum(t.user + t.system for t in (p.cpu_times() for p in of)) for name, of in (
            ("head", [psutil.Process()]), ("agent", [agent]), ("engine", engine),
        )}  # fmt: skip

    async def until(self, ready: Any, what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not ready():
            if self._process.poll() is not None:
                said = self._process.last_line()
                raise ShoalError(f"the bench's node ended with status {self._process.returncode}: {said}")
            if time.monotonic() > deadline:
                raise ShoalError(f"waited {WAIT_S:.0f} s for {what}")
            await trio.sleep(0.02)


async def _publish(head: Head, model: Model) -> None:
    """The first version, whole."""
    (head.run_dir / "layout").write_bytes(msgpack.packb(model.layout.to_wire()))
    state = FlatState.open(model.states[0], model.layout)
    begun = head.trainer_requests.on_begin(Begin(0, "anchor", None, "layout"))
    segment_bytes = head.config.swarm.segment_bytes
    for s in encode_version(state, None, head.store, segment_bytes=segment_bytes, chunk_bytes=begun.chunk_bytes):
        head.publisher.segment(SegmentDone(begun.mid, s.index, s.size, b"".join(s.digests), s.changed, s.words))
    head.trainer_requests.on_seal(SealVersion(begun.mid, b"".join(state.tensor_digests()), state.digest(), 0.0))


@asynccontextmanager
async def open_swarm(
    model: Model, folder: Path, engine: str, python: str, count: int, length: int, new: int, running: int, dtype: str
) -> AsyncIterator[BenchHead]:
    """A head and a node that serves the model; nothing is assigned yet."""
    from p2p.channel.libp2p import open_libp2p_network

    folder.mkdir()  # noqa: ASYNC240
    config = build_config({"run_dir": str(folder), "model": "none", "external_trainer": True}, "bench")
    identity = Identity.from_seed(b"head of the engine's bench".ljust(32, b"."))
    with Journal.open(folder / "journal.sqlite", RUN) as journal:
        async with open_libp2p_network(identity, ["/ip4/127.0.0.1/tcp/0"]) as network, trio.open_nursery() as nursery:
            settings = RolloutSettings(
                max_staleness=STEPS, groups_per_step=count, samples=1, seed=0, sampling=Sampling(new, ()),
                micro_batch_groups=count,
            )  # fmt: skip
            head = Head(
                config=config, run=RUN, run_dir=folder, identity=identity, network=network, journal=journal,
                open_rollouts=lambda head: Rollouts(
                    settings, journal, Numbered(), RandomPrompts(length, model.vocabulary), model.vocabulary, epoch=head.epoch,
                    send=head.send, nodes=head.node_views, report=head.report,
                ),
            )  # fmt: skip
            head.rollouts.buffers.stop_at(0)
            calm_gc()
            await nursery.start(head.run)
            head.publisher.offer_descriptor(pack_descriptor(model.folder))
            await _publish(head, model)
            ticket = make_ticket(identity, RUN, tuple(network.addresses)).encode()
            node = Children(folder).start(
                "node", "node", "--join", ticket, "--dir", str(folder / "node"), "--no-listen",
                "--engine", engine, "--engine-python", python, "--capacity", str(running), "--dtype", dtype,
            )  # fmt: skip
            try:
                swarm = BenchHead(head, node, count)
                await swarm.until(lambda: any(view.live for view in head.node_views()), "the node to serve")
                yield swarm
            finally:
                node.send(signal.SIGTERM)
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(node.wait)
            nursery.cancel_scope.cancel()
