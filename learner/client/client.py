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

`examples/own_trainer.py` is that in plain PyTorch; set `external_trainer = true` for the learner that waits for it. A trainer
that chooses its prompts itself has no `batches` (`learner.client.sampling`, `rollout.groups_per_step = 0`): its steps are what it
says.

**Calls** come from one thread, in this order, each blocking until the head has answered; between two calls a trainer may take
as long as it likes. Two things may go on beside the next steps: `publish(..., wait=False)` returns once the weights are copied,
and `commit` may come late and from another thread, as checkpoints become durable, in the order of their steps. `steps` must be
the learner's `trainer.steps`: nothing is generated for steps beyond it. One trainer an epoch: a second one is refused, since it
would train on groups that the first has taken.

**Errors.** Every call may raise HeadGone: the head closed the socket, was silent for 300 s, or refused (its reason is in the
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
takes back; commit later, and what nodes make under such weights is lost with them. Of a node: nothing that this side notices.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from learner.client import messages
from learner.client.connection import HeadConnection, HeadGone, connect_to
from learner.client.port import ResumeInfo, Weights
from learner.client.publication import Publications
from learner.trajectory import MicroBatch, unpack_groups
from p2p.codec import warm


class LearnerClient:
    """Implements `learner.client.port.TrainerClient` over the head's sockets. One thread drives it, but for `commit`."""

    def __init__(
        self, connection: HeadConnection, run_dir: Path, connect_beside: Callable[[], HeadConnection] | None = None
    ) -> None:
        """`connect_beside` makes the second connection, which is free while the first waits for groups. Without it everything
        goes over the first."""
        self._connection, self.run_dir, self._connect_beside = connection, run_dir, connect_beside
        self._beside = connection
        """for versions and commits"""
        self._publications: Publications | None = None

    @classmethod
    def connect(cls, run_dir: str | os.PathLike[str], timeout: float = 30.0) -> LearnerClient:
        """Connect to the head that runs on `run_dir`. HeadGone when none answers within `timeout` seconds."""
        path, deadline = Path(run_dir), time.monotonic() + timeout
        while True:
            try:
                return cls(connect_to(path), path, partial(connect_to, path, messages.BESIDE_SOCKET))
            except OSError as error:
                if time.monotonic() > deadline:
                    raise HeadGone(
                        f"no learner answers in {path}: {error} (is `shoal learner` running there?)"
                    ) from None
                time.sleep(0.05)

    # --- the port ----------------------------------------------------------------------------------------------------

    def resume(self) -> ResumeInfo:
        """Where to go on: call once, first. HeadGone when this epoch had its trainer already."""
        warm()
        start = self._connection.ask(messages.Resume(os.getpid()), messages.Start)
        if self._connect_beside is not None:
            try:
                self._beside = self._connect_beside()
            except OSError as error:
                raise HeadGone(f"the head in {self.run_dir} takes no second connection: {error}") from None
        self._publications = Publications(self._beside, self.run_dir, start)
        return ResumeInfo(start.epoch, start.step, Path(start.checkpoint) if start.checkpoint else None)

    def batches(self, step: int) -> Iterator[MicroBatch]:
        """Micro-batches of this step as their groups finish; blocks between them, ends after the last one.

        Each group once, always in one order: asked again from the start, it begins with the same groups in that order.
        `batch.total` is how many groups the step will have. Take the optimizer step only after the last one: the next call
        that names a later step says that this one's groups were trained on.
        """
        seen = 0
        while True:
            answer = self._connection.ask(messages.NextBatch(step, seen), messages.Batch)
            path = self.run_dir / answer.file
            groups = unpack_groups(path.read_bytes())
            path.unlink()
            seen += len(groups)
            yield MicroBatch(step, groups, answer.last, answer.total)
            if answer.last:
                return

    def commit(self, step: int, checkpoint: Path) -> None:
        """`checkpoint` (a file or folder) is whole and synced: name it, and mark what steps before `step` consumed as trained on.
        ValueError when there is no such path. May come from a thread of its own, late, in the order of steps."""
        if not Path(checkpoint).exists():
            raise ValueError(f"commit of step {step}: there is no checkpoint {checkpoint}")
        self._beside.ask(messages.CommitStep(step, str(Path(checkpoint).resolve())), messages.Ok)

    def due(self, step: int) -> bool:
        """Whether a version is to be published after `step` steps: the first and the last are, and as many between as the run's
        `rollout.publish_every` says, or what it costs to bring them to the nodes. Who always publishes does no harm."""
        self._settle()
        return self._connection.ask(messages.Due(step), messages.IsDue).due

    def publish(self, step: int, tensors: Weights, *, wait: bool = True) -> None:
        """Send out the weights after `step` steps: name -> (dtype name, unsigned integer bits in the tensor's shape), named as
        in the model that nodes build from its config.json (parameters, tied ones once, and persistent buffers). The arrays
        are read before this returns, and not kept. Without `wait` comparing and encoding go on beside what follows: the next call
        of `publish`, `due` or `finish` waits for them, and raises what went wrong. RuntimeError before `resume`; ValueError when
        `step` is not past the last published one, or the table of names, dtypes and shapes changed within this epoch. In place of
        a mapping it may be a `WeightSource`, which says what changed since it was last published here.

        The first version of an epoch is an anchor; later ones are deltas against the one before. Beside them, for joiners and
        those who were away: every `anchor_every` publications an anchor, and a cumulative delta against the run's first version
        (so that who has the model it began with needs no anchor); every `squash_every` a cumulative delta over so many.
        """
        if self._publications is None:
            raise RuntimeError("call resume() first")
        self._publications.publish(step, tensors, wait=wait)

    def _settle(self) -> None:
        if self._publications is not None:
            self._publications.settle()

    def discard(self, step: int, group_ids: Sequence[int], reason: str) -> None:
        """Training on these groups of `step` failed and this trainer stops: no later epoch gets them again."""
        self._connection.ask(messages.Discard(step, tuple(group_ids), reason[:2000]), messages.Ok)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl; the head adds the network's own."""
        self._connection.ask(messages.Log(step, json.dumps(dict(metrics), default=float)), messages.Ok)

    def finish(self) -> None:
        """Training is complete: the head waits for the nodes to hold the last version, says goodbye to them, and ends."""
        self._settle()
        newest = self._publications.newest if self._publications is not None else None
        self._connection.ask(messages.Finish(newest.version.step if newest else 0), messages.Ok)

    @property
    def stages(self) -> dict[str, float]:
        """Seconds of the last publication: "copy" of the weights, "encode" and "digest" of what all nodes get. Those that it has
        been through: without `wait` some may be to come."""
        return self._publications.stages if self._publications is not None else {}

    def close(self) -> None:
        """Leave without finishing: the learner ends, and can be resumed."""
        self._connection.close()
        self._beside.close()
