"""The cheapest nodes that together make enough: a covering knapsack, solved exactly where that is quick. Pure.

ECHO-2 (arXiv 2602.02192) sorts by price over rate and takes from the front. That is up to a whole node too dear, which is much
where a few nodes do. Here that is the start; branch and bound follows, from the relaxation that may take a part of a node,
restricted to nodes that could still matter. Equal nodes are one kind with a count, so a fleet of a few kinds is small however
many nodes it has. Of equally cheap sets the one with fewest nodes wins: free nodes are no reason to use many. `consistent`
closes the circle in which the required rate depends on the set, through the time that a version takes to reach all of it.
Must not know what prices and rates are made of.

Why not `scipy.optimize.milp`: a node's rate is measured, so nearly every node is a kind of its own. HiGHS found no set for 10,000
such nodes within 8 s, where this takes 20 ms and at most 0.1 s; for 60 nodes it took 5 to 13 ms against 0.3 ms, and
`consistent` asks dozens of times in one tick of the head. The tests still use milp as the oracle.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

EXACT = 1e-9
"""Relative: numbers that are nearer than this are equal. A sum of ten thousand rates is not more exact."""

TRIFLE = 1e-9
"""Tokens per second: a node of this rate or less makes nothing."""

NEAR = 1e-3
"""Relative: a set counts as proven when no other can be cheaper by more than this part of its price. Prices are estimates."""

ROUNDS = 16
"""How often a set's spread may raise the requirement and with it the set. Each round only raises it, and a few rounds do."""

TRIES = 12
"""How many download rates, up from the slowest, are tried as the least that a node must have. Each try costs a cover."""


@dataclass(frozen=True, slots=True)
class Cover:
    """Which nodes (indices, ascending), and what they come to."""

    chosen: tuple[int, ...]
    price: float
    rate: float
    proven: bool
    """that no other set that is enough is cheaper (by more than `NEAR`)"""
    required: float
    spread_s: float = 0.0
    """of this set (`consistent` only)"""

    @property
    def short(self) -> float:
        """By how much it is not enough; then it is all there is, or no capacity suffices (inf)."""
        if self.required == math.inf:
            return math.inf
        return self.required - self.rate if self.rate < self.required * (1 - EXACT) else 0.0


@dataclass
class _Kinds:
    """Nodes that are worth something, by price and rate, best value first."""

    members: list[np.ndarray]
    """indices of each kind"""
    price: np.ndarray
    """with a trifle for each node, so that fewer are cheaper"""
    rate: np.ndarray
    count: np.ndarray

    def need(self, required: float) -> float:
        """What counts as enough; never nothing."""
        return max(required * (1 - EXACT), EXACT * float(self.rate.max(initial=0.0)))

    def cover(self, taken: np.ndarray, prices: np.ndarray, rates: np.ndarray, *, proven: bool, required: float) -> Cover:
        """`taken` (how many of each kind) as a set of nodes."""
        parts = [self.members[i][: taken[i]] for i in np.flatnonzero(taken).tolist()]
        chosen = np.sort(np.concatenate(parts)) if parts else np.zeros(0, int)
        return Cover(tuple(chosen.tolist()), math.fsum(prices[chosen]), math.fsum(rates[chosen]), proven, required)


def _kinds(prices: np.ndarray, rates: np.ndarray) -> _Kinds:
    worth = np.flatnonzero((rates > TRIFLE) & np.isfinite(rates) & np.isfinite(prices))
    dearest = float(prices[worth].max(initial=0.0))
    pairs, which = np.unique(np.stack([prices[worth], rates[worth]], axis=1), axis=0, return_inverse=True)
    price = pairs[:, 0] + (EXACT * dearest if dearest > 0 else 1.0)
    order = np.lexsort((-pairs[:, 1], price / pairs[:, 1]))
    by_kind = np.argsort(which.reshape(-1), kind="stable")
    count = np.bincount(which.reshape(-1), minlength=len(pairs))
    members = np.split(worth[by_kind], np.cumsum(count)[:-1]) if len(pairs) else []
    return _Kinds([members[i] for i in order.tolist()], price[order], pairs[order, 1], count[order])


