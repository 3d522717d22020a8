"""What a node is worth: accepted tokens per second, learned from what it delivered, with how far that can be trusted. Pure.

ECHO-2 sorts nodes by price over effective mu (arXiv 2602.02192) and does not say how mu is known. Here only tokens that the
learner could use count, so failures, drops for staleness and rejections need no factor of their own. What would go wrong in
the field:

- **A node that is short of work** shows what it was given, not what it can do. Taken at its word it looks slow, so more nodes
  are activated, so each gets less work. So such a time says "at least": its mean is a lower bound, and never lowers anything.
- **Tokens come in lumps**, and some are taken back later (`accepted` may be negative then): short intervals are put together.
- **One odd interval** (a lost link, a clock that jumped) counts as an outlier at the most; three in a row on one side show that
  the node has changed, and what it was before is forgotten.

Must not know prices, nor what made a token acceptable.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from p2p.forgetting import forget_oldest, renewed

CHUNK_S = 5.0
"""Seconds of a chunk. Shorter intervals are put together until they are as long, so that batches of tokens even out."""

HALF_LIFE_S = 1800.0
"""Seconds after which an observation counts half: sequences grow longer as the policy learns, and machines warm up."""

KNOWN_S = 30.0
"""Seconds of work after which a node's rate counts as known: six chunks."""

OUTLIER_SDS = 4.0
"""A chunk further from the mean than so many standard deviations is an outlier, and counts as if it were just so far."""

CHANGE_CHUNKS = 3
"""Outliers in a row on one side that show that the node has changed."""

USUAL_SCATTER = 0.1
"""Standard deviation of a chunk, as a share of the mean, that is assumed before there are two, and at the least."""

OUTLIER_CHUNKS = 8
"""Chunks that are needed before a further one can be an outlier of them."""

BOUND_CHUNKS, BOUND_SDS = 4, 2.0
"""Chunks without enough work after which their mean is a lower bound of the rate, and the standard deviations that are taken off
it. The bound is the best of many such means, so it must be a careful one."""

BOUND_DECAY = 0.2
"""Share by which each chunk with enough work brings the bound towards their mean, where it is above: the bound may be out of
date."""

UNKNOWN_SD = 0.5
"""Standard deviation of a node of an unknown kind, as a share of the mean of the known nodes."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A rate in tokens per second, and how sure it is. Not `known` and 0: nothing is known at all."""

    mean: float = 0.0
    sd: float = 0.0
    """standard deviation of the mean, not of single observations"""
    known: bool = False
    """it has worked long enough; else this is only what others of its kind make"""

    def lower(self, z: float) -> float:
        """`z` standard deviations below the mean."""
        return max(0.0, self.mean - z * self.sd)

    def upper(self, z: float) -> float:
        """`z` standard deviations above the mean."""
        return max(0.0, self.mean + z * self.sd)


NOTHING = Estimate()
"""What is known of a node before anything is."""


@dataclass
class _Moments:
    """Mean and scatter of weighted values, older ones fading."""

    weight: float = 0.0
    squares: float = 0.0
    """of the weights"""
    total: float = 0.0
    of_squares: float = 0.0
    odd: list[tuple[float, float]] = field(default_factory=list)
    """(value, weight) of the latest chunks, as long as all are outliers on one side"""

    def fade(self, factor: float) -> None:
        self.weight *= factor
        self.squares *= factor * factor
        self.total *= factor
        self.of_squares *= factor

    def add(self, value: float, weight: float) -> None:
        side = 0.0
        if self.count >= OUTLIER_CHUNKS and self.mean > 0:
            far = OUTLIER_SDS * max(self.scatter, USUAL_SCATTER * self.mean)
            side = math.copysign(1.0, value - self.mean) if abs(value - self.mean) > far else 0.0
        if side and self.odd and (self.odd[-1][0] - self.mean) * side < 0:
            self.odd = []
        self.odd = [*self.odd, (value, weight)] if side else []
        if len(self.odd) >= CHANGE_CHUNKS:
            chunks, self.odd = self.odd, []
            self.weight = self.squares = self.total = self.of_squares = 0.0
            for chunk in chunks:
                self._count(*chunk)
            return
        self._count(self.mean + side * far if side else value, weight)

    def _count(self, value: float, weight: float) -> None:
        self.weight += weight
        self.squares += weight * weight
        self.total += weight * value
        self.of_squares += weight * value * value

    @property
    def count(self) -> float:
        """Chunks of equal weight that would say as much."""
        return self.weight * self.weight / self.squares if self.squares > 0 else 0.0

    @property
    def mean(self) -> float:
        return self.total / self.weight if self.weight > 0 else 0.0

    @property
    def scatter(self) -> float:
        """Standard deviation of a chunk, with one of the usual as if it had been seen."""
        n = self.count
        seen = max(0.0, self.of_squares / self.weight - self.mean**2) * n if self.weight > 0 else 0.0
        return math.sqrt((seen + (USUAL_SCATTER * self.mean) ** 2) / n) if n > 0 else 0.0

    @property
    def sd(self) -> float:
        return self.scatter / math.sqrt(self.count) if self.weight > 0 else math.inf


