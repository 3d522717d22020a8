"""Which nodes of unknown speed are tried, on an allowance. Pure.

ECHO-2 takes mu as known. A node that never worked may be the best there is, and a trial costs its price for as long as it
lasts: so a share of what is spent is set aside, and a trial begins when all that it may cost is there. Each node is tried
once. Free ones are tried a few at a time: they cost nothing but attention. Must not know the requirement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from learner.economy.candidates import Candidate, Rules
from p2p.forgetting import forget_oldest, renewed

TRIAL_SHARE = 0.1
"""Nodes on trial at one time, as a share of the active ones (at least one): they take work from the others."""

MAX_LOOKED = 32
"""Candidates that one decision looks at. It bounds the computing time with thousands of unknown nodes."""

SAVED_TRIALS = 10
"""The allowance grows at most to so many trials of the dearest candidate: a quiet hour must not pay for a burst of trials."""


class Trial(NamedTuple):
    """A node on trial."""

    since: float
    until: float
    usd: float
    """set aside for it"""


@dataclass
class Exploration:
    """Trials under way, and the allowance that pays for them."""

    rules: Rules
    allowance: float = field(default=0.0, init=False)
    """US dollars, less what running trials may still cost"""
    trials: dict[str, Trial] = field(default_factory=dict, init=False)
    """peer -> its trial"""
    tried: dict[str, float] = field(default_factory=dict, init=False)
    """peer -> when its trial ended, the longest ago first; of too many the first are forgotten, and may be tried again"""
    _now: float = field(default=-math.inf, init=False, repr=False)

    def proceed(self, now: float, pool: dict[str, Candidate], needed_usd_per_hour: float) -> None:
        """Time passes until `now`: the allowance grows by a share of what the needed nodes cost, and trials end."""
        if self._now > -math.inf:
            self.allowance += max(0.0, now - self._now) / 3600 * needed_usd_per_hour * self.rules.explore_share
        self._now = max(now, self._now)
        dearest = max((c.usd_per_hour for c in pool.values() if self._unknown(c)), default=0.0)
        most = SAVED_TRIALS * dearest * (self.rules.explore_s + self.rules.join_s) / 3600
        self.allowance = min(self.allowance, max(most, 0.0))
        for peer, trial in list(self.trials.items()):
            if peer not in pool:
                self.end(peer, now, tried=False)
            elif pool[peer].rate.known or now >= trial.until:
                self.end(peer, now)

    def end(self, peer: str, now: float, *, tried: bool = True) -> None:
        """A trial is over; what was not spent of it goes back to the allowance. `tried`: the node is not tried again."""
        since, until, reserved = self.trials.pop(peer)
        if until > since:
            self.allowance += reserved * max(0.0, min(1.0, (until - now) / (until - since)))
        if tried:
            self.tried[peer] = now
            renewed(self.tried, peer)
            forget_oldest(self.tried)

    def begin(
        self, now: float, candidates: Iterable[Candidate], active: int, room_usd_per_hour: float,
        harmless: Callable[[Candidate], bool] = lambda _: True,
    ) -> list[str]:  # fmt: skip
        """Peers that are tried from now on, the cheapest promise first. `active`: number of active nodes; `room_usd_per_hour`:
        what the cap on spending leaves. A node that would make others wait is not `harmless`, and is passed over."""
        out: list[str] = []
        looked = 0
        places = max(1, int(TRIAL_SHARE * active)) - len(self.trials)
        for c in sorted((c for c in candidates if self._unknown(c)), key=promise):
            lasts = self.rules.explore_s + min(self.rules.join_s, c.catch_up_s if not c.ready else 0.0)
            costs = max(0.0, c.usd_per_hour - c.idle_usd_per_hour)
            reserve = c.usd_per_hour * lasts / 3600
            if len(out) >= places or reserve > self.allowance:
                break
            looked += 1
            if looked > MAX_LOOKED:
                break
            if costs <= room_usd_per_hour and harmless(c):
                room_usd_per_hour -= costs
                self.allowance -= reserve
                self.trials[c.peer] = Trial(now, now + lasts, reserve)
                out.append(c.peer)
        return out

    def _unknown(self, c: Candidate) -> bool:
        return not c.rate.known and c.peer not in self.tried and c.peer not in self.trials


def promise(c: Candidate) -> tuple[float | str, ...]:
    """Order of candidates: $ a token if a node is as fast as it may be, its price where nothing is known."""
    may_be = c.rate.upper(1.0)
    return (c.usd_per_hour / may_be if may_be > 0 else c.usd_per_hour), c.usd_per_hour, c.peer
