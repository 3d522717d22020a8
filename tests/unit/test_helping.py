"""What the source takes over in groups: one group's part of a chunk, of whoever would come to it last."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2p.broadcast.peer_groups import EVERYWHERE, Grid, PeerPlaces, duty_of
from p2p.broadcast.policies.seeding import FIRST_WINDOW, HELP_AFTER_S, SwarmPace
from p2p.broadcast.policies.takeover import LOOK_S, TakeOver, TakeOvers
from p2p.broadcast.session import Session

LEFT, RIGHT = ("a", "b", "c"), ("x", "y", "z")
PLACES = PeerPlaces(-1, {p: int(p in RIGHT) for p in (*LEFT, *RIGHT)}, (0, 1), witnesses=frozenset((*LEFT, *RIGHT)))
PACE = SwarmPace(through=10.0, transit_s=0.1)
"""A member of a group of three relays a chunk to its group in 0.3 s."""

OUT = (1 << 8) - 1


def source(holds: dict[str, list[int]], places: PeerPlaces = PLACES) -> Session:
    """A source that has made eight chunks, and what its peers hold."""
    session = Session(me="source", source=None, now=0.0, places=places)
    session.learn(range(8), 0.0)
    for chunk in range(8):
        session.hold(chunk, None, duty=0, now=0.0)
    session.close(8)
    for peer in (*LEFT, *RIGHT):
        session.join(peer, holds.get(peer, ()), 0.0)
    return session


def test_the_one_with_most_to_relay_is_relieved_of_the_last_and_its_group_gets_it() -> None:
    helping = TakeOvers(source({"a": [0, 1, 2], "y": [0, 1, 2, 3, 4]}))
    assert helping.next(OUT, PACE, PLACES, 0.0) == TakeOver("y", 4, ("x", "z"))
    assert helping.next(OUT, PACE, PLACES, 0.0) == TakeOver("y", 3, ("x", "z")), "not what it was relieved of before"
    assert helping.next(OUT, PACE, PLACES, 0.0) == TakeOver("a", 2, ("b", "c")), "both have three now"


def test_what_somebody_else_of_the_group_holds_is_being_relayed_and_left_alone() -> None:
    session = source({"a": [0, 1, 2], "b": [0, 1, 2]})
    assert TakeOvers(session).next(OUT, PACE, PLACES, 0.0) is None
    session.peer_has("c", [3, 4, 5], 0.0)
    assert TakeOvers(session).next(OUT, PACE, PLACES, 0.0) == TakeOver("c", 5, ("a", "b"))
    assert TakeOvers(session).next(OUT & ~(1 << 5), PACE, PLACES, 0.0) == TakeOver("c", 4, ("a", "b")), "of what is out"


@pytest.mark.parametrize(
    ("pace", "places"),
    [
        (SwarmPace(10.0, 0.6), PLACES),
        (SwarmPace(20.0, 0.3), PLACES),
        (SwarmPace(0.0, 0.1), PLACES),
        (PACE, replace(PLACES, lans=frozenset({0}))),
        (PACE, replace(PLACES, witnesses=frozenset("bc"))),
    ],
    ids=["begun before it is told", "a fast swarm", "no pace known", "a site", "who holds it is no witness"],
)
def test_nothing_is_taken_over(pace: SwarmPace, places: PeerPlaces) -> None:
    """`a` would come to its third chunk in 0.6 s, or so long as the pace says."""
    assert TakeOvers(source({"a": [0, 1, 2]})).next(OUT, PACE, PLACES, 0.0) is not None
    assert TakeOvers(source({"a": [0, 1, 2]})).next(OUT, pace, places, 0.0) is None


def test_whom_to_help_is_looked_at_now_and_then_while_nobody_needs_it() -> None:
    session = source({})
    helping = TakeOvers(session)
    assert helping.next(OUT, PACE, PLACES, 1.0) is None
    session.peer_has("a", [0, 1, 2], 1.0)
    assert helping.next(OUT, PACE, PLACES, 1.0 + LOOK_S / 2) is None
    assert helping.next(OUT, PACE, PLACES, 1.0 + LOOK_S) == TakeOver("a", 2, ("b", "c"))


def test_who_is_relieved_still_brings_the_chunk_to_the_other_groups() -> None:
    places = PeerPlaces(0, {"me": 0, "a": 0, "b": 1}, (0, 1))
    relay = Session(me="me", source="source", now=0.0, places=places)
    relay.learn([0], 0.0)
    for peer in "ab":
        relay.join(peer, (), 0.0)
    relay.hold(0, "source", duty=EVERYWHERE, now=0.0)
    relay.relieve([0])
    assert relay.next(["a", "b"], 0.0) == ("b", 0, duty_of([1]))
    assert relay.next(["a", "b"], 0.0) is None


def test_the_source_helps_once_all_is_handed_out_and_for_so_long_under_way() -> None:
    grid = Grid([f"p{i}" for i in range(12)], mesh=6, group=4)
    places = grid.source_places()
    assert places is not None
    lanes = len(set(places.lanes.values()))
    session = Session(me="source", source=None, now=0.0, places=places)
    for peer in grid:
        session.join(peer, (), 0.0)
    total = int(lanes * FIRST_WINDOW)
    for chunk in range(total):
        session.learn([chunk], 0.0)
        session.hold(chunk, None, duty=0, now=0.0)
    session.close(total)
    peers = list(grid)
    to: dict[int, str] = {}
    while (found := session.next(peers, 0.0)) is not None:
        assert found[2] == EVERYWHERE
        to[found[1]] = found[0]
        session.peer_has(found[0], [found[1]], 0.01)
    assert len(to) == total > len(peers) and not session.relieved(), "too early to help"
    handed: dict[int, set[str]] = {}
    told: list[tuple[str, int]] = []
    while (found := session.next(peers, HELP_AFTER_S)) is not None:
        told += session.relieved()
        assert found[2] == 0, "a copy, with no duty"
        handed.setdefault(found[1], set()).add(found[0])
    assert handed and handed.keys() == {chunk for _, chunk in told}
    for holder, chunk in told:
        assert to[chunk] == holder and list(to.values()).count(holder) > 1, "who has one chunk only relays it now"
        group = {p for p in peers if places.groups[p] == places.groups[holder]}
        assert handed[chunk] == group - {holder}, "the other groups have it from there"
