"""A learner and a pool of engines on simulated time. Pure; a policy (`ours`, `staleflow`, `other_systems`) decides what is
generated when and where.

The learner works on a step's groups one after another (streaming: as they come; else once all are there), updates, hands the
version out; nodes serve it `spread_s` later. What a policy does takes no time of its own.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from statistics import fmean

from netem.rollout_sim.engine import Sequence, SimEngine
from netem.rollout_sim.fleet import QWEN3_8B, EngineKind, Seat, Served
from netem.rollout_sim.workload import Workload
from netem.timeline import Timeline
from node.serving.batcher import FLUSH_S
from p2p.errors import ShoalError

JOIN_S = 30.0
"""Seconds from a node's coming until it serves the current version: it fetches the model first."""

TICK_S = 1.0
"""Simulated seconds between two calls of a policy's `tick`."""

MAX_SIMULATED_S = 14 * 86_400.0
"""Simulated seconds, 14 days, after which a policy counts as stuck."""


@dataclass(eq=False, slots=True)
class OpenedGroup:
    """A group that was opened."""

    group_id: int
    """number of its prompt, too"""
    feature: float
    """what a length predictor sees of the prompt"""
    version: int
    """version that it was opened at"""
    members: list[Sequence]
    left: int
    """members that have not ended"""
    since: float
    """when it was opened"""

    @property
    def oldest(self) -> int:
        """The version of its oldest token."""
        return min(m.oldest for m in self.members)


@dataclass(frozen=True, slots=True)
class SimSettings:
    """What a run is made of, beside workload and fleet."""

    staleness: int = 3
    """the bound S, in learner steps"""
    steps: int = 16
    warm: int = 4
    """steps at the beginning that are not counted"""
    seed: int = 0
    """of the workload"""
    limit: int = 256
    """sequences an engine runs at once"""
    recompute: bool = True
    """sequences under way have their KV made anew when their node takes a version"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one run, over the steps that count."""

    policy: str
    steps_per_hour: float
    tokens_per_s: float
    """tokens trained on, a second"""
    idle: float
    """share of the time in which the learner waited"""
    learner_bound: float
    """steps per hour, as a share of those of a learner that never waits"""
    staleness_max: int
    staleness_mean: float
    """mean over trajectories of the consuming step less the version of the oldest token"""
    made: float
    """tokens generated for each token trained on"""
    lost: float
    """tokens that nodes took with them when they went"""
    held: float
    """tokens that those nodes' sequences had made"""
    moved: int
    """sequences moved between living nodes"""
    aborted: int
    """groups given up"""
    mean_length: float
    """tokens of a completion that was trained on"""


class RolloutPolicy:
    """What a way of running rollouts decides. `sim` is set before `start`."""

    name = "policy"
    """name in tables"""
    streams = False
    """whether the learner begins before a step's groups are all there"""
    updates_in_flight = True
    """whether a running sequence's KV is computed anew when its node takes a version"""
    keeps_tokens = False
    """whether a lost node's sequences go on elsewhere with their tokens"""
    sim: RolloutSimulation

    def start(self) -> None:
        """Called once, at time 0."""

    def tick(self) -> None:
        """Called every `tick_s` simulated seconds."""

    def finished(self, prompt: OpenedGroup) -> None:
        """All its members have ended."""

    def batch(self, step: int) -> Many[OpenedGroup]:
        """The groups that the learner may train on in this step so far, in order."""
        raise NotImplementedError

    def complete(self, step: int) -> bool:
        """Whether the step's groups are all there."""
        return len(self.batch(step)) >= self.sim.workload.groups

    def stepped(self, step: int, taken: Many[OpenedGroup]) -> None:
        """The learner took its step on these; `step` steps are done."""

    def returned(self, sequences: Many[Sequence]) -> None:
        """Nodes went away, or gave these back: they wait again."""
        raise NotImplementedError


