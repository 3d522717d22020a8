"""The papers' ways of running rollouts (ECHO-2, RLBoost, StreamRL) and centralised baselines, on a priced fleet. What a paper
leaves open is given in its favour, as in netem.rollout_sim.other_systems."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence as Many

from netem.planning.local_engine import Priced, RLBoostTurns
from netem.rollout_sim.engine import Sequence, SimEngine
from netem.rollout_sim.other_systems import Buffer, OneStepOff, Synchronous, hand_out, has_place
from netem.rollout_sim.sim import OpenedGroup

LONG_SHARE = 0.2
"""Share of a step's prompts, those predicted longest, that StreamRL treats as long (arXiv 2504.15930)."""

LONG_LENGTH, REGULAR_LENGTH = 2.1, 0.7
"""Mean length of the long prompts' completions and of the others', over the mean of all. A lognormal with a spread of 0.6 to 0.8
and a good ranker come to these."""

FLATTENING = 0.3
"""RLBoost's B (arXiv 2510.19225) is the batch at which throughput flattens: here, where one sequence more adds less than this
share of what the first one makes."""

TYPICAL_CONTEXT = 2000
"""Tokens of context for each sequence in that estimate of B."""


class Colocated(Priced, Synchronous):
    """verl on the learner's GPUs: generate with all of them, then train with all of them. Its data parallel workers have
    equal parts of the batch, whole groups, from the beginning."""

    def start(self) -> None:
        """The local engines, if there are any, are there from the beginning and generate whenever the learner waits."""
        super().start()
        sim = self.priced
        if sim.local_kind:
            for name in sim.local_engines:
                sim.add(name, sim.local_kind, 0)

    def spread(self) -> None:
        """Each local engine gets its equal part of the batch; without local engines the nodes get what fits."""
        sim = self.priced
        if not sim.local_engines:
            hand_out(self.sim, self.queue)
            return
        while self.queue:
            sequence = self.queue.popleft()
            place = sequence.group % sim.workload.groups * len(sim.local_engines) // sim.workload.groups
            sim.place(sequence, sim.local_engines[place])


class Echo2(Priced, Buffer):
    """A versioned buffer: what is older than S is not admissible. A version every kappa steps."""

    name = "echo2"

    def start(self) -> None:
        super().start()
        self.held = self.sim.workload.prompt + self.sim.workload.mean_length()

    def spread(self) -> None:
        hand_out(self.sim, self.queue, held=self.held)

    def tick(self) -> None:
        """A full buffer holds work back: then the nodes make more than the learner can use."""
        super().tick()
        sim = self.priced
        if len(sim.groups) >= (1 + sim.settings.staleness) * sim.workload.groups:
            sim.fleet.held_back = True


class RLBoost(Priced, Synchronous):
    """Synchronous and on-policy: the reserved GPUs generate for T_seed, then train on what has come while the pool goes on."""

    name = "rlboost"
    streams = True

    def start(self) -> None:
        super().start()
        self.keeps_tokens = self.settings.migration
        self.turns = RLBoostTurns(self.priced)

    def refill(self) -> None:
        """Open the step's batch when the one before is generated, and begin the local engines' turn."""
        sim = self.sim
        if sim.step >= self.batches and not any(p.left for p in sim.groups.values()):
            for _ in range(sim.workload.groups):
                self.open(sim.step)
            self.batches += 1
            self.turns.begin()

    def tick(self) -> None:
        """Balance the engines that serve the step's version once the queue is empty, and note when the last one worked."""
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
                self.sim.move(first, idle.name)
        for empty in [e for e in engines if not e.running and not e.waiting]:
            busiest = max(engines, key=lambda e: len(e.running), default=empty)
            for sequence in list(busiest.running)[flat(busiest):]:
                self.sim.move(sequence, empty.name)

    def spread(self) -> None:
        hand_out(self.sim, self.queue)

    def stepped(self, step: int, taken: Many[OpenedGroup]) -> None:
        super().stepped(step, taken)
        self.turns.stepped(max(0.0, self.sim.now - self.last))


class StreamRL(Priced, OneStepOff):
    """Asynchronous by one step, streaming; the prompts that are predicted longest have engines of their own at a small batch."""

    name = "streamrl"
    streams = True

    def start(self) -> None:
        """No engine is set apart for long sequences until a batch is opened."""
        super().start()
        self.long: deque[Sequence] = deque()
        self.for_long: set[str] = set()
        self.mean = self.sim.workload.mean_length()

    def refill(self) -> None:
        """Open the next batch, part it by predicted length, and set engines apart for the long ones."""
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
        """Long sequences go to their own engines while both kinds wait; when one kind is through, all engines take the other."""
        if not self.queue or not self.long:
            hand_out(self.sim, self.queue, held=REGULAR_LENGTH * self.mean)
            hand_out(self.sim, self.long, held=LONG_LENGTH * self.mean)
            return
        hand_out(self.sim, self.long, self.for_long, held=LONG_LENGTH * self.mean)
        hand_out(self.sim, self.queue, self.sim.engines.keys() - self.for_long, held=REGULAR_LENGTH * self.mean)


def split(engines: Many[SimEngine], long: int, regular: int, mean: float) -> int:
    """How many of the engines serve the `long` longest sequences, the others serving the `regular` ones: the split whose slower
    side is fastest. A side takes PTL(bs) * L * ceil(M / bs) seconds for M sequences of L tokens at batch size bs (StreamRL,
    arXiv 2504.15930). `mean`: tokens of a completion."""
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
    """How many sequences an engine runs when its throughput flattens (`FLATTENING`)."""
    first = engine.model.gain(0, 0, TYPICAL_CONTEXT)
    adds = lambda n: engine.model.gain(n, TYPICAL_CONTEXT * n, TYPICAL_CONTEXT)
    return next((n for n in range(1, engine.limit) if adds(n) < FLATTENING * first), engine.limit)
