"""How each pair of members is linked, from what both say. Pure; must not know who asks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from p2p.protocol.reach import Linked

_RANK = {"relayed": 0, "inbound": 1, "mapped port": 3}
"""Whose word counts where two sides say different things: the one that was dialled knows only that, but for a port that its
router mapped. All other kinds are 2."""


class PairLink(NamedTuple):
    """Two members; `one` comes before `other` in order of ids or names."""

    one: str
    other: str
    kind: str
    """as in `reachability.KINDS`"""
    why: str
    """why there is no better link; "" where there is nothing to say"""


def pairs_of(said: Mapping[str, Iterable[Linked]]) -> list[PairLink]:
    """Each pair once, those without a link first. `said`: member -> how it says that it is linked with others."""
    found: dict[tuple[str, str], tuple[int, str, str]] = {}
    for one, rows in said.items():
        for row in rows:
            pair = min(one, row.peer), max(one, row.peer)
            word = _RANK.get(row.kind, 2), row.kind, row.why
            found[pair] = max(found.get(pair, word), word)
    rows_of = sorted(found.items(), key=lambda one: (one[1][1] != "relayed", one[0]))
    return [PairLink(one, other, kind, why) for (one, other), (_, kind, why) in rows_of]
