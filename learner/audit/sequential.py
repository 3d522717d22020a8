"""Tests of a node that may be looked at after each token, for ever, and wrong an honest one with a bounded chance only. Pure.

Each test bets that the mean of a statistic in [0, 1] is above what honest nodes have. A gambler who stakes a share of his money
on each token, at odds that are fair while the mean is at most `mean`, cannot grow rich in the long run: his money is a
supermartingale, so the chance that it ever reaches 1 / a is at most a (Ville's inequality; Waudby-Smith and Ramdas, "Estimating
means of bounded random variables by betting", arXiv 2010.09686). The stakes are a mixture of a few, so that gross and mild
deviations are both found soon. The statistics' mixture is a bet as well, so there is one chance for all of them.

Must not know what a token is, or what follows from a verdict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

STAKES = (0.02, 0.1, 0.3, 0.7, 0.95)
"""Shares of the most that may be staked without ever losing all: small ones find small deviations in many tokens."""

FALSE_ALARM = 1e-4
"""Chance that an honest node is ever called wrong, however long it is looked at."""

FAR = 0.05
"""A distance beyond which a token counts as far: of honest nodes hardly any are, whatever they compute in."""

NEAR = 0.005
"""A distance beyond which a token counts as near: rounding moves an interval's edge by less."""

LOGPROB_SCALE = 1.0
"""Nats: differences of log probabilities are counted up to this."""


@dataclass(frozen=True, slots=True)
class HonestMeans:
    """What the means of the statistics are at most for honest nodes, of one kind of engine, type and device."""

    far: float = 2e-3
    """share of tokens whose draw is further than FAR from its interval"""
    near: float = 1e-2
    """the same for NEAR"""
    off: float = 0.05
    """mean of |claimed - recomputed log probability|, in nats, up to LOGPROB_SCALE"""
    bias: float = 0.01
    """mean of the signed difference, in nats, its amount"""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a node's tokens have come to."""

    caught: bool
    tokens: int
    """that were looked at until now, or until it was caught"""
    why: str
    """the statistic that says most against it, with its mean and the honest one; "" where none does"""


@dataclass
class NodeTest:
    """One node's tests. `honest` holds for its kind of engine."""

    honest: HonestMeans
    false_alarm: float = FALSE_ALARM
    tokens: int = field(default=0, init=False)
    caught_at: int = field(default=0, init=False)
    """tokens after which it was caught; 0: it was not"""
    _wealth: dict[str, np.ndarray] = field(default_factory=dict, init=False, repr=False)
    """statistic -> log of the money of each stake"""
    _sums: dict[str, float] = field(default_factory=dict, init=False, repr=False)

    def look(self, distance: np.ndarray, claimed: np.ndarray, recomputed: np.ndarray) -> Verdict:
        """More of its tokens: distances, and log probabilities (nats) as claimed and as they are. No number is far off."""
        for name, values, mean in self._statistics(distance, claimed, recomputed):
            if mean >= 1.0:  # nothing to bet on
                continue
            stakes = np.array(STAKES)[:, None] / mean
            gains = np.log1p(np.clip(stakes * (values - mean)[None, :], -1 + 1e-12, None)).cumsum(axis=1)
            before = self._wealth.get(name, np.zeros(len(STAKES)))
            if gains.shape[1]:
                self._wealth[name] = before + gains[:, -1]
            self._sums[name] = self._sums.get(name, 0.0) + float(values.sum())
        self.tokens += len(distance)
        if not self.caught_at and self.log_evidence >= -math.log(self.false_alarm):
            self.caught_at = self.tokens
        return self.verdict()

    @property
    def log_evidence(self) -> float:
        """Log of the money of the mixture of all bets. A bound on the log of the chance that an honest node gets so far, with its
        sign turned."""
        every = [w for wealth in self._wealth.values() for w in wealth]
        return float(np.logaddexp.reduce(every) - math.log(len(every))) if every else 0.0

    def verdict(self) -> Verdict:
        """By what was seen so far."""
        most, why = 0.0, ""
        for name, wealth in self._wealth.items():
            if (log_money := float(wealth.max())) > max(most, 1.0):
                mean, honest = self._sums[name] / self.tokens, self._means()[name]
                most, why = log_money, f"{WORDS[name]}: {mean:.3g} in {self.tokens} tokens, an honest node has {honest:.3g}"
        return Verdict(bool(self.caught_at), self.caught_at or self.tokens, why)

    def _means(self) -> Mapping[str, float]:
        h = self.honest
        shift = h.bias / LOGPROB_SCALE / 2
        return {
            "far": h.far, "near": h.near, "off": h.off / LOGPROB_SCALE, "above": 0.5 + shift, "below": 0.5 + shift,
        }  # fmt: skip

    def _statistics(
        self, distance: np.ndarray, claimed: np.ndarray, recomputed: np.ndarray
    ) -> list[tuple[str, np.ndarray, float]]:  # fmt: skip
        means = self._means()
        with np.errstate(invalid="ignore"):
            signed = np.clip((claimed - recomputed) / LOGPROB_SCALE, -1.0, 1.0)
        signed = np.where(np.isnan(signed), 1.0, signed)
        distance = np.where(np.isnan(distance), 1.0, distance)
        values = {
            "far": (distance > FAR).astype(np.float64), "near": (distance > NEAR).astype(np.float64), "off": np.abs(signed),
            "above": (1 + signed) / 2, "below": (1 - signed) / 2,
        }  # fmt: skip
        return [(name, values[name], means[name]) for name in values]


WORDS = {
    "far": f"share of tokens further than {FAR} from their seeded draw",
    "near": f"share of tokens further than {NEAR} from their seeded draw",
    "off": "mean difference of log probabilities (nats)",
    "above": "claimed log probabilities are too high (0.5 is fair)",
    "below": "claimed log probabilities are too low (0.5 is fair)",
}
"""Statistic -> what it is, for people."""
