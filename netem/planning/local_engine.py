"""What policies on a priced fleet share: the simulation with prices, and when the learner's own engines generate."""

from __future__ import annotations

from learner.economy.local_rollout import LocalRollout
from learner.economy.turns import Turns
from netem.planning.by_sequence import PricedSimulation
from netem.planning.cost_scenario import PolicySection
from netem.rollout_sim.sim import RolloutPolicy

ALONE_S = 5.0
"""Between two looks whether a node came, while the learner generates alone."""


class Priced(RolloutPolicy):
    """What all have: their own sections, and a simulation with prices."""

    settings: PolicySection

    @property
    def priced(self) -> PricedSimulation:
        assert isinstance(self.sim, PricedSimulation)
        return self.sim


class Seeder:
    """RLBoost's: begins a step's seeding with the step, ends it when its time has passed, at least 5 s."""

    def __init__(self, sim: PricedSimulation, settings: PolicySection) -> None:
        self.sim, self.settings = sim, settings
        self.controller = LocalRollout(floor_s=5.0)
        self.seconds = settings.seconds or 5.0
        self.remote_wait_s = 0.0
        self.nodes: list[int] = []
        self._began = self._seeded = 0.0
        self._turn = 0

    def begin(self) -> None:
        sim = self.sim
        self._began, self._seeded, self.remote_wait_s, self.nodes = sim.now, 0.0, 0.0, [len(sim.remote)]
        self._turn += 1
        if not sim.own or (not self.settings.seeding and sim.remote):
            sim.generated_s.append(0.0)
            return
        if self.seconds > 0 or not sim.remote:
            sim.seed(True)
            turn = self._turn
            sim.after(max(self.seconds, ALONE_S), lambda: self._end(turn))
        else:
            sim.generated_s.append(0.0)

    def _end(self, turn: int) -> None:
        sim = self.sim
        if turn != self._turn or not sim.seeding:
            return
        if not sim.remote and not sim.policy.complete(sim.step):  # alone: nobody else would go on
            sim.after(ALONE_S, lambda: self._end(turn))
            return
        self._seeded = sim.now - self._began
        sim.generated_s.append(self._seeded)
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


class OwnEngines:
    """Ours: production's `Turns` on simulated time, looked at when a step begins, when a turn should end, and at every tick."""

    def __init__(self, sim: PricedSimulation, settings: PolicySection) -> None:
        self.sim, self.settings, self.turns = sim, settings, Turns(LocalRollout(floor_s=0.0))
        self._began = 0.0

    def begin(self) -> None:
        sim = self.sim
        self._began = sim.now
        self.turns.begin(sim.now, sim.remote)
        self.look()
        if self.turns.on:
            sim.after(self.turns.local_rollout.turn_s, self.look)

    def look(self, *, back: bool = False, idle: float = 0.0) -> None:
        """`back`: work is held back; `idle`: share of the remote nodes that have room meanwhile."""
        sim = self.sim
        if not sim.own or (not self.settings.seeding and sim.remote):
            return
        busy = any(e.running or e.waiting for e in map(sim.touch, sim.own)) if sim.seeding else False
        on = self.turns.look(
            sim.now, able=True, remote=sim.remote, whole=sim.policy.complete(sim.step), plenty=back and not busy,
            waits=not sim.training, idle=idle,
        )  # fmt: skip
        if on != sim.seeding:
            sim.seed(on)

    def stepped(self, *, holds: bool) -> None:
        sim, w, turns = self.sim, self.sim.workload, self.turns
        self.look()
        sim.generated_s.append(turns.generated_s)
        turns.waited(max(0.0, sim.now - self._began - turns.generated_s - w.train_s - w.update_s))
        turns.stepped(holds=holds)
