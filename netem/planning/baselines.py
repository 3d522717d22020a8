"""The papers' ways of running rollouts (ECHO-2, RLBoost, StreamRL) and centralised baselines, on a priced fleet. What a paper
leaves open is given in its favour, as in netem.rollout_sim.other_systems. """

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence as Many

from netem.planning.cost_scenario import PolicySection
from netem.planning.local_engine import Priced, Seeder
from netem.rollout_sim.engine import Sequence, SimEngine
from netem.rollout_sim.other_systems import Buffer, OneStepOff, Synchronous, has_place
from netem.rollout_sim.sim import OpenedGroup

LONG_SHARE = 0.2
"""Of the prompts, StreamRL takes the longest predicted for long."""

LONG_LENGTH, REGULAR_LENGTH = 2.1, 0.7
"""Of those and of the others, over the mean: what a lognormal with a spread of 0.6 to 0.8 and a good ranker come to."""

FLAT = 0.3
"""RLBoost's B: where one sequence more adds less than this share of what the first one makes."""


class Colocated(Synchronous, Priced):
    """verl on the learner's own GPUs: generate with all of them, then train with all of them. Its data parallel workers have
    equal parts of the batch, whole groups, from the beginning. """

    def __init__(self, settings: PolicySection) -> None:
        self.settings = settings

    def start(self) -> None:
        super().start()
        sim = self.priced
        if sim.own_kind:
            for name in sim.own:
                sim._add(name, sim.own_kind, 0)

    def spread(self) -> None:
        sim = self.priced
        if not sim.own:
            _spread(self, self.queue)
            return
        while self.queue:
            sequence = self.queue.popleft()
            sim.place(sequence, sim.own[sequence.group % sim.workload.groups * len(sim.own) // sim.workload.groups])

    def finished(self, prompt: OpenedGroup) -> None:
        super().finished(prompt)
        self.priced.ended(prompt)


class CentralOneStepOff(OneStepOff, Priced):
    """Centralised and asynchronous by one step, without streaming."""

    def __init__(self, settings: PolicySection) -> None:
        self.settings = settings

    def finished(self, prompt: OpenedGroup) -> None:
        super().finished(prompt)
        self.priced.ended(prompt)


class Echo2(Buffer, Priced):
    """A versioned buffer: what is older than S is not admissible. A version every kappa steps."""

    name = "echo2"

    def __init__(self, settings: PolicySection) -> None:
        self.settings = settings

    def start(self) -> None:
        super().start()
        self.held = self.sim.workload.prompt + self.sim.workload.mean_length()

    def spread(self) -> None:
        _spread(self, self.queue, None, self.held)

    def finished(self, prompt: OpenedGroup) -> None:
        super().finished(prompt)
        self.priced.ended(prompt)

    def tick(self) -> None:
        super().tick()
        sim = self.priced
        if len(sim.groups) >= (1 + sim.settings.staleness) * sim.workload.groups:
            sim.kept_back = True


class RLBoost(Synchronous, Priced):
    """Synchronous and on-policy: the reserved GPUs generate for T_seed, then train on what has come while the pool goes on."""

    name = "rlboost"
    streams = True

    def __init__(self, settings: PolicySection) -> None:
        self.settings = settings
        self.keeps_tokens = settings.migration

    def start(self) -> None:
        super().start()
        self.seeder = Seeder(self.priced, self.settings)

    def refill(self) -> None:
        sim = self.sim
        if sim.step >= self.batches and not any(p.left for p in sim.groups.values()):
            for _ in range(sim.workload.groups):
                self.open(sim.step)
            self.batches += 1
            self.seeder.begin()

    def tick(self) -> None:
        super().tick()
        sim = self.priced
        if not self.queue:
            self._balance([sim.touch(n) for n in sim.engines if sim.serves[n] == sim.step])
        if any(p.left for p in sim.groups.values()):
            self.last = sim.now

    def _balance(self, engines: Many[SimEngine]) -> None:
        """What waits in the longest queue goes to who has none and room; who runs nothing takes of the most loaded what is beyond
        the batch size at which its throughput flattens."""
        for idle in engines:
            while longest := max((e for e in engines if e.waiting), key=lambda e: len(e.waiting), default=None):
                if not has_place(idle, (first := longest.waiting[0]).prompt + first.made):
                    break
                self._move(first, idle)
        for empty in [e for e in engines if not e.running and not e.waiting]:
            busiest = max(engines, key=lambda e: len(e.running), default=empty)
            for sequence in list(busiest.running)[flat(busiest):]:
                self._move(sequence, empty)

    def _move(self, sequence: Sequence, to: SimEngine) -> None:
        self.sim.take(sequence)
        self.sim.moved += 1
        self.sim.place(sequence, to.name)

    def spread(self) -> None:
        _spread(self, self.queue)

    def finished(self, prompt: OpenedGroup) -> None:
        super().finished(prompt)
        self.priced.ended(prompt)

    def stepped(self, step: int, taken: Many[OpenedGroup]) -> None:
        super().stepped(step, taken)
        self.seeder.remote_wait_s = max(0.0, self.sim.now - self.last)
        self.seeder.stepped(holds=False)


class StreamRL(OneStepOff, Priced):
    """Asynchronous by one step, streaming; the prompts that are predicted longest have engines of their own at a small batch."""

    name = "streamrl"
    streams = True

    def __init__(self, settings: PolicySection) -> None:
        self.settings = settings

    def start(self) -> None:
        super().start()
        self.long: deque[Sequence] = deque()
        self.for_long: set[str] = set()
        self.mean = self.sim.workload.mean_length()

    def refill(self) -> None:
        before = len(self.queue)
        if self.sim.engines:
            super().refill()
        if len(self.queue) == before:
            return
        sim = self.sim
        prompts = sorted({s.group for s in self.queue}, key=lambda g: -sim.groups[g].feature)
        chosen = set(prompts[: max(1, round(LONG_SHARE * len(prompts)))])
        rank = {g: i for i, g in enumerate(prompts)}
        members = sorted(self.queue, key=lambda s: rank[s.group])
        self.long = deque(s for s in members if s.group in chosen)
        self.queue = deque(s for s in members if s.group not in chosen)
        engines = [sim.touch(n) for n in sim.engines]
        self.for_long = set(list(sim.engines)[: split(engines, len(self.long), len(self.queue), self.mean)])

    def spread(self) -> None:
        if not self.queue or not self.long:  # who is through helps the others
            _spread(self, self.queue, None, REGULAR_LENGTH * self.mean)
            _spread(self, self.long, None, LONG_LENGTH * self.mean)
            return
        _spread(self, self.long, self.for_long, LONG_LENGTH * self.mean)
        _spread(self, self.queue, set(self.sim.engines) - self.for_long, REGULAR_LENGTH * self.mean)

    def finished(self, prompt: OpenedGroup) -> None:
        super().finished(prompt)
        self.priced.ended(prompt)


def split(engines: Many[SimEngine], long: int, regular: int, mean: float) -> int:
    """How many engines the long ones get: the split whose slower side is fastest (PTL(bs) * L * ceil(M / bs) for each side)."""
    best, found, e = math.inf, 1, engines[0]
    for n in range(1, len(engines)):
        sides = []
        for count, members, length in ((n, long, LONG_LENGTH * mean), (len(engines) - n, regular, REGULAR_LENGTH * mean)):
            each = math.ceil(members / count)
            at_once = max(1, min(each, e.limit, int(e.room / length)))
            sides.append(e.model.step_s(at_once, at_once * length / 2) * length * math.ceil(each / at_once))
        if max(sides) < best:
            best, found = max(sides), n
    return found


def flat(engine: SimEngine) -> int:
    """Sequences from which on one more adds little."""
    first = engine.model.gain(0, 0, 2000)
    return next((n for n in range(1, engine.limit) if engine.model.gain(n, 2000 * n, 2000) < FLAT * first), engine.limit)


def _spread(policy: Priced, queue: deque[Sequence], names: set[str] | None = None, held: float = 0.0) -> None:
    """From the queue to the emptiest engines that serve what the sequences are of, or newer. `held`: tokens of context for each
    that an engine's memory is to have."""
    sim = policy.priced
    free = {n: sim.touch(n) for n in sim.engines if names is None or n in names}
    place = lambda e: has_place(e, sim.workload.prompt) and len(e.running) * held < e.room
    free = {n: e for n, e in free.items() if place(e)}
    passed: list[Sequence] = []
    while queue and free:
        sequence = queue.popleft()
        least = max(sim.groups[sequence.group].version, sequence.oldest)
        able = [n for n in free if sim.serves[n] >= least]
        if not able:
            passed.append(sequence)
            if len(passed) > 64:
                break
            continue
        name = min(able, key=lambda n: free[n].context / free[n].room)
        sim.place(sequence, name)
        if not place(free[name]):
            del free[name]
    queue.extendleft(reversed(passed))