@dataclass
class RolloutSimulation(Timeline):
    """One run: `run` it once."""

    seats: Many[Seat]
    workload: Workload
    policy: RolloutPolicy
    settings: SimSettings = SimSettings()
    model: Served = QWEN3_8B
    tick_s: float = TICK_S
    step: int = 0
    version: int = 0
    """newest version that nodes serve"""
    engines: dict[str, SimEngine] = field(default_factory=dict)
    serves: dict[str, int] = field(default_factory=dict)
    """engine -> the version it serves"""
    groups: dict[int, OpenedGroup] = field(default_factory=dict)
    moved: int = 0
    aborted: int = 0
    lost: float = 0.0
    held: float = 0.0
    busy: bool = False
    """the learner computes"""
    opened: int = 0
    """groups, so far"""
    _trained: int = 0
    _work_s: float = 0.0
    _marks: list[tuple[float, float, float]] = field(default_factory=list)
    """at the end of each step: (now, work seconds, tokens made)"""
    _ages: list[list[int]] = field(default_factory=list)
    _tokens: list[int] = field(default_factory=list)
    _made_gone: float = 0.0

    # ---- running

    def run(self) -> Outcome:
        """Run to the last step. ShoalError when the policy is stuck."""
        self.policy.sim = self
        for seat in self.seats:
            for start, end in seat.there:
                join = start + (JOIN_S if start > 0 else 0.0)
                if join < end:  # else it is gone before it serves
                    self.at(join, self._up, seat)
                    if end < float("inf"):
                        self.at(end, self._down, seat.name)
        self.after(0.0, self.policy.start)
        self.after(0.0, self._tick)
        while self.step < self.settings.steps:
            if self.now > MAX_SIMULATED_S:
                raise ShoalError(f"{self.policy.name} did {self.step} steps in {self.now:.0f} s: it is stuck")
            self.next()
        return self._outcome()

    def _tick(self) -> None:
        self.policy.tick()
        self.look()
        self.after(self.tick_s, self._tick)

    # ---- for policies

    def open(self, version: int) -> OpenedGroup:
        """A new group: the next prompt of the workload."""
        index = self.opened
        self.opened += 1
        feature, lengths = self.workload.group(index, self.settings.seed)
        members = [Sequence(index, m, self.workload.prompt, n) for m, n in enumerate(lengths)]
        prompt = OpenedGroup(index, feature, version=version, members=members, left=len(members), since=self.now)
        self.groups[index] = prompt
        return prompt

    def place(self, sequence: Sequence, node: str) -> None:
        """Give a waiting sequence to a node."""
        engine = self.touch(node)
        if sequence.oldest < 0:
            sequence.oldest = self.serves[node]
        engine.add(sequence)
        self._arm(engine)

    def take(self, sequence: Sequence) -> None:
        """Take a sequence from its node, with its tokens."""
        engine = self.touch(sequence.node)
        engine.remove(sequence)
        sequence.node = ""
        sequence.attempt += 1
        self._arm(engine)

    def move(self, sequence: Sequence, node: str) -> None:
        """Take a sequence to another node, with its tokens."""
        self.take(sequence)
        self.moved += 1
        self.place(sequence, node)

    def abort(self, prompt: OpenedGroup) -> None:
        """Give a group up."""
        for sequence in prompt.members:
            if sequence.node:
                self.take(sequence)
        self.groups.pop(prompt.group_id, None)
        self.aborted += 1

    def touch(self, node: str) -> SimEngine:
        """A node's engine, brought to the present."""
        engine = self.engines[node]
        engine.advance(self.now)
        return engine

    def look(self) -> None:
        """Let the learner begin with the next group, if it is idle and there is one."""
        if self.busy:
            return
        groups = self.workload.groups
        if self._trained == groups:
            return
        batch = self.policy.batch(self.step)
        if self._trained < min(len(batch), groups) and (self.policy.streams or self._trained or self.policy.complete(self.step)):
            self.busy = True
            self.after(self.workload.train_s / groups, self._trained_one)

    # ---- inside

    def _trained_one(self) -> None:
        self._work_s += self.workload.train_s / self.workload.groups
        self._trained += 1
        self.busy = False
        if self._trained == self.workload.groups:
            self.busy = True
            self.after(self.workload.update_s, self._updated)
        else:
            self.look()

    def _updated(self) -> None:
        self._work_s += self.workload.update_s
        taken = list(self.policy.batch(self.step))[: self.workload.groups]
        self._ages.append([self.step - m.oldest for p in taken for m in p.members])
        self._tokens.append(sum(m.length for p in taken for m in p.members))
        for prompt in taken:
            del self.groups[prompt.group_id]
        self.step += 1
        self._trained, self.busy = 0, False
        made = self._made_gone + sum(e.total for e in self.engines.values())
        self._marks.append((self.now, self._work_s, made))
        self.policy.stepped(self.step, taken)
        self._publish(self.step)
        self.look()

    def _publish(self, version: int) -> None:
        self.after(self.workload.spread_s, self._serve, version)

    def _serve(self, version: int) -> None:
        self.version = version
        for name in list(self.engines):
            self._install(name, version)

    def _install(self, name: str, version: int) -> None:
        """A node serves the version from now on."""
        engine = self.touch(name)
        self.serves[name] = version
        if self.settings.recompute and self.policy.updates_in_flight:
            engine.debt += engine.prefill_s * engine.context
        self._arm(engine)

    def _up(self, seat: Seat) -> None:
        self.add(seat.name, seat.kind.engine(self.model, self.settings.limit), self.version)

    def add(self, name: str, kind: EngineKind, version: int) -> None:
        """There is one engine more, which serves that version."""
        self.serves[name] = version
        self.engines[name] = SimEngine(name, kind.model, kind.prefill_s, room=kind.room, limit=kind.limit, at=self.now)

    def _down(self, name: str, flushed: bool = False) -> float:
        """A node is lost; `flushed`: it handed over all tokens that it had. Returns how many it made while it was there."""
        engine = self.engines.pop(name)
        engine.advance(self.now)
        engine.stamp += 1
        del self.serves[name]
        self._made_gone += engine.total
        pace = engine.model.pace(max(1, len(engine.running)), engine.context)
        running = set(engine.running)
        held = engine.gone()
        for sequence in held:
            self.held += sequence.made
            kept = max(0.0, sequence.made - (FLUSH_S * pace if sequence in running else 0.0)) if self.policy.keeps_tokens else 0.0
            kept = sequence.made if flushed else kept
            self.lost += sequence.made - kept
            sequence.made = kept
            sequence.attempt += 1
            if not kept:
                sequence.oldest = -1
        self.policy.returned(held)
        return engine.total

    def _arm(self, engine: SimEngine) -> None:
        engine.stamp += 1
        at = engine.next_at()
        if at < float("inf"):
            self.at(at, self._due, engine, engine.stamp)

    def _due(self, engine: SimEngine, stamp: int) -> None:
        if engine.stamp != stamp:
            return
        engine.advance(self.now)
        ended = engine.settle()
        for sequence in ended:
            sequence.node = ""
            prompt = self.groups[sequence.group]
            prompt.left -= 1
            if not prompt.left:
                self._finished(prompt)
        self._arm(engine)
        if ended:
            self.look()

    def _finished(self, prompt: OpenedGroup) -> None:
        """All members of a group have ended."""
        self.policy.finished(prompt)

    def _outcome(self) -> Outcome:
        warm = self.settings.warm
        (t0, w0, m0), (t1, w1, m1) = self._marks[warm - 1], self._marks[-1]
        ages = [a for step in self._ages[warm:] for a in step]
        trained = sum(self._tokens[warm:])
        steps = len(self._marks) - warm
        took = t1 - t0
        bound = self.workload.train_s + self.workload.update_s
        return Outcome(
            policy=self.policy.name, steps_per_hour=3600 * steps / took, tokens_per_s=trained / took,
            idle=1 - (w1 - w0) / took, learner_bound=bound * steps / took, staleness_max=max(ages), staleness_mean=fmean(ages),
            made=(m1 - m0) / trained, lost=self.lost, held=self.held, moved=self.moved, aborted=self.aborted,
            mean_length=trained / (steps * self.workload.groups * self.workload.samples),
        )  # fmt: skip
