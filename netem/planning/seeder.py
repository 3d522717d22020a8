"""What policies on a priced fleet share: the simulation with prices, and a step's seeding with the learner's own engines."""

from __future__ import annotations

from learner.economy.seeding import Seeding
from netem.planning.scenario import PolicySection
from netem.planning.sequences import PricedSimulation
from netem.rollouts.sim import Policy

ALONE_S = 5.0
"""Between two looks whether a node came, while the learner generates alone."""


class Priced(Policy):
    """What all have: their own sections, and a simulation with prices."""

    settings: PolicySection

    @property
    def priced(self) -> PricedSimulation:
        assert isinstance(self.sim, PricedSimulation)
        return self.sim


class Seeder:
    """Runs a step's seeding: begins it with the step, ends it when its time has passed. `eager`: as RLBoost, at least 5 s."""

    def __init__(self, sim: PricedSimulation, settings: PolicySection, *, eager: bool) -> None:
        self.sim, self.settings, self.eager = sim, settings, eager
        self.controller = Seeding(floor_s=5.0 if eager else 0.0)
        self.seconds = settings.seconds or (5.0 if eager else 0.0)
        self.remote_wait_s = 0.0
        self.last_remote = 0.0
        self.nodes: list[int] = []
        self._began = self._seeded = 0.0
        self._turn = 0

    def begin(self) -> None:
        sim = self.sim
        self._began, self._seeded, self.remote_wait_s, self.nodes = sim.now, 0.0, 0.0, [len(sim.remote)]
        self._turn += 1
        if not sim.own or (not self.settings.seeding and sim.remote):
            sim.seeded_s.append(0.0)
            return
        if self.seconds > 0 or not sim.remote:
            sim.seed(True)
            turn = self._turn
            sim.after(max(self.seconds, ALONE_S), lambda: self._end(turn))
        else:
            sim.seeded_s.append(0.0)

    def _end(self, turn: int) -> None:
        sim = self.sim
        if turn != self._turn or not sim.seeding:
            return
        if not sim.remote and not sim.policy.complete(sim.step):  # alone: nobody else would go on
            sim.after(ALONE_S, lambda: self._end(turn))
            return
        self._seeded = sim.now - self._began
        sim.seeded_s.append(self._seeded)
        sim.seed(False)

    def stepped(self, *, holds: bool) -> None:
        sim, w = self.sim, self.sim.workload
        took = sim.now - self._began
        self.nodes.append(len(sim.remote))
        if self.settings.seconds or not self.settings.seeding:
            return
        waited = max(0.0, took - self._seeded - w.train_s - w.update_s)
        nodes, changed = self.nodes[-1] if self.settings.memory else 0, len(set(self.nodes)) > 1
        self.seconds = self.controller.stepped(waited, self.remote_wait_s, nodes, holds=holds, changed=changed)
