"""Ours on a priced fleet: production's rollouts with activation and a local engine; and which policy a name stands for."""

from __future__ import annotations

from collections.abc import Sequence as Many

from netem.planning.baselines import Colocated, Echo2, RLBoost, StreamRL
from netem.planning.cost_scenario import PolicySection
from netem.planning.local_engine import Priced, ProductionTurns
from netem.rollout_sim.other_systems import OneStepOff, has_place
from netem.rollout_sim.ours import Shoal
from netem.rollout_sim.sim import OpenedGroup, RolloutPolicy


def policy_of(policy: PolicySection) -> RolloutPolicy:
    return {
        "shoal": Ours, "synchronous": Colocated, "one-step-off": OneStepOff, "echo2": Echo2, "rlboost": RLBoost,
        "streamrl": StreamRL,
    }[policy.name]()  # fmt: skip


class Ours(Priced, Shoal):
    """Production's ledger, dispatcher and migration. The local engines generate in the turns that production's `Turns` gives
    them."""

    def start(self) -> None:
        """The first turn of the local engines begins."""
        self.migration = self.settings.migration
        super().start()
        self.turns = ProductionTurns(self.priced)
        self.turns.begin()

    def tick(self) -> None:
        """As production, and tell the local engines whether work is held back and how many nodes have room meanwhile."""
        super().tick()
        sim = self.priced
        idle, back = [], not self.pending and not any(self.ledger.room(v) for v in set(self.sim.serves.values()))
        if back:
            idle = [e for e in (sim.touch(n) for n in sim.remote) if has_place(e, sim.workload.prompt)]
            sim.fleet.held_back = sim.fleet.held_back or bool(idle)
        self.turns.look(back=back, idle=len(idle) / max(1, len(sim.remote)))

    def stepped(self, step: int, taken: Many[OpenedGroup]) -> None:
        """A step ended: the next turn of the local engines begins."""
        super().stepped(step, taken)
        decision = self.priced.autoscaler.decision
        self.turns.stepped(holds=decision is not None and decision.supply >= decision.required)
        self.turns.begin()
