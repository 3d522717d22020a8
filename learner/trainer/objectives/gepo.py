"""GEPO: completions are weighed against what the whole group expects."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from learner.trainer.objectives.port import MAX_LOG_RATIO, Objective, SampledTokens, TokenLosses, surrogate


class Gepo(Objective):
    """Loss: - min(w A, clip(w, 1 - clip_low, 1 + clip_high) A), w = p / E, p = exp(mean over the completion's tokens of log
    pi), E = sum(q^2) / sum(q) over the group's completions, q = exp(mean of log mu) (GEPO, arXiv 2508.17850, section 3).
    Average over completions (`trainer.aggregate = "sequence"`)."""

    paper: ClassVar[str] = "2508.17850"
    nucleus: ClassVar[bool] = False

    clip_low: float = Field(default=0.2, ge=0, le=1)
    """The weight is clipped at 1 - `clip_low` from below."""
    clip_high: float = Field(default=0.2, ge=0)
    """It is clipped at 1 + `clip_high` from above."""

    def group_constant(self, behaviour: Sequence[Sequence[float]]) -> float:
        """log E. In logarithms: of long completions of a flat policy q may be tiny."""
        logs = [math.fsum(row) / len(row) for row in behaviour]
        top = max(logs)
        first = math.fsum(math.exp(value - top) for value in logs)
        second = math.fsum(math.exp(2 * (value - top)) for value in logs)
        return top + math.log(second) - math.log(first)

    def terms(self, sampled: SampledTokens) -> TokenLosses:
        """As `Objective.terms`."""
        log_weight = sampled.row_mean(sampled.logprobs) - sampled.group_constants  # [R]
        weight = log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        clipped = surrogate(weight, sampled.advantages, self.clip_low, self.clip_high)
        return TokenLosses(clipped.loss[sampled.row], (weight.detach() * clipped.free)[sampled.row])