def cheapest(prices: Sequence[float], rates: Sequence[float], required: float, *, nodes_limit: int = 10_000) -> Cover:
    """The cheapest set whose rates come to `required`; all nodes of any rate when even they do not. The search looks at no more
    than `nodes_limit` branches: past that the set is sound, and `proven` says whether it is known to be near the cheapest. With 0
    it is ECHO-2's: by price over rate, and without what is then too much.

    ValueError for a price below zero."""
    price, rate = np.asarray(prices, float), np.asarray(rates, float)
    if (price < 0).any():
        raise ValueError("a price is below zero")
    if not required > 0:
        return Cover((), 0.0, 0.0, True, required)
    kinds = _kinds(price, rate)
    if float(kinds.rate @ kinds.count) < required * (1 - EXACT) or required == math.inf:
        return kinds.cover(kinds.count, price, rate, proven=True, required=required)
    need = kinds.need(required)
    best, proven = _branch(kinds, need, _greedy(kinds, need), nodes_limit)
    return kinds.cover(best, price, rate, proven=proven, required=required)


def _greedy(kinds: _Kinds, need: float) -> np.ndarray:
    before = np.concatenate([[0.0], np.cumsum(kinds.rate * kinds.count)[:-1]])
    wanted = np.ceil(np.maximum(need - before, 0.0) / kinds.rate)
    taken = np.minimum(wanted, kinds.count).astype(int)
    spare = float(kinds.rate @ taken) - need
    for i in np.argsort(-kinds.price, kind="stable").tolist():
        if taken[i] and kinds.rate[i] <= spare:
            drop = min(int(taken[i]), int(spare / kinds.rate[i]))
            taken[i] -= drop
            spare -= drop * kinds.rate[i]
    return taken


class _Choice(NamedTuple):
    """So many nodes of this kind, after what was chosen of the kinds before it."""

    kind: int
    taken: int
    before: _Choice | None


class _Branch(NamedTuple):
    """What is still to be tried: `taken` nodes of `kind`, then fewer, where the kinds before it left `rest` to be made."""

    kind: int
    taken: int
    rest: float
    paid: float
    before: _Choice | None


class _Core:
    """The kinds that could still matter, best value first, and what any rate costs at least with the rest of them."""

    def __init__(self, price: np.ndarray, rate: np.ndarray, count: np.ndarray, need: float) -> None:
        self.price, self.rate, self.count = price.tolist(), rate.tolist(), count.tolist()
        self.tiny = EXACT * need
        """a rate that is nothing beside what is needed"""
        self._rates = np.concatenate([[0.0], np.cumsum(rate * count)]).tolist()
        self._prices = np.concatenate([[0.0], np.cumsum(price * count)]).tolist()
        """both: of all nodes of the kinds before each"""

    def __len__(self) -> int:
        return len(self.price)

    def least(self, first: int, rest: float) -> float:
        """The least that a rate of `rest` costs with the kinds from `first` on, if a part of a node could be taken."""
        if rest <= self.tiny:
            return 0.0
        upto = self._rates[first] + rest
        end = bisect_left(self._rates, upto, first + 1)
        if end >= len(self._rates):
            return math.inf if upto > self._rates[-1] + self.tiny else self._prices[-1] - self._prices[first]
        part = (upto - self._rates[end - 1]) * self.price[end - 1] / self.rate[end - 1]
        return self._prices[end - 1] - self._prices[first] + part

    def branch(self, kind: int, rest: float, paid: float, before: _Choice | None) -> list[_Branch]:
        """The branch that begins with as many nodes of `kind` as are of use; none past the last kind."""
        if kind >= len(self):
            return []
        most = min(self.count[kind], math.ceil(max(rest, 0.0) / self.rate[kind]))
        return [_Branch(kind, most, rest, paid, before)]


