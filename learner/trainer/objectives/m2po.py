"""M2PO: a trust region by the second moment of the log ratios."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from learner.trainer.objectives.port import Objective, SampledTokens, TokenLosses


class M2po(Objective):
    """Loss: - M r A, r = pi / mu, where M lets go of the tokens of largest log(r)^2 until the mean of the others is at most
    `moment` (M2PO, arXiv 2510.01161, section 4). The mean is over one forward's tokens, not over the whole step's: a step's
    forwards are trained on before its last groups exist."""

    paper: ClassVar[str] = "2510.01161"
    nucleus: ClassVar[bool] = False

    moment: float = Field(default=0.04, gt=0)
    """Largest mean of log(pi / mu)^2 over the tokens that are kept, in square nats."""

    def terms(self, sampled: SampledTokens) -> TokenLosses:
        """As `Objective.terms`."""
        log_ratio = sampled.log_ratio
        square = log_ratio.detach().square()
        rising, order = square.sort(stable=True)
        counts = (rising.new_ones(len(rising))).cumsum(0)
        fits = rising.cumsum(0) / counts <= self.moment  # the mean of a rising sequence rises: true up to some token, then false
        kept = fits.new_zeros(len(rising)).scatter(0, order, fits)
        ratio = log_ratio.exp()
        return TokenLosses(-(ratio * sampled.advantage) * kept, ratio.detach() * kept)
