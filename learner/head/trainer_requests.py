"""What the head answers its trainer: hands it batches, takes its versions, keeps what it committed and what it says.

One trainer an epoch. Must not know sockets (`trainer_server`) or torch; what the answers rest on is the head's (`RunParts`).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import trio

from learner.client import messages
from learner.client.port import BY_NODE
from learner.config import LearnerConfig
from learner.evaluation.plan import EvalPlan
from learner.evaluation.result import EvalOutcome
from learner.head.audits import Audits
from learner.head.local_engine import LocalEngine
from learner.head.metrics import MetricsFile, finite, network_metrics, read_logged
from learner.head.node_state import NodeState
from learner.head.pool_keeper import PoolKeeper
from learner.head.sample_file import SampleFile
from learner.head.step_tally import StepTally
from learner.head.trust import Trust
from learner.journal.journal import Journal
from learner.publish.publisher import Publisher
from learner.rollouts.controller import Rollouts
from learner.status.steps import StepHistory, read_metrics, surviving
from learner.trajectory import pack_groups
from p2p.errors import Refusal, ShoalError
from p2p.printable import printable
from p2p.stages import reached
from p2p.version import Version
from p2p.weights.store import delete_chunks

log = logging.getLogger("shoal.head")

EVALUATION = "eval/exact/mean"
"""The metric with the share of held-out problems that were answered right."""

MOST_TALLIES = 8
"""Steps whose groups are counted and not yet logged: a trainer logs each step before it takes the next but one."""


class RunParts(Protocol):
    """The parts of a run that answers to its trainer rest on, as the head holds them."""

    config: LearnerConfig
    run_dir: Path
    epoch: int
    journal: Journal
    publisher: Publisher
    keeper: PoolKeeper
    trust: Trust
    rollouts: Rollouts
    samples: SampleFile
    local_engine: LocalEngine | None
    audits: Audits | None
    nodes: dict[str, NodeState]
    now: Callable[[], float]
    wall: Callable[[], float]

    def tell_catalog(self) -> None:
        """Send every node what the publisher offers."""

    def still_follows(self, node: NodeState) -> bool:
        """Whether this node goes on taking versions."""

    def report(self, peer: str, refusal: Refusal) -> None:
        """Say once what went wrong, and keep it for the status page."""


class TrainerRequests:
    """The answers to one epoch's trainer, and how far it has come. `steps` is how many it is to take."""

    def __init__(self, parts: RunParts, steps: int) -> None:
        self._parts, self.steps = parts, steps
        self.step = 0
        """the last that was committed"""
        self.finished, self.trainer_gone = trio.Event(), trio.Event()
        self.trainer_pid = 0
        """0: no trainer came yet"""
        self.latest: dict[str, Any] = {}
        self.evals: dict[int, float] = {}
        """step -> held-out exact match"""
        lines = surviving(read_metrics(parts.run_dir / "metrics.jsonl"))
        self._evaluated: dict[str, list[int]] = {}
        """metric of an evaluation -> the steps of which earlier lives have it"""
        for row in lines:
            for key in (key for key in row if key.startswith("eval/")):
                self._evaluated.setdefault(key, []).append(row["step"])
        self.evaluation: dict[str, float] = {}
        """the newest result of each evaluation"""
        self.history = StepHistory(lines)
        """the run's steps, those of earlier lives among them"""
        self.checkpoint = ""
        """of the last commit"""
        self._batch_files = 0
        self._tallies: dict[int, StepTally] = {}
        """optimizer steps done with it -> what it was handed; the newest few, since a user's trainer may log none"""
        self._unscored = 0
        """groups that the lines until now have told as unscored"""
        self.logged = 0
        """lines about steps in this epoch"""
        self.news = trio.Event()
        """set, and replaced, with each of them"""
        self._metrics = MetricsFile(parts.run_dir)
        self._complaints: set[str] = set()
        self._answers: dict[type, Callable[[Any], object]] = {
            messages.Resume: self.on_resume, messages.Due: self.on_due, messages.Begin: self.on_begin,
            messages.SegmentDone: parts.publisher.segment, messages.SealVersion: self.on_seal,
            messages.CommitStep: self.on_commit, messages.Discard: self.on_discard, messages.Log: self.on_log,
            messages.Finish: lambda _: self.finished.set(),
        }  # fmt: skip
        """type of message -> what answers it, but for `NextBatch`, which waits; None is answered with `Ok`"""
        self._beside: dict[type, Callable[[Any], object]] = {kind: self._answers[kind] for kind in messages.BESIDE}

    async def answer(self, request: object) -> object:
        """The answer to any message of the trainer's; takes as long as it takes. ShoalError: refused, and its text says why."""
        if isinstance(request, messages.NextBatch):
            return await self.on_next(request)
        answer = self._answers.get(type(request))
        if answer is None:
            return messages.Error(f"unexpected {type(request).__name__}")
        return await _answered(answer, request)

    async def answer_beside(self, request: object) -> object:
        """The answer to what the trainer says on its second connection, while it may be waiting for groups on the first."""
        answer = self._beside.get(type(request))
        if answer is None:
            return messages.Error(f"unexpected {type(request).__name__} on the connection for versions and commits")
        if not self.trainer_pid:
            return messages.Error("no trainer has resumed in this epoch")
        return await _answered(answer, request)

    def on_gone(self, reason: str) -> None:
        """The connection that `answer` served is over."""
        if not self.finished.is_set() and self.trainer_pid:
            log.error("the trainer is gone: %s", reason)
            self.trainer_gone.set()

    def on_resume(self, message: messages.Resume) -> messages.Start:
        """Where the trainer goes on. ShoalError for a second trainer in one epoch."""
        if self.trainer_pid:
            # A second trainer of one epoch would train on groups the first has taken: only a new epoch fences it.
            raise ShoalError("this epoch had its trainer already; start the learner again with --resume")
        self.trainer_pid = message.pid
        last = self._parts.journal.last_commit()
        self.step = last.step if last else 0
        self.checkpoint = last.checkpoint if last else ""
        self.history.take_back(self.step)
        swarm = self._parts.config.swarm
        return messages.Start(
            self._parts.epoch, self.step, checkpoint=last.checkpoint if last else "", segment_bytes=swarm.segment_bytes,
            anchor_every=swarm.anchor_every, squash_every=swarm.squash_every,
        )  # fmt: skip

    def on_due(self, message: messages.Due) -> messages.IsDue:
        current = self._parts.publisher.current
        published = current.step if current is not None and current.epoch == self._parts.epoch else None
        return messages.IsDue(message.step >= self.steps or self._parts.keeper.pool.due(message.step, published))

    def on_begin(self, message: messages.Begin) -> messages.Begun:
        """A version is about to be told, segment by segment. ShoalError for one that is older than what is out."""
        current = self._parts.publisher.current
        if current is not None and current.epoch == self._parts.epoch and message.step < current.step:
            raise ShoalError(f"step {message.step} is out of order: version {current} is out")
        self._parts.rollouts.buffers.took(message.step)
        begun = self._parts.publisher.begin(message)
        if message.kind == "delta":
            reached(Version(self._parts.epoch, message.step), "begun")
        return begun

    async def on_seal(self, message: messages.SealVersion) -> messages.Ok:
        """A version is whole: sign it, write it down, let groups be generated under it, and drop what nobody needs any more."""
        parts, rollouts, publisher = self._parts, self._parts.rollouts, self._parts.publisher
        published = publisher.seal(message)
        if published.kind == "delta":
            reached(published.version, "sealed")
        base = str(published.base) if published.base is not None else ""
        parts.journal.record_version(published.version, published.kind, published.mid.hex(), base, published.size)
        rollouts.published(published.version)
        if publisher.published.begun == 1:  # the epoch's first anchor: those who wait for it hear of it now
            parts.tell_catalog()
        readers = [node.reading_from or node.version for node in parts.nodes.values() if parts.still_follows(node)]
        keep = False
        if parts.audits is not None:
            keep = parts.audits.sealed(published)
            readers += [parts.audits.reads_from] if parts.audits.reads_from is not None else []
        gone = publisher.prune(readers)
        rollouts.need_dispatch()
        # While the trainer waits for this answer: it must not be writing a chunk that is being deleted. In a thread: with an
        # anchor thousands of files go, and on a busy disk the loop stood still for over a minute, until no link was left.
        if gone:
            await rollouts.buffers.in_thread(delete_chunks, gone)
        return messages.Ok(keep_whole=keep)

    async def on_next(self, message: messages.NextBatch) -> messages.Batch:
        """The step's next groups, in a file of the run directory; waits until there are enough of them. ShoalError where none are
        generated for training."""
        parts, engine = self._parts, self._parts.local_engine
        if not parts.rollouts.settings.groups_per_step:
            raise ShoalError("rollout.groups_per_step is 0: this run's trainer samples through the endpoint, and gets no groups")
        began, pool, rollouts = parts.now(), parts.keeper.pool, parts.rollouts
        if not message.seen:
            pool.stepped(message.step, began)
            if engine is not None:
                rollouts.buffers.advance(message.step)
                engine.begin(rollouts)
        if engine is not None:
            groups, last = await engine.next_groups(rollouts, message.step, message.seen)
        else:
            groups, last = await rollouts.buffers.next_groups(message.step, message.seen)
        self._tally(message.step + 1, anew=not message.seen).add(groups)
        parts.trust.handed(groups)
        pool.waited(parts.now() - began, sum(len(t.completion_ids) for g in groups for t in g.trajectories))
        self._batch_files += 1
        name = f"batches/{parts.epoch}-{message.step}-{self._batch_files}.msgpack"
        path = parts.run_dir / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(pack_groups(groups))
        return messages.Batch(name, last, parts.config.rollout.groups_per_step)

    def _tally(self, step: int, *, anew: bool) -> StepTally:
        if anew:
            self._tallies.pop(step, None)
        tally = self._tallies.setdefault(step, StepTally())
        while len(self._tallies) > MOST_TALLIES:
            del self._tallies[next(iter(self._tallies))]
        return tally

    def on_commit(self, message: messages.CommitStep) -> None:
        self._parts.samples.committed(self._parts.rollouts.buffers.commit(message.step, message.checkpoint))
        self.step, self.checkpoint = message.step, message.checkpoint
        self._parts.keeper.keep()

    def on_discard(self, message: messages.Discard) -> None:
        self._parts.report("trainer", Refusal(f"step {message.step}: {message.reason}"))
        self._parts.rollouts.buffers.discard(message.group_ids)

    def on_log(self, message: messages.Log) -> None:
        """Write the trainer's numbers to metrics.jsonl, with those of the network, the pool and the local engine. What is no
        number, and a full disk, are said; the run goes on."""
        parts, rollouts, publisher = self._parts, self._parts.rollouts, self._parts.publisher
        try:
            trained = read_logged(message.metrics)
        except ValueError as error:
            trained = {}
            self._complain("the trainer's metrics cannot be read", f"step {message.step}: {error}")
        by_node = trained.pop(BY_NODE, None)
        parts.trust.trained_on(by_node)
        publisher.count_traffic()
        network = network_metrics(publisher.published, list(parts.nodes.values()), publisher.current)
        if rollouts.buffers.redundant:
            network |= rollouts.buffers.redundancy.metrics()
        network |= parts.keeper.pool.metrics(parts.now())
        network |= parts.local_engine.last if parts.local_engine is not None else {}
        network |= parts.audits.metrics() if parts.audits is not None else {}
        tally = self._tallies.pop(message.step, None)
        network |= tally.metrics() if tally is not None else {}
        if tally is not None and by_node is None and not all(map(parts.trust.standing.trusts, parts.nodes)):
            what = "the trainer does not say what each node's tokens come to"
            self._complain(what, "only audits watch the nodes that are not trusted (docs/own-trainer.md)")
        network["groups/unscored"] = rollouts.buffers.unscored_groups - self._unscored
        self._unscored = rollouts.buffers.unscored_groups
        own = {"step": message.step, "epoch": parts.epoch, "time": parts.wall()}
        self.latest = finite(own | trained | network | own)  # first in the line; a trainer's keys of these names do not count
        if EVALUATION in trained:
            value = self.latest[EVALUATION]
            if isinstance(value, (int, float)):
                self.evals[message.step] = value
            else:
                self._complain(f"the trainer's {EVALUATION} is no number", f"step {message.step}: {value!r:.80}")
        self._metrics.append(self.latest)  # first: whatever comes of the views' history, the line is kept
        self.history.add(self.latest)
        self.logged += 1
        self.news.set()
        self.news = trio.Event()

    def evaluated(self, plan: EvalPlan) -> int | None:
        """The newest step of earlier lives, as far as it is committed, whose version this evaluation was made of; None: there is
        none."""
        last = self._parts.journal.last_commit()
        committed = last.step if last else 0
        return max((step for step in self._evaluated.get(f"{plan.prefix}exact/mean", ()) if step <= committed), default=None)

    def on_evaluated(self, found: EvalOutcome) -> None:
        """Write what an evaluation found to metrics.jsonl, on a line of its own that belongs to the version's step."""
        values = finite(found.metrics())
        line = {"step": found.version.step, "epoch": self._parts.epoch, "time": self._parts.wall()} | values
        self._metrics.append(line)
        self.evaluation |= values
        if not found.plan.name:
            self.evals[found.version.step] = found.exact
        self.history.add(line)

    def _complain(self, what: str, why: str) -> None:
        """Say once in this epoch what is wrong with the trainer's messages."""
        if what not in self._complaints:
            self._complaints.add(what)
            log.warning("%s: %s (said once; the run goes on)", what, printable(why))


async def _answered(answer: Callable[[Any], object], request: object) -> object:
    found = answer(request)
    return (await found if isinstance(found, Awaitable) else found) or messages.Ok()