@dataclass
class NodeRate:
    """One node."""

    worked_s: float = field(default=0.0, init=False)
    """seconds that it was watched, with all the work it could take and without"""
    _full: _Moments = field(default_factory=_Moments, init=False, repr=False)
    """chunks in which it had all the work that it could take"""
    _short: _Moments = field(default_factory=_Moments, init=False, repr=False)
    _least: float = field(default=0.0, init=False, repr=False)
    """lower bound of the rate, from chunks in which it was short of work; 0 before there is one"""
    _chunk: dict[bool, tuple[float, float]] = field(default_factory=dict, init=False, repr=False)
    """busy -> (seconds, tokens) not yet long enough"""
    _now: float = field(default=-math.inf, init=False, repr=False)

    def observe(self, now: float, seconds: float, accepted: float, busy: bool) -> None:
        """In the `seconds` until `now` it delivered `accepted` tokens; `busy`: there was always more work for it than it did.
        `accepted` is what this interval changes in the count, below zero where more was taken back than came."""
        if not seconds > 0 or not math.isfinite(accepted):
            return
        if now > self._now > -math.inf:
            for moments in (self._full, self._short):
                moments.fade(0.5 ** ((now - self._now) / HALF_LIFE_S))
        self._now = max(self._now, now)
        self.worked_s += seconds
        before = self._chunk.pop(busy, (0.0, 0.0))
        length, tokens = before[0] + seconds, before[1] + accepted
        if length < CHUNK_S:
            self._chunk[busy] = length, tokens
        elif busy:
            self._full.add(tokens / length, length)
            self._least -= BOUND_DECAY * max(0.0, self._least - self._full.mean)
        else:
            self._short.add(tokens / length, length)
            if self._short.count >= BOUND_CHUNKS - 0.5:
                self._least = max(self._least, self._short.mean - BOUND_SDS * self._short.sd)

    @property
    def known(self) -> bool:
        return self.worked_s >= KNOWN_S

    def estimate(self, prior: Estimate = NOTHING) -> Estimate:
        """Its rate when it has work, at least its lower bound. `prior` is what was believed of it before it worked: joined with
        what it does as the inverse of their variances."""
        mean, sd = self._full.mean, self._full.sd
        if prior.sd > 0:
            if sd == math.inf:
                mean, sd = prior.mean, prior.sd
            else:
                sd = max(sd, 1e-9)
                trust = prior.sd**2 / (prior.sd**2 + sd**2)
                mean, sd = trust * mean + (1 - trust) * prior.mean, math.sqrt(trust) * sd
        if self._least > mean:  # the bound has its doubt taken off already
            mean, sd = self._least, min(sd, USUAL_SCATTER * self._least)
        return Estimate(max(0.0, mean), sd if sd < math.inf else 0.0, self.known)


def prior_of(estimates: Iterable[Estimate]) -> Estimate:
    """What to expect of a node, from known ones like it: their mean and scatter, wide while they are one or two."""
    means = [e.mean for e in estimates if e.known]
    if not means:
        return Estimate()
    mean = math.fsum(means) / len(means)
    apart = math.fsum((m - mean) ** 2 for m in means)
    return Estimate(mean, math.sqrt((apart + (UNKNOWN_SD * mean) ** 2) / len(means)))


@dataclass
class NodeRates:
    """The MOST_NODES that worked last, by name: one that returns is known."""

    _rates: dict[str, NodeRate] = field(default_factory=dict, init=False, repr=False)
    _kinds: dict[str, str] = field(default_factory=dict, init=False, repr=False)
    _priors: dict[str, Estimate] = field(default_factory=dict, init=False, repr=False)
    """kind -> what to expect; of all kinds under "". Empty when something was learned since"""

    def observe(self, peer: str, now: float, seconds: float, accepted: float, busy: bool, kind: str = "") -> None:
        """A node had so much accepted in so many seconds; `busy` if it had all the work that it could do."""
        self._kinds[peer] = kind or self._kinds.get(peer, "")
        self._rates.setdefault(peer, NodeRate()).observe(now, seconds, accepted, busy)
        renewed(self._rates, peer)
        for gone in forget_oldest(self._rates):
            del self._kinds[gone]
        self._priors.clear()

    def estimate(self, peer: str, kind: str = "") -> Estimate:
        """A node's rate. For one that has not worked long enough it leans on the known nodes of its kind, or on all known
        nodes."""
        rate = self._rates.get(peer)
        if rate is not None and rate.known:
            return rate.estimate()
        kind = kind or self._kinds.get(peer, "")
        prior = self._prior(kind)
        return prior if rate is None else rate.estimate(prior)

    def _prior(self, kind: str) -> Estimate:
        if not self._priors:
            sorts: dict[str, list[Estimate]] = {"": []}
            for peer, rate in self._rates.items():
                if rate.known:
                    sorts[""].append(rate.estimate())
                    sorts.setdefault(self._kinds[peer], []).append(rate.estimate()) if self._kinds[peer] else None
            self._priors = {sort: prior_of(estimates) for sort, estimates in sorts.items()}
        if kind in self._priors:
            return self._priors[kind]
        # Of another kind: what the others make says little.
        of_all = self._priors[""]
        return Estimate(of_all.mean, max(of_all.sd, UNKNOWN_SD * of_all.mean))
