"""Ours on a priced fleet: production's rollouts with activation and seeding; and which policy a name stands for."""

from __future__ import annotations

from collections.abc import Sequence as Many

from netem.planning.baselines import CentralOneStepOff, Colocated, Echo2, RLBoost, StreamRL
from netem.planning.cost_scenario import PolicySection
from netem.planning.local_engine import OwnEngines, Priced
from netem.rollout_sim.other_systems import has_place
from netem.rollout_sim.ours import Shoal
from netem.rollout_sim.sim import OpenedGroup, RolloutPolicy


def policy_of(policy: PolicySection) -> RolloutPolicy:
    return {
        "shoal": Ours, "synchronous": Colocated, "one-step-off": CentralOneStepOff, "echo2": Echo2, "rlboost": RLBoost,
        "streamrl": StreamRL,
    }[policy.name](policy)  # fmt: skip


class Ours(Shoal, Priced):
    """Production's ledger, dispatcher, balancer; the learner's own engines generate in the turns that production's
    `Turns` gives them."""

    def __init__(self, settings: PolicySection) -> None:
        super().__init__(migration=settings.migration, label="shoal")
        self.settings = settings

    def start(self) -> None:
        super().start()
        self.own = OwnEngines(self.priced, self.settings)
        self.own.begin()

    def tick(self) -> None:
        super().tick()
        sim = self.priced
        idle, back = [], not self.pending and not any(self.ledger.room(v) for v in set(self.sim.serves.values()))
        if back:
            idle = [e for e in (sim.touch(n) for n in sim.remote) if has_place(e, sim.workload.prompt)]
            sim.kept_back = sim.kept_back or bool(idle)
        self.own.look(back=back, idle=len(idle) / max(1, len(sim.remote)))

    def finished(self, prompt: OpenedGroup) -> None:
        super().finished(prompt)
        self.priced.ended(prompt)

    def stepped(self, step: int, taken: Many[OpenedGroup]) -> None:
        super().stepped(step, taken)
        decision = self.priced.crew.decision
        self.own.stepped(holds=decision is not None and decision.supply >= decision.required)
        self.own.begin()
