"""A mask by the difference of probabilities, as prime-rl has it."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from learner.trainer.objectives.port import Objective, SampledTokens, TokenLosses

LARGEST = 1e4
"""Largest ratio of a token that is kept: a token that mu hardly ever draws, drawn, is kept while pi is small too."""


class Difference(Objective):
    """Loss: - r A where abs(pi - mu) <= distance (probabilities, not their logarithms), r = pi / mu, else no gradient; with
    `one_sided` only tokens that already moved the way that A pushes them are let go: A > 0 and pi - mu > distance, or A < 0
    and pi - mu < - distance. Plus penalty * log(r)^2. (prime-rl, its default loss, and the one before.)"""

    paper: ClassVar[str] = "prime-rl"
    nucleus: ClassVar[bool] = False

    distance: float = Field(default=0.3, gt=0, le=1)
    """Largest difference of the two probabilities of a token that is kept."""
    one_sided: bool = False
    """Let go only of tokens that moved the way that they are pushed."""
    penalty: float = Field(default=0.0, ge=0)
    """Weight of log(pi / mu)^2, of all tokens."""

    @property
    def every_row(self) -> bool:
        return self.penalty > 0

    def terms(self, sampled: SampledTokens) -> TokenLosses:
        """As `Objective.terms`."""
        log_ratio, advantage = sampled.log_ratio, sampled.advantage
        moved = sampled.logprobs.detach().exp() - sampled.behaviour.exp()  # [N]
        if self.one_sided:
            kept = ~(((advantage > 0) & (moved > self.distance)) | ((advantage < 0) & (moved < -self.distance)))
        else:
            kept = moved.abs() <= self.distance
        ratio = log_ratio.exp().clamp(max=LARGEST)
        loss = -(ratio * advantage) * kept
        if self.penalty:
            loss = loss + self.penalty * log_ratio.square()
        return TokenLosses(loss, ratio.detach() * (ratio.detach() < LARGEST) * kept)
