"""The cheapest nodes that together make enough: a covering knapsack, solved exactly where that is quick. Pure.

ECHO-2 (arXiv 2602.02192; section 1 of what this project unites) sorts by price over rate and takes from the front. That is up
to a whole node too dear, which is much where a few nodes do. Here that is the start: the best single node to end each front
with, then branch and bound from the relaxation that may take a part of a node, restricted to nodes that could still matter.
Equal nodes are one kind with a count, so a fleet of a few kinds is small however many there are. Of equally cheap sets the
one with fewest nodes: free nodes are no reason to use many. `consistent` closes the circle in which what is required depends
on the set, through the time that a version takes to reach all of it. Must not know what prices and rates are made of.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

EXACT = 1e-9
"""Relative: what is nearer than this is equal. A sum of ten thousand rates is not more exact."""

TRIFLE = 1e-9
"""Tokens per second that are nothing."""

NEAR = 1e-3
"""A set is as good as proven when none can be cheaper by more than this part."""

FRONTS = 200
"""Fronts of the sorted nodes, up to the one that is just enough, for which the best last node is looked for."""

ROUNDS = 16
"""Of set -> spread -> requirement -> set: each only raises the requirement, and a few do."""

TRIES = 12
"""Marks of download, up from the slowest, that are tried as the least a node must have."""


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

    def cover(self, taken: np.ndarray, prices: np.ndarray, rates: np.ndarray, proven: bool, required: float) -> Cover:
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
    """The cheapest set whose rates come to `required`; all nodes of any rate when even they do not."""
    p, r = np.asarray(prices, float), np.asarray(rates, float)
    if (p < 0).any():
        raise ValueError("a price is below zero")
    kinds = _kinds(p, r)
    if not required > 0:
        return Cover((), 0.0, 0.0, True, required)
    if float(kinds.rate @ kinds.count) < required * (1 - EXACT) or required == math.inf:
        return kinds.cover(kinds.count, p, r, True, required)
    need = kinds.need(required)
    best = _greedy(kinds, need)
    last = _last(kinds, need)
    if last is not None and last @ kinds.price < best @ kinds.price:
        best = last
    best, proven = _branch(kinds, need, best, nodes_limit)
    return kinds.cover(best, p, r, proven, required)


def greedy(prices: Sequence[float], rates: Sequence[float], required: float) -> Cover:
    """ECHO-2's order, and without what is then too much: what `cheapest` begins with, and is measured against."""
    p, r = np.asarray(prices, float), np.asarray(rates, float)
    kinds = _kinds(p, r)
    if not required > 0:
        return Cover((), 0.0, 0.0, True, required)
    enough = float(kinds.rate @ kinds.count) >= required * (1 - EXACT)
    return kinds.cover(_greedy(kinds, kinds.need(required)) if enough else kinds.count, p, r, False, required)


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


def _last(kinds: _Kinds, need: float) -> np.ndarray | None:
    """The cheapest of: some of the best, whole kinds but for the last, and one other node that alone makes the rest."""
    best: tuple[float, int, int, int] | None = None
    rate = price = 0.0
    fronts: list[tuple[float, float, int, int]] = []
    """(rate, price, whole kinds, of the next)"""
    for i in range(len(kinds.rate)):
        few = int(min(kinds.count[i], max(0.0, (need - rate) / kinds.rate[i]) + 1))
        fronts += [(rate + n * kinds.rate[i], price + n * kinds.price[i], i, n) for n in range(max(0, few - FRONTS), few)]
        fronts = fronts[-2 * FRONTS :]
        rate, price = rate + kinds.rate[i] * kinds.count[i], price + kinds.price[i] * kinds.count[i]
        if rate >= need:
            break
    for rate, price, i, n in fronts[-FRONTS:]:
        start = i if n < kinds.count[i] else i + 1
        able = np.flatnonzero(kinds.rate[start:] >= need - rate)
        if len(able):
            j = start + int(able[np.argmin(kinds.price[start:][able])])
            total = float(price + kinds.price[j])
            if best is None or total < best[0]:
                best = total, i, n, j
    if best is None:
        return None
    _, i, n, j = best
    taken = np.where(np.arange(len(kinds.rate)) < i, kinds.count, 0)
    taken[i] = n
    taken[j] += 1
    return taken


