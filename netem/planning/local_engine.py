"""What policies on a priced fleet share: the simulation with prices, and when the learner's local engines generate."""

from __future__ import annotations

from learner.economy.local_rollout import FLOOR_S, LocalRollout
from learner.economy.turns import Turns
from netem.planning.by_sequence import PricedSimulation
from netem.planning.cost_scenario import PolicySection
from netem.rollout_sim.sim import RolloutPolicy

ALONE_S = 5.0
"""Seconds between two looks whether a node came, while the local engines are the only ones that generate. RLBoost's shortest
turn is as long."""


class Priced(RolloutPolicy):
    """A policy on a fleet with prices. To be named before the policy that it is mixed into."""

    @property
    def priced(self) -> PricedSimulation:
        assert isinstance(self.sim, PricedSimulation)
        return self.sim

    @property
    def settings(self) -> PolicySection:
        return self.priced.scenario.file.policy


class RLBoostTurns:
    """RLBoost's (arXiv 2510.19225): the local engines generate at the beginning of a step, for as long as its controller says
    and at least 5 s."""

    def __init__(self, sim: PricedSimulation) -> None:
        self.sim, self.settings = sim, sim.scenario.file.policy
        self.controller = LocalRollout(floor_s=FLOOR_S)
        self.turn_s = self.settings.turn_s or FLOOR_S
        self._nodes = 0
        """remote nodes at the beginning of the step"""
        self._began = self._generated_s = 0.0
        self._turn = 0

    def begin(self) -> None:
        """A step begins."""
        sim = self.sim
        self._began, self._generated_s, self._nodes = sim.now, 0.0, len(sim.remote)
        self._turn += 1
        able = sim.local_engines and (self.settings.local_engine or not sim.remote)
        if able and (self.turn_s > 0 or not sim.remote):
            sim.take_turn(True)
            sim.after(max(self.turn_s, ALONE_S), self._end, self._turn)
        else:
            sim.generated_s.append(0.0)

    def _end(self, turn: int) -> None:
        sim = self.sim
        if turn != self._turn or not sim.local_turn:
            return
        if not sim.remote and not sim.policy.complete(sim.step):  # alone: nobody else would go on
            sim.after(ALONE_S, self._end, turn)
            return
        self._generated_s = sim.now - self._began
        sim.generated_s.append(self._generated_s)
        sim.take_turn(False)

    def stepped(self, remote_wait_s: float) -> None:
        """A step ended, in which the remote nodes waited so long for the learner."""
        sim, w = self.sim, self.sim.workload
        took = sim.now - self._began
        if self.settings.turn_s or not self.settings.local_engine:
            return
        waited = max(0.0, took - self._generated_s - w.train_s - w.update_s)
        nodes = len(sim.remote)
        self.turn_s = self.controller.stepped(
            waited, remote_wait_s, nodes if self.settings.memory else 0, changed=self._nodes != nodes
        )


class ProductionTurns:
    """Ours: production's `Turns` on simulated time, looked at when a step begins, when a turn should end, and at every tick."""

    def __init__(self, sim: PricedSimulation) -> None:
        self.sim, self.settings, self.turns = sim, sim.scenario.file.policy, Turns(LocalRollout(floor_s=0.0))
        self._began = 0.0

    def begin(self) -> None:
        """A step begins."""
        sim = self.sim
        self._began = sim.now
        self.turns.begin(sim.now, sim.remote)
        self.look()
        if self.turns.on:
            sim.after(self.turns.local_rollout.turn_s, self.look)

    def look(self, *, back: bool = False, idle: float = 0.0) -> None:
        """`back`: work is held back, since the learner could not use more; `idle`: share of the remote nodes that have room
        meanwhile."""
        sim = self.sim
        if not sim.local_engines or (not self.settings.local_engine and sim.remote):
            return
        busy = any(e.running or e.waiting for e in map(sim.touch, sim.local_engines)) if sim.local_turn else False
        on = self.turns.look(
            sim.now, able=True, remote=sim.remote, whole=sim.policy.complete(sim.step), plenty=back and not busy,
            waits=not sim.busy, idle=idle,
        )  # fmt: skip
        if on != sim.local_turn:
            sim.take_turn(on)

    def stepped(self, *, holds: bool) -> None:
        """A step ended; `holds`: the remote nodes meet the capacity rule."""
        sim, w, turns = self.sim, self.sim.workload, self.turns
        self.look()
        sim.generated_s.append(turns.generated_s)
        turns.waited(max(0.0, sim.now - self._began - turns.generated_s - w.train_s - w.update_s))
        turns.stepped(holds=holds)
