"""TOPR: good answers without a ratio, bad ones with one that is at most 1."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from learner.trainer.objectives.port import MAX_LOG_RATIO, Level, Objective, SampledTokens, TokenLosses


class Topr(Objective):
    """Loss: - A log pi where A > 0, - sg(clip(r, 0, cap)) A log pi where A < 0 (TOPR, arXiv 2503.14286, section 3). r = pi
    / mu is of the whole completion there, the product over its tokens; `level` "token" takes each token's."""

    paper: ClassVar[str] = "2503.14286"

    level: Level = "sequence"
    """Of what the ratio is: "sequence" or "token"."""
    cap: float = Field(default=1.0, gt=0)
    """Largest ratio of bad answers."""

    def terms(self, sampled: SampledTokens) -> TokenLosses:
        """As `Objective.terms`."""
        log_ratio = (sampled.logprobs - sampled.behaviour).detach()
        if self.level == "sequence":
            log_ratio = sampled.row_sum(log_ratio)[sampled.row]
        ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=self.cap)
        weight = ratio.where(sampled.advantage < 0, ratio.new_ones(()))
        return TokenLosses(-weight * sampled.advantage * sampled.logprobs, weight)