def _branch(kinds: _Kinds, need: float, best: np.ndarray, nodes_limit: int) -> tuple[np.ndarray, bool]:
    """Depth first, best value first, as much of a kind as there is first. (taken, proven)."""
    price, rate, count = kinds.price, kinds.rate, kinds.count
    whole = np.cumsum(rate * count)
    k = min(int(np.searchsorted(whole, need)), len(rate) - 1)
    least = float((price * count)[:k].sum() + (need - (whole[k - 1] if k else 0.0)) * price[k] / rate[k])
    top = float(best @ price)
    gap = top - least
    if gap <= EXACT * top:
        return best, True
    # What a node of each kind costs beyond what its rate is worth at the margin: no better set has more of that than the gap.
    dear = price - price[k] / rate[k] * rate
    with np.errstate(divide="ignore", invalid="ignore"):
        play = np.where(np.abs(dear) * count > gap, np.floor(gap / np.abs(dear) * (1 + EXACT) + EXACT), count).astype(int)
    play = np.minimum(play, count)
    base = np.where(dear < 0, count - play, 0)
    core = np.flatnonzero(play)
    p, r, n = price[core].tolist(), rate[core].tolist(), play[core].tolist()
    sum_rate = np.concatenate([[0.0], np.cumsum(rate[core] * play[core])]).tolist()
    sum_price = np.concatenate([[0.0], np.cumsum(price[core] * play[core])]).tolist()
    tiny = EXACT * need

    def bound(i: int, left: float) -> float:
        """The least that `left` costs with kinds from i on, if a part of a node could be taken."""
        if left <= tiny:
            return 0.0
        want = sum_rate[i] + left
        j = bisect_left(sum_rate, want, i + 1)
        if j >= len(sum_rate):
            return math.inf if want > sum_rate[-1] + tiny else sum_price[-1] - sum_price[i]
        return sum_price[j - 1] - sum_price[i] + (want - sum_rate[j - 1]) * p[j - 1] / r[j - 1]

    start, cost = need - float(base @ rate), float(base @ price)
    found: tuple | None = None
    """(kind, how many, the choice before)"""
    stack: list[tuple[int, int, float, float, tuple | None]] = []
    """(kind, how many of it to try next, left, cost, choices before)"""

    def push(i: int, left: float, cost: float, before: tuple | None) -> None:
        if i < len(p):
            stack.append((i, min(n[i], math.ceil(max(left, 0.0) / r[i])), left, cost, before))

    push(0, start, cost, None)
    looked = 0
    while stack and looked < nodes_limit:
        i, take, left, cost, before = stack.pop()
        looked += 1
        rest, paid = left - take * r[i], cost + take * p[i]
        hopeless = paid + bound(i + 1, rest) >= top - EXACT * gap
        if take and (rest < 0 or not hopeless):
            stack.append((i, take - 1, left, cost, before))
        if hopeless:
            continue  # and all the more with fewer of this kind, unless it was more than is needed: all others are worse value
        choice = (i, take, before)
        if rest <= tiny:
            top, found = paid, choice
        else:
            push(i + 1, rest, paid, choice)
    if found is not None:
        best = base.copy()
        while found is not None:
            i, take, found = found
            best[core[i]] += take
    return best, not stack or top - least <= NEAR * top


def consistent(
    prices: Sequence[float], rates: Sequence[float], need: Callable[[float], float], spread: Callable[[tuple[int, ...]],
    float], *, fixed: Collection[int] = (), downloads: Sequence[float] = (), nodes_limit: int = 10_000,
) -> Cover:  # fmt: skip
    """A cheap set that is enough for what it itself makes necessary: `need(seconds)` is what is required when a version takes
    so long to reach all, `spread(set)` how long it takes. `fixed` are in it anyway. With `downloads` (bytes per second) it
    also tries without the slowest, in case what they add to the spread costs more than they save. """
    held = set(fixed)
    free = [i for i in range(len(prices)) if i not in held]
    marks = sorted({downloads[i] for i in free}) if len(downloads) else []
    if len(marks) > TRIES:
        marks = marks[:: -(-len(marks) // TRIES)]
    best = None
    for mark in marks or [0.0]:
        allowed = [i for i in free if downloads[i] >= mark] if marks else free
        cover = _settle(prices, rates, need, spread, sorted(fixed), allowed, nodes_limit)
        if best is None or _rank(cover) < _rank(best):
            best = cover
        if cover.required <= need(0.0) * (1 + EXACT):
            break  # how long a version takes makes no difference here
    assert best is not None
    return best


def _rank(cover: Cover) -> tuple:
    return cover.required == math.inf, cover.short > 0, cover.short, cover.price, len(cover.chosen)


def _settle(
    prices: Sequence[float], rates: Sequence[float], need: Callable[[float], float], spread: Callable[[tuple[int, ...]], float],
    fixed: list[int], allowed: list[int], nodes_limit: int,
) -> Cover:  # fmt: skip
    have, paid = math.fsum(rates[i] for i in fixed), math.fsum(prices[i] for i in fixed)
    free_prices, free_rates = [prices[i] for i in allowed], [rates[i] for i in allowed]
    target = need(spread(tuple(fixed)) if fixed else 0.0)
    for _ in range(ROUNDS):
        part = cheapest(free_prices, free_rates, target - have, nodes_limit=nodes_limit)
        chosen = tuple(sorted([*fixed, *(allowed[i] for i in part.chosen)]))
        seconds = spread(chosen) if chosen else 0.0
        wanted = need(seconds)
        out = Cover(chosen, paid + part.price, have + part.rate, part.proven, wanted, seconds)
        if not out.short or part.short or wanted == math.inf:
            return out
        target = max(target, wanted)
    return replace(out, proven=False)
