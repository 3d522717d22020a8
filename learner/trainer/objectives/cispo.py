"""CISPO: the ratio is clipped, and no token loses its gradient."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from learner.trainer.objectives.port import RatioBounds, SampledTokens, TokenLosses


class Cispo(RatioBounds):
    """Loss: - sg(clip(r, low, high)) A log pi, r = pi / mu (CISPO, arXiv 2506.13585, section 3.1; the bounds are ScaleRL's,
    arXiv 2510.13786). sg takes the gradient off."""

    paper: ClassVar[str] = "2506.13585"
    nucleus: ClassVar[bool] = False

    low: float = Field(default=0.0, ge=0)
    """Smallest ratio."""
    high: float = Field(default=5.0, gt=0)
    """Largest ratio."""

    def terms(self, sampled: SampledTokens) -> TokenLosses:
        """As `Objective.terms`."""
        weight = sampled.log_ratio.detach().exp().clamp(self.low, self.high)
        return TokenLosses(-weight * sampled.advantage * sampled.logprobs, weight)
