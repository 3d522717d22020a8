"""What the head does for its trainer: hands it batches, takes its versions, keeps what it committed and what it says.

One trainer an epoch. Must not know sockets (`trainer_port`) or torch; what the answers rest on is the head's.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from learner.client.messages import (
    Batch,
    Begin,
    Begun,
    CommitStep,
    Discard,
    Due,
    Finish,
    IsDue,
    Log,
    NextBatch,
    Resume,
    SealVersion,
    SegmentDone,
    Start,
)  # fmt: skip
from learner.head.metrics import MetricsLog, network_metrics
from learner.head.trainer_server import TrainerHandler
from learner.trajectory import pack_groups
from p2p.errors import Refusal, ShoalError

if TYPE_CHECKING:
    from learner.head.head import Head

log = logging.getLogger("shoal.head")


class TrainerRequests(TrainerHandler):
    def __init__(self, head: Head) -> None:
        self._head = head
        self.metrics = MetricsLog(head.run_dir)
        self.trainer_pid = 0
        self.latest: dict[str, Any] = {}
        self.evals: dict[int, float] = {}
        """step -> held-out exact match"""
        self._batch_files = 0

    async def on_resume(self, message: Resume) -> Start:
        head = self._head
        if self.trainer_pid:
            # A second trainer of one epoch would train on groups the first has taken: only a new epoch fences it.
            raise ShoalError("this epoch had its trainer already; start the learner again with --resume")
        self.trainer_pid = message.pid
        last = head.journal.last_commit()
        head.step = last.step if last else 0
        swarm = head.config.swarm
        return Start(
            head.epoch, head.step, last.checkpoint if last else "", swarm.segment_bytes, swarm.anchor_every, swarm.squash_every
        )  # fmt: skip

    async def on_due(self, message: Due) -> IsDue:
        head = self._head
        current = head.publisher.current
        published = current.step if current is not None and current.epoch == head.epoch else None
        return IsDue(message.step >= head.steps or head.keeper.pool.due(message.step, published))

    async def on_begin(self, message: Begin) -> Begun:
        head = self._head
        head.ready_rollouts.advance(message.step)
        return Begun(*head.publisher.begin(message))

    async def on_segment(self, message: SegmentDone) -> None:
        self._head.publisher.segment(message)

    async def on_seal(self, message: SealVersion) -> None:
        head = self._head
        published = head.publisher.seal(message)
        base = str(published.base) if published.base is not None else ""
        head.journal.record_version(published.version, published.kind, published.mid.hex(), base, published.size)
        head.ready_rollouts.published(published.version)
        if head.publisher.history.begun == 1:  # the epoch's first anchor: those who wait for it hear of it now
            for node in head.nodes.values():
                head.send_catalog(node.link)
        # Here, while the trainer waits for this answer: it must not be writing a chunk that is being dropped.
        head.publisher.prune(node.reading_from or node.version for node in head.nodes.values() if head.still_follows(node))
        head.ready_rollouts.need_dispatch()

    async def on_next(self, message: NextBatch) -> Batch:
        head = self._head
        began, pool, rollouts = head.now(), head.keeper.pool, head.ready_rollouts
        if not message.seen:
            pool.stepped(message.step, began)
            if head.local_engine is not None:
                rollouts.advance(message.step)
                head.local_engine.begin(rollouts)
        source = head.local_engine.next_groups(rollouts, message.step, message.seen) if head.local_engine is not None else None
        groups, last = await (source or rollouts.next_groups(message.step, message.seen))
        pool.waited(head.now() - began, sum(len(t.completion_ids) for g in groups for t in g.trajectories))
        self._batch_files += 1
        name = f"batches/{head.epoch}-{message.step}-{self._batch_files}.msgpack"
        path = head.run_dir / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(pack_groups(groups))
        return Batch(name, last, head.config.rollout.groups_per_step)

    async def on_commit(self, message: CommitStep) -> None:
        head = self._head
        head.ready_rollouts.commit(message.step, message.checkpoint)
        head.step = message.step
        head.keeper.keep()

    async def on_discard(self, message: Discard) -> None:
        head = self._head
        head.report("trainer", Refusal(f"step {message.step}: {message.reason}"))
        head.ready_rollouts.discard(message.group_ids)

    async def on_log(self, message: Log) -> None:
        head = self._head
        trained: dict[str, Any] = json.loads(message.metrics)
        head.publisher.count_traffic()
        network = network_metrics(head.publisher.history, list(head.nodes.values()), head.publisher.current)
        network["off_policy/dropped"] = head.ready_rollouts.dropped
        if head.ready_rollouts.redundant:
            network |= head.ready_rollouts.redundancy.metrics()
        network |= head.keeper.pool.metrics(head.now())
        network |= head.local_engine.last if head.local_engine is not None else {}
        self.latest = {"step": message.step, "epoch": head.epoch, "time": head.wall(), **trained, **network}
        if "eval/exact/mean" in trained:
            self.evals[message.step] = trained["eval/exact/mean"]
        self.metrics.write(self.latest)

    async def on_finish(self, message: Finish) -> None:
        self._head.finished.set()

    async def on_trainer_gone(self, reason: str) -> None:
        head = self._head
        if not head.finished.is_set() and self.trainer_pid:
            log.error("the trainer is gone: %s", reason)
            head.trainer_gone.set()
