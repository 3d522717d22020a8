"""What a simulated run costs and makes over the steps that count. Both simulators keep one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from netem.planning.autoscaler import LEARNER, Autoscaler
from netem.planning.cost_scenario import CostScenario
from netem.planning.outcome import Paid, Result


@dataclass
class Account:
    """Told when a step ends; what the warm-up steps cost and made is left out of the result."""

    scenario: CostScenario
    autoscaler: Autoscaler
    ended: list[float] = field(default_factory=list)
    """when each step ended, in simulated seconds"""
    ages: list[Counter[int]] = field(default_factory=list)
    """of each step: steps since what it trained on was begun -> how many"""
    tokens: list[float] = field(default_factory=list)
    """trained on in each step"""
    spreads: list[float] = field(default_factory=list)
    """seconds that each version took to the last active node"""

    def stepped(self, now: float, ages: Counter[int], tokens: float) -> None:
        """A step ended, which trained on `tokens` tokens of these ages."""
        self.ended.append(now)
        self.ages.append(ages)
        self.tokens.append(tokens)

    def begin(self, now: float, made: Iterable[float]) -> None:
        """The warm-up is over; `made`: tokens that each node has made so far."""
        self._paid, self._there, self._made = self.autoscaler.mark(now), self.autoscaler.there_hours(now), list(made)

    @property
    def trained(self) -> float:
        """Tokens trained on in the steps that count."""
        return sum(self.tokens[self.scenario.file.warm :])

    def result(
        self, now: float, made: Sequence[float], *, detail: Literal["sequences", "groups"], busy: float, made_a_token: float,
        lost: float, local_engine_s: float = 0.0,
    ) -> Result:  # fmt: skip
        """The run ended; `made`: tokens that each node has made in all. The rest as `Result` has it."""
        file, autoscaler = self.scenario.file, self.autoscaler
        steps, took = len(self.ended) - file.warm, now - self.ended[file.warm - 1]
        ages: Counter[int] = sum(self.ages[file.warm :], Counter())
        kinds = self._kinds(now, made)
        usd_learner = file.learner.usd_per_hour * took / 3600
        charged = autoscaler.mark(now)[LEARNER].usd - self._paid[LEARNER].usd
        decision = autoscaler.decision  # there is none where every node is always active
        last: dict[str, Any] = {} if decision is None else {
            "blocked": decision.blocked, "required": decision.required, "supply": decision.supply
        }  # fmt: skip
        return Result(
            detail=detail, policy=file.policy.name, steps=steps, seconds=took, busy=busy,
            bound=(file.learner.train_s + file.learner.update_s) * steps / took,
            tokens=float(self.trained), groups=file.learner.groups * steps,
            usd_learner=usd_learner, usd_nodes=sum(paid.usd for paid in kinds.values()),
            usd_egress=max(0.0, charged - usd_learner),
            staleness={age: n / sum(ages.values()) for age, n in ages.items()}, kappa=autoscaler.kappa,
            spread_s=float(np.mean(self.spreads)) if self.spreads else 0.0, made=made_a_token, lost=lost, kinds=kinds,
            **last, local_engine_s=local_engine_s,
            series=[
                {"step": i + 1, "step_s": b - a} for i, (a, b) in enumerate(zip([0.0, *self.ended], self.ended, strict=False))
            ],
        )  # fmt: skip

    def _kinds(self, now: float, made: Sequence[float]) -> dict[str, Paid]:
        rows, kinds = self.scenario.rows, self.autoscaler.paid(now, self._paid)
        for row, before, hours in zip(rows, self._there, self.autoscaler.there_hours(now), strict=True):
            kinds[row.kind].there_hours = hours - before
        for node, before, total in zip(self.autoscaler.nodes, self._made, made, strict=True):
            kinds[rows[node.row].kind].tokens += total - before
        return kinds
