"""Which sequences fall behind what others achieve. Pure: snapshots and times in, verdicts out.

A node that sends one valid token now and then never stalls, and holds a group up for as long as it likes. So each sequence has a
deadline relative to the others: longer than one stays at an honest node by far, and at a fraction of its pace. Compared is with
nodes whose word counts; without any, nothing is late. Must not know versions, the network or what follows.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from learner.rollouts.stalls import Stall

WINDOW_S = 60.0
"""What a node made is forgotten in about so many seconds: what others achieve changes with the answers' lengths."""

ENOUGH_ENDS = 8.0
"""Ended sequences of a node before anything of it is forgotten: with fewer in the window its usual stay would be chance."""

LEAST_S = 1.0
"""Seconds of sequences at a node before it is compared with."""

SLOW = 8.0
"""A sequence is late at a pace so many times lower than the others'. Devices differ, and the slower ones are welcome."""

STAYS = 4.0
"""A sequence may stay so many times as long as one usually does at the others, queue included, before its pace counts."""


@dataclass(slots=True)
class _Work:
    """Of one node, of late."""

    sequence_s: float = 0.0
    """seconds of all its sequences together"""
    tokens: float = 0.0
    ended: float = 0.0
    made: int = 0
    """tokens in all, at the last look"""
    ends: int = 0
    """sequences that ended in all, at the last look"""


class PaceWatch:
    """`look` is called every few seconds with what every node holds and has made."""

    def __init__(self) -> None:
        self._work: dict[str, _Work] = {}
        self._began: dict[str, tuple[float, int]] = {}
        """request id -> (when it was first seen, its tokens then)"""
        self._looked: float | None = None
        self.usual_s = 0.0
        """seconds that a sequence usually stays at a node; 0 while that is not known"""
        self.least = 0.0
        """tokens a second of a sequence below which it is late, the others' pace over SLOW; 0 while that is not known"""

    def look(
        self, held: Mapping[str, Mapping[str, int]], made: Mapping[str, int], ended: Mapping[str, int], now: float, *,
        credible: Callable[[str], bool], patience: Callable[[str], float],
    ) -> list[Stall]:  # fmt: skip
        """`held`: node -> request id -> completion tokens so far; `made`, `ended`: node -> tokens and sequences in all.
        `patience(node)`: seconds that a sequence may stay there whatever others achieve. What to take away, by node."""
        self._count(held, made, ended, now)
        began = {r: self._began.get(r, (now, tokens)) for requests in held.values() for r, tokens in requests.items()}
        self._began = began
        # Who ends nothing tells nothing of what is usual: it would be withholders who say how slow one may be.
        known = {n: w for n, w in self._work.items() if w.sequence_s >= LEAST_S and w.ended >= 0.5 and credible(n)}
        paces = {n: w.tokens / w.sequence_s for n, w in known.items()}
        stays = {n: w.sequence_s / w.ended for n, w in known.items()}
        self.usual_s = median(stays.values()) if stays else 0.0
        self.least = median(paces.values()) / SLOW if paces else 0.0
        pace_order, stay_order = sorted(paces.values()), sorted(stays.values())
        stalls = []
        for node, requests in held.items():
            if not requests or len(known) <= (node in known):
                continue
            least = _median_without(pace_order, paces.get(node)) / SLOW
            wait = patience(node) + STAYS * _median_without(stay_order, stays.get(node))
            late = tuple(
                r for r, tokens in requests.items() if (s := now - began[r][0]) > wait and tokens - began[r][1] < s * least
            )
            if late:
                what = f"under {least:.3g} tokens/s, an {SLOW:.0f}th of the others' pace, for more than {wait:.0f} s"
                stalls.append(Stall(node, late, what))
        return stalls

    def _count(
        self, held: Mapping[str, Mapping[str, int]], made: Mapping[str, int], ended: Mapping[str, int], now: float
    ) -> None:
        passed = 0.0 if self._looked is None else now - self._looked
        self._looked = now
        forgets = math.exp(-passed / WINDOW_S)
        for node in held.keys() - self._work.keys():
            self._work[node] = _Work(made=made.get(node, 0), ends=ended.get(node, 0))
        for node, work in list(self._work.items()):
            tokens, ends = made.get(node, 0), ended.get(node, 0)
            keep = forgets if work.ended > ENOUGH_ENDS or node not in held else 1.0
            work.sequence_s = work.sequence_s * keep + passed * len(held.get(node, ()))
            work.tokens = work.tokens * keep + max(0, tokens - work.made)
            work.ended = work.ended * keep + max(0, ends - work.ends)
            work.made, work.ends = tokens, ends
            if node not in held and work.sequence_s < LEAST_S / 2:
                del self._work[node]


def _median_without(ordered: Sequence[float], one: float | None) -> float:
    """The median of sorted numbers but for this one of them. For each of 3,000 nodes sorted anew, they took two seconds."""
    gap = len(ordered) if one is None else bisect_left(ordered, one)
    count = len(ordered) - (one is not None)
    low, high = ((i if i < gap else i + 1) for i in ((count - 1) // 2, count // 2))
    return ordered[high] if count % 2 else (ordered[low] + ordered[high]) / 2
