"""How each pair of members is linked, from what both say. Pure; must not know who asks.

What a member says costs as much as it has members to be linked with, however long its message was.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from heapq import nsmallest
from typing import NamedTuple

from msgspec.structs import replace

from p2p.membership.texts import MAX_WHY
from p2p.printable import printable
from p2p.protocol.reach import Linked

_RANK = {"relayed": 0, "inbound": 1, "mapped port": 3}
"""Whose word counts where two sides say different things: the one that was dialled knows only that, but for a port that its
router mapped. All other kinds are 2."""

Pair = tuple[str, str]
"""Two members' ids, the lesser one first."""


class PairLink(NamedTuple):
    """Two members; `one` comes before `other` in order of ids or names."""

    one: str
    other: str
    kind: str
    """as in `reachability.KINDS`"""
    why: str
    """why there is no better link; "" where there is nothing to say"""


class LinkBook:
    """What members say about their links. A pair has a link by the word of either."""

    def __init__(self) -> None:
        self._said: dict[str, dict[str, Linked]] = {}
        self._apart: set[Pair] = set()
        self._linked: set[Pair] = set()

    def put(self, peer: str, rows: Iterable[Linked], known: Callable[[str], bool]) -> bool:
        """`peer` says this in place of what it said before; whether that is anything new. Kept are the first row about each other
        member that is `known`, and of its text what can be shown."""
        new: dict[str, Linked] = {}
        for row in rows:
            if row.peer not in new and row.peer != peer and known(row.peer):
                new[row.peer] = replace(row, why=printable(row.why, MAX_WHY)) if row.why else row
        return self._replace(peer, new)

    def forget(self, peer: str) -> None:
        """`peer` says nothing any more. What others say of it stays: if it comes back soon, they do not say it again."""
        self._replace(peer, {})

    def gaps(self, members: Iterable[str]) -> frozenset[Pair]:
        """The pairs of `members` without a link, as far as they say so."""
        among, found = frozenset(members), set[Pair]()
        for one in among:
            found.update(_pair(one, other) for other in self._said.get(one, ()) if other in among)
        return frozenset(found & self._apart)

    def pairs(self, here: Container[str], most: int) -> list[PairLink]:
        """The first pairs of who is `here`, by id; those without a link come before the others."""
        found: list[Pair] = []
        for kept in (self._apart, self._linked):
            found += nsmallest(most - len(found), (pair for pair in kept if pair[0] in here and pair[1] in here))
        return [PairLink(*pair, *self._word(pair)[1:]) for pair in found]

    def _replace(self, peer: str, new: dict[str, Linked]) -> bool:
        old = self._said.pop(peer, {})
        if new:
            self._said[peer] = new
        changed = [other for other in old.keys() | new.keys() if old.get(other) != new.get(other)]
        for pair in (_pair(peer, other) for other in changed):
            self._apart.discard(pair)
            self._linked.discard(pair)
            if kind := self._word(pair)[1]:
                (self._apart if kind == "relayed" else self._linked).add(pair)
        return bool(changed)

    def _word(self, pair: Pair) -> tuple[int, str, str]:
        """Of what both say, what counts: rank, kind and why."""
        said = self._said.get(pair[0], {}).get(pair[1]), self._said.get(pair[1], {}).get(pair[0])
        return max(((_RANK.get(row.kind, 2), row.kind, row.why) for row in said if row is not None), default=(-1, "", ""))


def _pair(one: str, other: str) -> Pair:
    return (one, other) if one < other else (other, one)
