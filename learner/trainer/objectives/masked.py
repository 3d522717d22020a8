"""Masked importance sampling: a weight that is 0 where it would be far from 1."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from learner.trainer.objectives.port import MAX_LOG_RATIO, Level, RatioBounds, SampledTokens, TokenLosses, around_proximal

if TYPE_CHECKING:
    from torch import Tensor


class Masked(RatioBounds):
    """Loss: - w min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), rho = pi / pi_prox, w = pi_prox / mu where low <=
    pi_prox / mu <= high, else 0 (IcePop, ring-flash 2.0's report, arXiv 2510.18855; MIS in OpenRLHF and NeMo-RL: 0.5 to 5).

    `level` "sequence": the ratio is the geometric mean over the completion's tokens, and the whole completion is let go
    (0.999 to 1.002 are usual there).
    """

    paper: ClassVar[str] = "2510.18855"
    reads_proximal: ClassVar[bool] = True

    low: float = Field(default=0.5, ge=0)
    """Smallest ratio that is kept."""
    high: float = Field(default=5.0, gt=0)
    """Largest ratio that is kept."""
    level: Level = "token"
    """Of what the ratio is: "token" or "sequence"."""
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """rho is clipped at 1 - `clip_low` from below."""
    clip_high: float = Field(default=0.28, ge=0)
    """rho is clipped at 1 + `clip_high` from above."""

    def terms(self, sampled: SampledTokens) -> TokenLosses:
        """As `Objective.terms`."""
        return around_proximal(sampled, self._weight(sampled), self.clip_low, self.clip_high)

    def _weight(self, sampled: SampledTokens) -> Tensor:
        log_weight = sampled.proximal - sampled.behaviour
        if self.level == "sequence":
            log_weight = sampled.row_mean(log_weight)[sampled.row]
        weight = log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        return weight * ((weight >= self.low) & (weight <= self.high))
