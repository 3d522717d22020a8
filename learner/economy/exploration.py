"""Which unknown nodes are tried, on an allowance. Pure.

ECHO-2 takes mu as known. A node that never worked may be the best there is, and a trial costs its price for as long as it
lasts: so a share of what is spent is set aside, and a trial begins when all that it may cost is there. Each node is tried
once. Free ones are tried a few at a time: they cost nothing but attention. Must not know the requirement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from learner.economy.candidates import Candidate, Rules

AT_ONCE = 0.1
"""Of the number of active nodes, that are tried at a time (one at least): tried nodes take work from others."""

LOOKS = 32
"""Candidates that are looked at in one decision."""

SAVED = 10
"""Trials of the dearest candidate that the allowance may grow to: what was not used in a quiet hour is not spent at once."""


@dataclass
class Exploration:
    rules: Rules
    allowance: float = field(default=0.0, init=False)
    """US dollars, less what running trials may still cost"""
    trials: dict[str, tuple[float, float, float]] = field(default_factory=dict, init=False)
    """peer -> (since, until, dollars set aside)"""
    tried: set[str] = field(default_factory=set, init=False)
    _now: float = field(default=-math.inf, init=False, repr=False)

    def proceed(self, now: float, pool: dict[str, Candidate], needed_usd_per_hour: float) -> None:
        """Time passes: needed nodes cost so much, trials end."""
        if self._now > -math.inf:
            self.allowance += max(0.0, now - self._now) / 3600 * needed_usd_per_hour * self.rules.explore_share
        self._now = max(now, self._now)
        dearest = max((c.usd_per_hour for c in pool.values() if self._unknown(c)), default=0.0)
        most = SAVED * dearest * (self.rules.explore_s + self.rules.join_s) / 3600
        self.allowance = min(self.allowance, max(most, 0.0))
        for peer, (_, until, _) in list(self.trials.items()):
            if peer not in pool:
                self.end(peer, now, tried=False)
            elif pool[peer].rate.known or now >= until:
                self.end(peer, now)

    def end(self, peer: str, now: float, *, tried: bool = True) -> None:
        """It is known, or was tried for long enough, or is needed anyway; what was not spent goes back."""
        since, until, reserved = self.trials.pop(peer)
        if until > since:
            self.allowance += reserved * max(0.0, min(1.0, (until - now) / (until - since)))
        if tried:
            self.tried.add(peer)

    def begin(
        self, now: float, candidates: Iterable[Candidate], active: int, room_usd_per_hour: float,
        harmless: Callable[[Candidate], bool] = lambda _: True,
    ) -> list[str]:  # fmt: skip
        """Who is tried from now on: the cheapest promise first. `room` is what the cap on spending leaves; who would make
        others wait is not `harmless`, and is passed over."""
        out: list[str] = []
        looked = 0
        places = max(1, int(AT_ONCE * active)) - len(self.trials)
        for c in sorted((c for c in candidates if self._unknown(c)), key=promise):
            lasts = self.rules.explore_s + min(self.rules.join_s, c.catch_up_s if not c.ready else 0.0)
            costs = max(0.0, c.usd_per_hour - c.idle_usd_per_hour)
            reserve = c.usd_per_hour * lasts / 3600 + c.catch_up_usd
            if len(out) >= places or reserve > self.allowance:
                break
            looked += 1
            if looked > LOOKS:
                break
            if costs <= room_usd_per_hour and harmless(c):
                room_usd_per_hour -= costs
                self.allowance -= reserve
                self.trials[c.peer] = now, now + lasts, reserve
                out.append(c.peer)
        return out

    def _unknown(self, c: Candidate) -> bool:
        return not c.rate.known and c.peer not in self.tried and c.peer not in self.trials


def promise(c: Candidate) -> tuple[float, float, str]:
    """Dollars a token, if it is as good as it may be; by price where nothing is known."""
    may_be = c.rate.upper(1.0)
    return (c.usd_per_hour / may_be if may_be > 0 else c.usd_per_hour), c.usd_per_hour, c.peer
