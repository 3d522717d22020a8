"""Who passes on what between members that have no link with each other. Pure.

Of two members without a link, what one distributes reaches the other through members that are linked with both. They share it by
the number of the chunk, so none of them carries it all; the source makes those distribute less whose uplink has more to do. The
number of copies is what it would be with a link: each member gets each chunk once. Must not know chunks or channels.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from p2p.protocol.reach import PassOn

MAX_DEPUTIES = 8
"""Members that share what one passes to another: enough that each has a small part of it."""

MAX_DUTIES = 4096
"""Rows that one member is told at the most: 64 members that are linked with nobody but it."""


def deputies_of(members: Collection[str], gaps: Iterable[tuple[str, str]]) -> dict[str, tuple[PassOn, ...]]:
    """What each member is to pass on. `gaps`: pairs of members without a link. Nobody passes on between two whom none is linked
    with both; they have it from the source."""
    apart: dict[str, set[str]] = {peer: set() for peer in members}
    for one, other in gaps:
        if one in apart and other in apart and one != other:
            apart[one].add(other)
            apart[other].add(one)
    found: dict[str, list[PassOn]] = {}
    order = sorted(members)
    for one in order:
        for number, other in enumerate(sorted(apart[one])):
            able = [peer for peer in order if peer not in (one, other) and peer not in apart[one] and peer not in apart[other]]
            # Another start for each pair: the same few would serve all of them.
            start = number % len(able) if able else 0
            chosen = (able[start:] + able[:start])[:MAX_DEPUTIES]
            for share, peer in enumerate(chosen):
                found.setdefault(peer, []).append(PassOn(one, other, share, len(chosen)))
    return {peer: tuple(rows[:MAX_DUTIES]) for peer, rows in found.items()}


def mostly_apart(members: Collection[str], gaps: Iterable[tuple[str, str]]) -> frozenset[str]:
    """Members that have no link with more than half of the others."""
    count = dict.fromkeys(members, 0)
    for pair in {frozenset(gap) for gap in gaps}:
        if pair <= count.keys():
            for peer in pair:
                count[peer] += 1
    return frozenset(peer for peer, gone in count.items() if 2 * gone > len(count) - 1)


def by_sender(rows: Iterable[PassOn], links: Collection[str]) -> Mapping[str, tuple[PassOn, ...]]:
    """What is to be passed on, by whom it comes from. Rows that make no sense are left out; `links`: who could be meant."""
    found: dict[str, list[PassOn]] = {}
    for row in rows:
        if row.share < row.of <= MAX_DEPUTIES and row.source in links and row.target in links and row.source != row.target:
            found.setdefault(row.source, []).append(row)
    return {source: tuple(mine) for source, mine in found.items()}