def _branch(kinds: _Kinds, need: float, best: np.ndarray, nodes_limit: int) -> tuple[np.ndarray, bool]:
    """Depth first, best value first, as much of a kind as there is first. (how many of each kind, whether that is proven)."""
    price, rate, count = kinds.price, kinds.rate, kinds.count
    whole = np.cumsum(rate * count)
    marginal = min(int(np.searchsorted(whole, need)), len(rate) - 1)
    """the kind of which the relaxation takes a part"""
    before = whole[marginal - 1] if marginal else 0.0
    least = float((price * count)[:marginal].sum() + (need - before) * price[marginal] / rate[marginal])
    top = float(best @ price)
    gap = top - least
    if gap <= EXACT * top:
        return best, True
    # What a node of each kind costs beyond what its rate is worth at the margin: no better set has more of that than the gap.
    dear = price - price[marginal] / rate[marginal] * rate
    with np.errstate(divide="ignore", invalid="ignore"):
        free = np.where(np.abs(dear) * count > gap, np.floor(gap / np.abs(dear) * (1 + EXACT) + EXACT), count).astype(int)
    free = np.minimum(free, count)
    """so many of each kind may be taken or left; the others are settled"""
    settled = np.where(dear < 0, count - free, 0)
    at = np.flatnonzero(free)
    core = _Core(price[at], rate[at], free[at], need)
    found: _Choice | None = None
    stack = core.branch(0, need - float(settled @ rate), float(settled @ price), None)
    looked = 0
    while stack and looked < nodes_limit:
        kind, taken, rest_before, paid_before, chosen = stack.pop()
        looked += 1
        rest, paid = rest_before - taken * core.rate[kind], paid_before + taken * core.price[kind]
        hopeless = paid + core.least(kind + 1, rest) >= top - EXACT * gap
        if taken and (rest < 0 or not hopeless):
            stack.append(_Branch(kind, taken - 1, rest_before, paid_before, chosen))
        if hopeless:
            continue  # and all the more with fewer of this kind, unless it was more than is needed: all others are worse value
        choice = _Choice(kind, taken, chosen)
        if rest <= core.tiny:
            top, found = paid, choice
        else:
            stack += core.branch(kind + 1, rest, paid, choice)
    if found is not None:
        best = settled.copy()
        while found is not None:
            best[at[found.kind]] += found.taken
            found = found.before
    return best, not stack or top - least <= NEAR * top


def consistent(
    prices: Sequence[float], rates: Sequence[float], need: Callable[[float], float], spread: Callable[[tuple[int, ...]],
    float], *, fixed: Collection[int] = (), downloads: Sequence[float] = (), nodes_limit: int = 10_000,
) -> Cover:  # fmt: skip
    """A cheap set that is enough for what it itself makes necessary: `need(seconds)` is what is required when a version takes
    so long to reach all, `spread(set)` how long it takes. `fixed` are in it anyway. With `downloads` (bytes per second) it
    also tries without the slowest, in case what they add to the spread costs more than they save."""
    held = set(fixed)
    fixed = sorted(held)
    have, paid = math.fsum(rates[i] for i in fixed), math.fsum(prices[i] for i in fixed)

    def settle(allowed: list[int]) -> Cover:
        """From set to spread to requirement to set, until a set is enough for itself or nothing is."""
        free_prices, free_rates = [prices[i] for i in allowed], [rates[i] for i in allowed]
        target = need(spread(tuple(fixed)) if fixed else 0.0)
        for _ in range(ROUNDS):
            part = cheapest(free_prices, free_rates, target - have, nodes_limit=nodes_limit)
            chosen = tuple(sorted([*fixed, *(allowed[i] for i in part.chosen)]))
            seconds = spread(chosen) if chosen else 0.0
            wanted = need(seconds)
            out = Cover(chosen, paid + part.price, have + part.rate, proven=part.proven, required=wanted, spread_s=seconds)
            if not out.short or part.short or wanted == math.inf:
                return out
            target = max(target, wanted)
        return replace(out, proven=False)

    free = [i for i in range(len(prices)) if i not in held]
    marks = sorted({downloads[i] for i in free}) if len(downloads) else []
    if len(marks) > TRIES:
        marks = marks[:: -(-len(marks) // TRIES)]
    best = None
    for mark in marks or [0.0]:
        cover = settle([i for i in free if downloads[i] >= mark] if marks else free)
        if best is None or _rank(cover) < _rank(best):
            best = cover
        if cover.required <= need(0.0) * (1 + EXACT):
            break  # how long a version takes makes no difference here
    assert best is not None
    return best


def _rank(cover: Cover) -> tuple[bool, bool, float, float, int]:
    return cover.required == math.inf, cover.short > 0, cover.short, cover.price, len(cover.chosen)
