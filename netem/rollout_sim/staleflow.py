"""What policies with the staleness ledger share (production's), and StaleFlow's coordinator on it."""

from __future__ import annotations

from collections.abc import Sequence as Many

from learner.rollouts.ledger import Ledger
from netem.rollout_sim.engine import FILL, Sequence
from netem.rollout_sim.other_systems import has_place
from netem.rollout_sim.sim import OpenedGroup, RolloutPolicy


class Bounded(RolloutPolicy):
    """Groups are reserved before they are generated, occupy an entry when finished, are consumed with their step."""

    streams = True

    def start(self) -> None:
        s = self.sim
        self.ledger = Ledger(s.settings.staleness, s.workload.groups, 0)
        self.pending: dict[tuple[int, int], Sequence] = {}

    def reserve(self, version: int) -> OpenedGroup | None:
        """Open a group at `version` if the ledger has room for it; its members wait for engines. None where it has none."""
        if not self.ledger.reserve(self.sim.opened, version):
            return None
        prompt = self.sim.open(version)
        for member in prompt.members:
            self.pending[member.key] = member
        return prompt

    def finished(self, prompt: OpenedGroup) -> None:
        self.ledger.occupy(prompt.group_id, prompt.oldest)

    def batch(self, step: int) -> Many[OpenedGroup]:
        return [self.sim.groups[i] for i in self.ledger.occupied(step)]

    def complete(self, step: int) -> bool:
        return self.ledger.ready(step)

    def stepped(self, step: int, taken: Many[OpenedGroup]) -> None:
        assert self.ledger.consume(step - 1) == tuple(p.group_id for p in taken)

    def returned(self, sequences: Many[Sequence]) -> None:
        for sequence in sequences:
            if sequence.group in self.sim.groups:
                self.pending[sequence.key] = sequence


class StaleFlow(Bounded):
    """Its coordinator (arXiv 2601.12784, section 5), every engine's coefficients known exactly: stalest first to the engine
    that gains most, held when that is less than HOLD of what it would gain alone on it; moved when an engine elsewhere would
    gain GAP more."""

    name = "staleflow"
    hold = 0.3
    gap = 5.0
    moves = 8
    """a tick"""

    def tick(self) -> None:
        """Route what waits, open groups while there is room, and move sequences when nothing waits."""
        self._route()
        while self.ledger.room(self.sim.version) > 0 and not self.pending:
            self.reserve(self.sim.version)
            self._route()
        if not self.pending:
            self._migrate()

    def _route(self) -> None:
        free = [e for e in map(self.sim.touch, list(self.sim.engines)) if has_place(e, 0)]
        for sequence in sorted(self.pending.values(), key=lambda q: (self.sim.groups[q.group].version, -q.made, q.key)):
            context = sequence.prompt + sequence.made
            able = [e for e in free if e.context + context <= FILL * e.room]
            if not able:
                continue
            best = max(able, key=lambda e: e.model.gain(len(e.running), e.context, context))
            ideal = best.model.gain(0, 0, context)
            if best.model.gain(len(best.running), best.context, context) < self.hold * ideal:
                continue
            del self.pending[sequence.key]
            self.sim.place(sequence, best.name)
            free = [e for e in free if has_place(e, 0)]

    def _migrate(self) -> None:
        engines = [self.sim.touch(name) for name in self.sim.engines]
        for engine in engines:
            while len(engine.waiting) > 3:
                last = engine.waiting[-1]
                self.sim.take(last)
                self.returned([last])
        for _ in range(self.moves):
            busy = [e for e in engines if len(e.running) > 1]
            free = [e for e in engines if has_place(e, 0)]
            if not busy or not free:
                return
            best = max(free, key=lambda e: e.model.gain(len(e.running), e.context, self.sim.workload.prompt))
            worst = min(busy, key=_last_gain)
            sequence = worst.running[-1]
            context = sequence.prompt + worst.made(sequence)
            gains = best.model.gain(len(best.running), best.context, context)
            if best is worst or best.context + context > FILL * best.room or gains - _last_gain(worst) <= self.gap:
                return
            self.sim.move(sequence, best.name)


def _last_gain(engine) -> float:  # type: ignore[no-untyped-def]
    """What the newest of its sequences adds."""
    last = engine.running[-1]
    context = last.prompt + engine.made(last)
    return engine.model.gain(len(engine.running) - 1, engine.context - context, context)
