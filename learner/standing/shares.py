"""How many sequences each node may hold, of what all of them hold. Pure.

Identities are free, so a bound on each of them bounds nothing: what the unproven hold together, and what they have made of late
together, is bounded as well while a proven peer is there. Must not know sequences, versions or links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from learner.standing.standing import FIRST, Standing

MEMORY = 512.0
"""Ended sequences that the share of the unproven is counted over: those before count ever less."""


class NodeHolding(NamedTuple):
    """What one node has, and could have."""

    peer: str
    capacity: int
    """sequences that it says it can decode at once"""
    load: int
    """sequences with it"""
    able: bool = True
    """it can be given work now"""
    slow: bool = False
    """it gives way to quicker ones"""


@dataclass
class MadeOfLate:
    """How much of what ended of late the unproven made."""

    _all: float = field(default=0.0, init=False)
    _unproven: float = field(default=0.0, init=False)

    def ended(self, *, proven: bool) -> None:
        keep = 1.0 - 1.0 / MEMORY
        self._all = self._all * keep + 1.0
        self._unproven = self._unproven * keep + (not proven)

    def over(self, share: float) -> bool:
        """Whether the unproven made more than this share of it."""
        return self._unproven > max(FIRST, share * self._all)


def limits(
    standing: Standing, nodes: Sequence[NodeHolding], made: MadeOfLate, spare: int = 0, now: float = 0.0
) -> dict[str, int]:
    """Most sequences of each node that may not hold as many as it can; the others are not in it.

    Those that delivered nothing, and those that were doubted lately (`now` is Unix seconds; where they are the lesser part, or
    have ended nothing since), hold together at most `unproven_share` of all that is held once somebody has delivered, FIRST at
    least. While a proven node is able to work and the unproven made more than that share of what ended of late, they get `spare`
    sequences together. What is free goes to those first that were never expelled, then to those least doubted, then to those
    that delivered most: who is about to be proven is not kept from it by crowds.

    While no proven node is able to work, slow ones get nothing, and what they hold does not count: who ended one sequence and is
    late with the others must not keep those waiting that have yet to be given their first. """
    out: dict[str, int] = {}
    strangers: list[NodeHolding] = []
    unproven: list[NodeHolding] = []
    again: list[NodeHolding] = []
    """on trial again, and at work"""
    places, proven_able = 0, any(node.able and standing.proven(node.peer) for node in nodes)
    for node in nodes:
        may = standing.may_hold(node.peer, node.capacity)
        if may < node.capacity:
            out[node.peer] = may
        if not standing.proven(node.peer):
            unproven.append(node)
        if node.slow and not proven_able:
            out[node.peer] = min(may, node.load)
        elif standing.delivered(node.peer) and not standing.doubted(node.peer, now):
            places += may if node.able else 0
        elif standing.delivered(node.peer) and not standing.doubts(node.peer):
            again.append(node)
        else:
            strangers.append(node)
    if sum(out.get(node.peer, node.capacity) for node in again if node.able) <= places:
        strangers += again  # else they are most of the run: what befell so many at once need not be their fault
    share = min(standing.rules.unproven_share, 0.999)
    if places:
        most = max(FIRST, int(places * share / (1.0 - share))) if share else 0
        _deal(out, standing, strangers, most - sum(node.load for node in strangers))
    if proven_able and made.over(share):
        _deal(out, standing, unproven, spare)
    return out


def _deal(out: dict[str, int], standing: Standing, nodes: Sequence[NodeHolding], left: int) -> None:
    """Let these have `left` sequences more together, in their order."""
    for node in sorted(nodes, key=lambda n: standing.order(n.peer)):
        may = out.get(node.peer, node.capacity)
        more = max(0, min(left, may - node.load)) if node.able else 0
        out[node.peer] = min(may, node.load + more)  # what it holds beyond that raises nothing
        left -= more
