"""GSPO: one ratio for a whole completion."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from learner.trainer.objectives.port import MAX_LOG_RATIO, Objective, SampledTokens, TokenLosses, surrogate


class Gspo(Objective):
    """Loss: - min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), s = exp(mean over the completion's tokens of log(pi / mu))
    (GSPO, arXiv 2507.18071, equations 5 and 7). Average over completions (`trainer.aggregate = "sequence"`)."""

    paper: ClassVar[str] = "2507.18071"
    nucleus: ClassVar[bool] = False

    clip_low: float = Field(default=3e-4, ge=0, le=1)
    """The completion's ratio is clipped at 1 - `clip_low` from below (section 5.1)."""
    clip_high: float = Field(default=4e-4, ge=0)
    """It is clipped at 1 + `clip_high` from above."""

    def terms(self, sampled: SampledTokens) -> TokenLosses:
        """As `Objective.terms`."""
        log_ratio = sampled.row_mean(sampled.logprobs - sampled.behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)  # [R]
        ratio = log_ratio.exp()
        clipped = surrogate(ratio, sampled.advantages, self.clip_low, self.clip_high)
        return TokenLosses(clipped.loss[sampled.row], (ratio.detach() * clipped.free)[sampled.row])
