"""Decoupled PPO: a trust region around the trainer's own policy, and a weight for what the sampling policy did differently."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from learner.trainer.objectives.port import MAX_LOG_RATIO, Level, Objective, SampledTokens, TokenLosses, around_proximal

if TYPE_CHECKING:
    from torch import Tensor


class Decoupled(Objective):
    """Loss: - w min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), rho = pi / pi_prox, w = min(pi_prox / mu, cap)
    without gradient (decoupled objective, AReaL, arXiv 2505.24298, section 5.2; truncated importance sampling, TIS, as
    verl, slime and SkyRL have it). pi_prox is the trainer's policy at the start of the step. With one update a step rho is
    1 and only w acts: `trainer.minibatches` makes more.

    `level` says of what w is: of each token, or of the whole completion (the product over its tokens).
    """

    paper: ClassVar[str] = "2505.24298"
    reads_proximal: ClassVar[bool] = True

    clip_low: float = Field(default=0.2, ge=0, le=1)
    """rho is clipped at 1 - `clip_low` from below."""
    clip_high: float = Field(default=0.28, ge=0)
    """rho is clipped at 1 + `clip_high` from above."""
    cap: float = Field(default=2.0, gt=0)
    """Largest weight."""
    level: Level = "token"
    """Of what the weight is: "token" or "sequence"."""

    def terms(self, sampled: SampledTokens) -> TokenLosses:
        """As `Objective.terms`."""
        return around_proximal(sampled, self._weight(sampled), self.clip_low, self.clip_high)

    def _weight(self, sampled: SampledTokens) -> Tensor:
        log_weight = sampled.proximal - sampled.behaviour
        if self.level == "sequence":
            log_weight = sampled.row_sum(log_weight)[sampled.row]
        return log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=self.cap)
