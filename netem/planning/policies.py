"""Ours on a priced fleet: production's rollouts with activation and seeding; and which policy a name stands for."""

from __future__ import annotations

from collections.abc import Sequence as Many

from netem.planning.papers import Ahead, Colocated, Echo2, RLBoost, StreamRL
from netem.planning.scenario import PolicySection
from netem.planning.seeder import Priced, Seeder
from netem.rollouts.ours import Shoal
from netem.rollouts.rivals import has_place
from netem.rollouts.sim import Policy, Prompt


def policy_of(policy: PolicySection) -> Policy:
    return {
        "shoal": Ours, "synchronous": Colocated, "one-step-off": Ahead, "echo2": Echo2, "rlboost": RLBoost, "streamrl": StreamRL,
    }[policy.name](policy)  # fmt: skip


class Ours(Shoal, Priced):
    """Production's ledger, dispatcher, balancer; the learner's own engines generate for as long a part of a step as production's
    controller says, fed with the two idle times."""

    def __init__(self, settings: PolicySection) -> None:
        super().__init__(migration=settings.migration, label="shoal")
        self.settings = settings

    def start(self) -> None:
        super().start()
        self.seeder = Seeder(self.priced, self.settings, eager=False)
        self.seeder.begin()

    def tick(self) -> None:
        super().tick()
        sim = self.priced
        if not self.pending and not any(self.ledger.room(v) for v in set(sim.serves.values())):
            idle = [e for e in (sim.touch(n) for n in sim.remote) if has_place(e, sim.workload.prompt)]
            sim.kept_back = sim.kept_back or bool(idle)
            self.seeder.remote_wait_s += len(idle) / max(1, len(sim.remote))

    def finished(self, prompt: Prompt) -> None:
        super().finished(prompt)
        self.priced.ended(prompt)

    def stepped(self, step: int, taken: Many[Prompt]) -> None:
        super().stepped(step, taken)
        decision = self.priced.crew.decision
        self.seeder.stepped(holds=decision is not None and decision.supply >= decision.required)
        self.seeder.begin()
