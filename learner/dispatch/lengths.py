"""How long a completion will become: learned online from prompts, from the members of its group, and from its length so far.
Pure.

StreamRL ranks prompts by a trained model (arXiv 2504.15930, section 5); here nothing is trained beforehand. Logarithms of
lengths are taken as normal: a prompt has a mean of its own, its members scatter around it. What is known of a prompt's mean
comes, as precision-weighted evidence, from three places: a line through a feature of the prompt, earlier groups of the same
prompt, and the members that have ended. A member that still runs is longer than it is: the rest of the distribution beyond that
length is what remains of it. Must not know nodes, versions or tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

RETENTION = 0.999
"""Factor of what was learned with each group that ends, so that some thousand groups count: lengths move as the policy learns."""

PRIOR_SCATTER = 1.0
"""Standard deviation of log lengths, between prompts and within one, that is assumed before anything has ended."""

_NORMAL = NormalDist()

KEPT_PROMPTS = 50_000
"""Prompts whose own mean is remembered; beyond so many the oldest goes. It bounds the memory to some megabytes."""


@dataclass(frozen=True, slots=True)
class Belief:
    """Of one prompt: log length is normal about `mean`, which itself is known to within `doubt` (both standard deviations)."""

    mean: float
    doubt: float
    scatter: float
    """of its members about the mean"""

    def expected(self, made: int, most: int) -> float:
        """Tokens in the whole completion, given that it has `made` already and may have `most`."""
        sigma = math.hypot(self.doubt, self.scatter)
        if made <= 0:
            return min(float(most), math.exp(min(self.mean + sigma * sigma / 2, 50.0)))
        at = (math.log(made) - self.mean) / sigma
        if at > 5.0:  # far beyond what was ever believed: the tail of the normal goes on for about made / at more
            return min(float(most), made * (1 + sigma / at))
        beyond = _upper(at - sigma) / _upper(at)
        return min(float(most), max(made + 1.0, math.exp(min(self.mean + sigma * sigma / 2, 50.0)) * beyond))

    def quantile(self, made: int, most: int, q: float) -> float:
        """Tokens in the whole completion that it has with probability q at most, given `made`."""
        sigma = math.hypot(self.doubt, self.scatter)
        tail = _upper((math.log(made) - self.mean) / sigma) if made > 0 else 1.0
        return min(float(most), max(made + 1.0, math.exp(min(self.mean + sigma * _inverse_upper((1 - q) * tail), 50.0))))


def _upper(x: float) -> float:
    return max(0.5 * math.erfc(x / math.sqrt(2)), 1e-300)


def _inverse_upper(p: float) -> float:
    """x with _upper(x) = p."""
    return -_NORMAL.inv_cdf(min(max(p, 1e-300), 1 - 1e-16))


GUESSED_SHARE = 0.15
"""Median length that is assumed before any completion has ended, as a share of the longest that is allowed."""

GUESS_GROUPS = 64.0
"""Groups that the guess counts for at first. The groups that end first are the short ones, so they must not decide alone."""


@dataclass
class Lengths:
    """What was learned so far of completions of at most `most` tokens. `feature` is any number of a prompt that may go with its
    length: its own length in tokens by default."""

    most: int
    weight: float = field(default=0.0, init=False)
    _x: float = field(default=0.0, init=False, repr=False)
    _y: float = field(default=0.0, init=False, repr=False)
    _xx: float = field(default=0.0, init=False, repr=False)
    _xy: float = field(default=0.0, init=False, repr=False)
    _yy: float = field(default=0.0, init=False, repr=False)
    _within: float = field(default=0.0, init=False, repr=False)
    _within_weight: float = field(default=0.0, init=False, repr=False)
    _prompts: dict[int, tuple[float, int]] = field(default_factory=dict, init=False, repr=False)
    """task index -> (mean log length, members) of its latest group"""

    def ended(self, task_index: int, feature: float, lengths: Sequence[int]) -> None:
        """A whole group ended with these lengths (tokens, each at least 1)."""
        logs = [math.log(max(1, n)) for n in lengths]
        x, y, n = math.log(max(1.0, feature)), sum(logs) / len(logs), len(logs)
        for name, value in (("weight", 1.0), ("_x", x), ("_y", y), ("_xx", x * x), ("_xy", x * y), ("_yy", y * y)):
            setattr(self, name, getattr(self, name) * RETENTION + value)
        if n > 1:
            self._within = self._within * RETENTION + sum((v - y) ** 2 for v in logs)
            self._within_weight = self._within_weight * RETENTION + n - 1
        self._prompts.pop(task_index, None)
        self._prompts[task_index] = y, n
        if len(self._prompts) > KEPT_PROMPTS:
            del self._prompts[next(iter(self._prompts))]

    def believe(self, task_index: int, feature: float, ended: Sequence[int] = (), made: Sequence[int] = ()) -> Belief:
        """What to expect of a prompt whose group has members that `ended` with so many tokens and others that have `made` so
        many.

        Members that end first are the short ones: the others count as evidence of the length that they have reached at least, so
        that a group is not believed short because its short members are what is known of it.
        """
        scatter = self.scatter
        mean, variance = self._line(math.log(max(1.0, feature)))
        precision = 1.0 / variance
        total = mean * precision
        evidence = [(math.log(max(1, n)), 1.0) for n in ended]
        if task_index in self._prompts:
            y, n = self._prompts[task_index]
            evidence.append((y, float(n)))
        # Those that run: at what they would have in the mean, given that they are longer than they are now.
        weight = precision + sum(w for _, w in evidence) / scatter**2
        start = (total + sum(v * w for v, w in evidence) / scatter**2) / weight
        wide = math.hypot(scatter, weight**-0.5)
        for n in made:
            at = (math.log(max(1, n)) - start) / wide
            if at > -2.0:  # one that has hardly begun says nothing
                evidence.append((start + wide * _hazard(at), min(1.0, 0.5 + at / 4)))
        for value, members in evidence:
            total += value * members / scatter**2
            precision += members / scatter**2
        return Belief(total / precision, precision**-0.5, scatter)

    def usual(self) -> float:
        """Tokens of a completion of a prompt of which nothing is known."""
        mean, variance = self._line(self._x / self.weight if self.weight else 0.0)
        return Belief(mean, math.sqrt(variance), self.scatter).expected(0, self.most)

    @property
    def scatter(self) -> float:
        """Of the log lengths of one prompt's members."""
        return math.sqrt((self._within + PRIOR_SCATTER**2) / (self._within_weight + 1)) if self._within_weight else PRIOR_SCATTER

    def _line(self, x: float) -> tuple[float, float]:
        """(mean, variance) of a prompt's mean log length, from its feature."""
        guess = math.log(GUESSED_SHARE * self.most)
        if self.weight < 1:
            return guess, PRIOR_SCATTER**2
        mean_x, mean_y = self._x / self.weight, self._y / self.weight
        # One pseudo-observation of no slope for the few: a line through two points says nothing.
        var_x = max(self._xx / self.weight - mean_x**2, 0.0)
        cov = self._xy / self.weight - mean_x * mean_y
        slope = cov * self.weight / (var_x * self.weight + 1.0)
        left = max(self._yy / self.weight - mean_y**2 - slope * cov, 0.0)
        sure = self.weight / (self.weight + self._distrust)
        variance = sure * left + (1 - sure) * PRIOR_SCATTER**2
        return sure * (mean_y + slope * (x - mean_x)) + (1 - sure) * guess, max(variance, 1e-4)

    @property
    def _distrust(self) -> float:
        """Of the guess, gone when a few times as many groups have ended."""
        return GUESS_GROUPS * math.exp(-self.weight / GUESS_GROUPS)


def _hazard(x: float) -> float:
    """Mean of a standard normal given that it is more than x (the inverse Mills ratio)."""
    if x > 5.0:
        return x + 1.0 / x
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi) / _upper(x)
