"""GRPO's clipped surrogate, measured from the policy that sampled."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import Field

from learner.trainer.objectives.port import Objective, SampledTokens, TokenLosses, surrogate


class Grpo(Objective):
    """Loss: - min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = pi / mu (GRPO, arXiv 2402.03300, section 4.1;
    clip-higher: DAPO, arXiv 2503.14476, section 3.1), with a cap on r where A is negative (dual clip, arXiv 1912.09729,
    section 3.3).

    mu is the policy that sampled, so that staleness meets the trust region. With the mean over each completion's tokens it
    is GRPO's own loss, with a constant in place of their number Dr. GRPO's, over all tokens DAPO's.
    """

    paper: ClassVar[str] = "2402.03300"
    nucleus: ClassVar[bool] = False

    clip_low: float = Field(default=0.2, ge=0, le=1)
    """The ratio of a token is clipped at 1 - `clip_low` from below."""
    clip_high: float = Field(default=0.28, ge=0)
    """The ratio is clipped at 1 + `clip_high` from above."""
    cap: float = Field(default=2.0, gt=1)
    """Largest ratio of a token of negative advantage."""
    beyond: Literal["drop", "keep"] = "drop"
    """What becomes of a token of negative advantage beyond `cap`: "drop" leaves it no gradient, as the dual clip does, "keep" one
    of weight `cap`."""

    def terms(self, sampled: SampledTokens) -> TokenLosses:
        """As `Objective.terms`."""
        log_ratio, advantage = sampled.log_ratio, sampled.advantage
        over = (log_ratio > math.log(self.cap)) & (advantage < 0)
        ratio = log_ratio.where(~over, log_ratio.new_tensor(math.log(self.cap))).exp()
        loss, free = surrogate(ratio, advantage, self.clip_low, self.clip_high)
        if self.beyond == "keep":
            loss = loss.where(~over, -self.cap * advantage * (1 + sampled.logprobs - sampled.logprobs.detach()))
        else:
            free = free & ~over
        return TokenLosses(loss, ratio.detach() * free)
