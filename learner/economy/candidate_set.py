"""Nodes as one decision sees them: what each is worth, what a set makes, costs, and is required to make. Pure.

Must not know which are chosen, nor the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from functools import partial

from learner.economy.candidates import Candidate, Rules
from learner.economy.cover import EXACT, Cover, consistent
from learner.economy.demand import Demand, required, within_reach
from learner.economy.exploration import promise

Spread = Callable[[Collection[str]], float]


class View:
    """The candidates of one decision."""

    def __init__(self, pool: dict[str, Candidate], spread: Spread, demand: Demand | None, rules: Rules) -> None:
        self.pool, self.rules = pool, rules
        self.demand = demand if demand is not None and demand.known else None
        self.names = sorted(pool)
        self._spread, self._seen = spread, (frozenset[str](), 0.0)
        self._value = {p: c.rate.lower(rules.z) for p, c in pool.items()}
        self._idle = math.fsum(c.idle_usd_per_hour for c in pool.values())
        self.rules_said = f"with S={self.demand.staleness}, kappa={self.demand.kappa}" if self.demand else ""

    def value(self, peer: str) -> float:
        """Tokens per second that a node is credited with."""
        return self._value[peer]

    def supply(self, peers: Iterable[str]) -> float:
        """Tokens per second that these make together."""
        return math.fsum(self._value[p] for p in peers)

    def price(self, peers: Iterable[str]) -> float:
        """$ an hour of these when active."""
        return math.fsum(self.pool[p].usd_per_hour for p in peers)

    def idle(self) -> float:
        """$ an hour if none were active."""
        return self._idle

    def extra(self, peers: Iterable[str]) -> float:
        """$ an hour that these cost more when active than idle."""
        return math.fsum(self.pool[p].usd_per_hour - self.pool[p].idle_usd_per_hour for p in peers)

    def fits(self, cap: float, active: Collection[str], more: Iterable[str], first: Collection[str] = ()) -> set[str]:
        """Of `more`, what `cap` dollars an hour leave room for beside those active: `first` ones first, then by value."""
        room = cap - self._idle - self.extra(active)
        out = set()
        for c in sorted((self.pool[p] for p in more), key=lambda c: (c.peer not in first, self.dear(c.peer), *promise(c))):
            extra = c.usd_per_hour - c.idle_usd_per_hour
            if extra <= 0 or extra <= room * (1 + EXACT):
                room -= extra
                out.add(c.peer)
        return out

    def costs(self, peer: str) -> bool:
        return self.pool[peer].usd_per_hour > 0

    def dear(self, peer: str) -> float:
        """$ an hour for each token per second."""
        value = self._value[peer]
        return self.pool[peer].usd_per_hour / value if value > 0 else math.inf

    def spread(self, peers: Collection[str]) -> float:
        """Seconds that a version takes to the last of these nodes; 0 for none."""
        if not peers:
            return 0.0
        if self._seen[0] != frozenset(peers):
            self._seen = frozenset(peers), self._spread(frozenset(peers))
        return self._seen[1]

    def required(self, peers: Collection[str]) -> float:
        """Tokens per second that the capacity rule asks of this set; inf when no capacity suffices."""
        return required(self.demand, self.spread(peers), overlap=self.rules.overlap) if self.demand else math.inf

    def unreachable(self, peers: Collection[str]) -> bool:
        return self.required(peers) == math.inf

    def aim(self, peers: Collection[str]) -> float:
        """`required`, or the best in reach where no capacity suffices."""
        assert self.demand is not None
        return within_reach(self.demand, self.spread(peers), overlap=self.rules.overlap)

    def cover(self, able: Collection[str], level: float, fixed: Collection[str] = ()) -> Cover:
        """The cheapest of these that make `level` times what they themselves require; what is in reach when no set can."""
        assert self.demand is not None
        values = [self._value[p] if p in able else 0.0 for p in self.names]
        prices = [max(0.0, self.pool[p].usd_per_hour - self.pool[p].idle_usd_per_hour) for p in self.names]
        downloads = [self.pool[p].download for p in self.names]

        def spread(chosen: tuple[int, ...]) -> float:
            return self.spread(frozenset(self.names[i] for i in chosen))

        held = [i for i, p in enumerate(self.names) if p in fixed]

        def solve(rule: Callable[..., float]) -> Cover:
            need = partial(rule, self.demand, overlap=self.rules.overlap)
            return consistent(prices, values, lambda s: level * need(s), spread, fixed=held, downloads=downloads)

        strict = solve(required)
        return strict if strict.required < math.inf else solve(within_reach)
