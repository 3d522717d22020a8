"""The result of a simulated run: the same for both simulators. Plain values."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from netem.planning.cost_scenario import PolicyName


@dataclass
class Paid:
    """What the nodes of one kind did and cost over the steps that count."""

    nodes: int = 0
    """of this kind, there or not"""
    active_hours: float = 0.0
    """node hours"""
    there_hours: float = 0.0
    """node hours, active or not"""
    usd: float = 0.0
    tokens: float = 0.0
    changes: Counter[str] = field(default_factory=Counter)
    """"state: reason", with # for numbers -> how often activation decided so"""

    def scale(self, share: float) -> None:
        """Keep this share of everything that grows with time."""
        for name in ("active_hours", "there_hours", "usd", "tokens"):
            setattr(self, name, getattr(self, name) * share)

    def as_dict(self, hours: float) -> dict[str, Any]:
        return {
            "nodes": self.nodes, "mean_active": self.active_hours / hours if hours else 0.0,
            "mean_there": self.there_hours / hours if hours else 0.0, "usd": self.usd, "tokens": self.tokens,
            "usd_per_million": 1e6 * self.usd / self.tokens if self.tokens else None,
            "changes": dict(self.changes.most_common(8)),
        }  # fmt: skip


@dataclass
class Result:
    """All numbers are over the steps that count, those after the warm-up."""

    detail: Literal["sequences", "groups"]
    """the simulator"""
    policy: PolicyName
    steps: int
    seconds: float
    busy: float
    """share of the time in which the learner worked"""
    bound: float
    """steps an hour, as a share of those of a learner that never waits"""
    tokens: float
    """tokens trained on"""
    usd_learner: float
    usd_nodes: float
    usd_egress: float
    staleness: dict[int, float]
    """age in steps -> share of the groups"""
    kappa: int
    spread_s: float
    """mean seconds that a version took to all active nodes"""
    made: float
    """tokens generated for each token trained on"""
    lost: float
    """tokens that were thrown away with lost nodes"""
    kinds: dict[str, Paid]
    blocked: str = ""
    """why activation last could not have more, if so"""
    required: float = 0.0
    """tokens per second that the capacity rule asks for, by the last decision"""
    supply: float = 0.0
    """tokens per second of the active nodes, by the last decision"""
    local_engine_s: float = 0.0
    """mean seconds of the local engines' turns, a step"""
    series: list[dict[str, float]] = field(default_factory=list)
    """one row for each step, the warm-up's too"""

    @property
    def usd(self) -> float:
        return self.usd_learner + self.usd_nodes + self.usd_egress

    @property
    def usd_per_step(self) -> float:
        return self.usd / self.steps

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps

    @property
    def steps_per_usd(self) -> float:
        return self.steps / self.usd if self.usd else float("inf")

    def as_dict(self) -> dict[str, Any]:
        hours = self.seconds / 3600
        return {
            "detail": self.detail, "policy": self.policy, "steps": self.steps, "seconds": self.seconds, "step_s": self.step_s,
            "learner_busy": self.busy, "learner_bound": self.bound, "tokens_per_s": self.tokens / self.seconds,
            "usd": self.usd, "usd_per_hour": self.usd / hours, "usd_per_step": self.usd_per_step,
            "usd_per_million_tokens": 1e6 * self.usd / self.tokens, "usd_learner": self.usd_learner,
            "usd_nodes": self.usd_nodes, "usd_egress": self.usd_egress, "kappa": self.kappa, "spread_s": self.spread_s,
            "staleness": {str(age): share for age, share in sorted(self.staleness.items())}, "made": self.made,
            "lost_tokens": self.lost, "required_tokens_per_s": self.required, "supply_tokens_per_s": self.supply,
            "blocked": self.blocked, "local_engine_s": self.local_engine_s,
            "kinds": {name: paid.as_dict(hours) for name, paid in self.kinds.items()}, "series": self.series,
        }  # fmt: skip
