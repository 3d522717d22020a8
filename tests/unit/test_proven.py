"""The source among strangers and proven peers: what strangers do changes nothing for the others, and still they are fed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest

from p2p.broadcast.peer_groups import EVERYWHERE, Grid, PeerPlaces, duty_of
from p2p.broadcast.policies.feeding import FIRST_ON_WAY, IN_TIME_S, LATE_S, StrangerFeed
from p2p.broadcast.session import Session

CHUNKS = 40
PROVEN = ["p0", "p1", "p2"]
STRANGERS = [f"s{i}" for i in range(20)]


def grid_of() -> Grid:
    grid = Grid(PROVEN)
    for peer in STRANGERS:
        grid.add(peer, stranger=True)
    return grid


def filled(grid: Grid, strange: Callable[[str], bool], peers: Iterable[str]) -> tuple[Session, PeerPlaces]:
    """A source that has all chunks, and peers that have none."""
    places = grid.source_places()
    assert places is not None
    session = Session(me="source", source=None, now=0.0, places=places, entrusts=lambda peer: not strange(peer))
    for peer in peers:
        session.join(peer, (), 0.0)
    session.learn(range(CHUNKS), 0.0)
    for chunk in range(CHUNKS):
        session.hold(chunk, None, duty=0, now=0.0)
    session.close(CHUNKS)
    return session, places


def source(grid: Grid) -> tuple[Session, PeerPlaces]:
    session, places = filled(grid, grid.strange, grid)
    assert places.proven_mesh
    return session, places


def feed_of(session: Session) -> StrangerFeed:
    return session._policy._feed  # type: ignore[attr-defined]  # what it has on its way cannot be seen from outside


@pytest.mark.parametrize("seed", range(4))
def test_nothing_that_strangers_say_or_do_changes_what_the_proven_are_handed(seed: int) -> None:
    def run(*, noise: bool) -> list[tuple[float, str, int]]:
        session, _ = source(grid_of())
        rng, handed, now = random.Random(seed), [], 0.0
        arriving: list[tuple[float, str, int]] = []
        proven = list(PROVEN)
        for step in range(300):
            now += 0.02
            session.tick(now)
            if step == 10:  # with chunks that nobody else has yet
                session.leave(proven.pop(), now)
            if noise:
                peer = rng.choice(STRANGERS)
                what = rng.randrange(4)
                if what == 0:
                    session.peer_has(peer, rng.sample(range(CHUNKS), 3), now)
                elif what == 1:
                    session.peer_wants(peer, rng.sample(range(CHUNKS), 3), now)
                elif what == 2:
                    session.leave(peer, now)
                else:
                    session.join(peer, (), now)
                session.next(STRANGERS, now)
            while (push := session.next(proven, now)) is not None:
                handed.append((now, push.peer, push.chunk))
                arriving += [(now + 0.1, push.peer, push.chunk)]
                if push.duty & EVERYWHERE or push.duty & duty_of([0]):
                    arriving += [(now + 0.3, other, push.chunk) for other in proven if other != push.peer]
            for at, to, chunk in [a for a in arriving if a[0] <= now]:
                session.peer_has(to, [chunk], now)
                arriving.remove((at, to, chunk))
        return handed

    quiet = run(noise=False)
    assert {chunk for _, _, chunk in quiet} == set(range(CHUNKS))
    assert run(noise=True) == quiet


def test_a_proven_node_asks_a_stranger_for_a_chunk_when_nobody_else_can_be_asked() -> None:
    grid = grid_of()
    session = Session(me="p0", source="source", now=0.0, places=grid.places("p0"))
    session.join("source", (), 0.0)
    for peer in grid.links("p0"):
        session.join(peer, (), 0.0)
    session.learn(range(CHUNKS), 0.0)
    for peer in STRANGERS:
        session.peer_has(peer, range(CHUNKS), 0.1)
    now, asked = 0.0, set[str]()
    while len(session.held) < CHUNKS // 2:
        now += 0.05
        session.tick(now)
        wants = session.wants(now)
        asked |= wants.keys()
        for chunk in wants.get("source", []):
            session.hold(chunk, "source", duty=0, now=now + 0.01)
    assert asked == {"source"} and now < 5.0, "whoever says that it has them"
    lacking = sorted(set(range(CHUNKS)) - session.held)
    session.peer_has("p1", lacking[:2], now)
    session.leave("source", now)
    asked = set()
    for _ in range(200):
        now += 0.05
        session.tick(now)
        asked |= session.wants(now).keys()
    assert "p1" in asked and asked & set(STRANGERS) and asked <= {"p1", *STRANGERS}


@pytest.mark.parametrize("catching", [False, True])
@pytest.mark.parametrize("proven", [["p0"], PROVEN])
def test_a_stranger_that_sends_a_chunk_now_and_then_keeps_nobody_from_asking_the_source(
    proven: list[str], catching: bool
) -> None:
    grid = Grid(proven)
    for peer in STRANGERS:
        grid.add(peer, stranger=True)
    session = Session(me="p0", source="source", now=0.0, places=grid.places("p0"), catching=catching)
    session.join("source", range(CHUNKS), 0.0)
    for peer in grid.links("p0"):
        session.join(peer, (), 0.0)
    session.learn(range(CHUNKS), 0.0)
    now, trickled = 0.0, 0
    while len(session.held) < CHUNKS:
        now += 0.05
        session.tick(now)
        if now >= 0.5 * (trickled + 1):
            trickled += 1
            session.hold(max(set(range(CHUNKS)) - session.held), STRANGERS[0], duty=0, now=now)
        for chunk in session.wants(now).get("source", []):
            session.hold(chunk, "source", duty=0, now=now + 0.1)
    assert now < 5.0 and trickled < CHUNKS / 2


def test_lies_of_strangers_cost_a_proven_node_no_look() -> None:
    """It would look through all that they say they have, in vain, many times a second."""
    grid, chunks = grid_of(), 20_000
    session = Session(me="p0", source="source", now=0.0, places=grid.places("p0"))
    session.join("source", (), 0.0)
    for peer in grid.links("p0"):
        session.join(peer, (), 0.0)
    session.learn(range(chunks), 0.0)
    session.peer_has("s0", range(chunks), 0.0)
    session.hold(0, "source", duty=0, now=0.1)  # the source is at work
    assert session._pulls._candidates(source_quiet=False) == ()  # what is looked through cannot be seen from outside


def test_strangers_are_fed_where_no_proven_peer_takes_part() -> None:
    grid = grid_of()
    session, places = source(grid)
    for peer in PROVEN:
        session.leave(peer, 0.5)
    session.tick(1.0)
    pushes = [push for _ in range(CHUNKS) if (push := session.next(STRANGERS, 1.0)) is not None]
    assert {push.chunk for push in pushes} == set(range(CHUNKS))
    assert {push.duty for push in pushes} == {duty_of(places.strangers)}


def test_when_the_proven_have_left_lanes_take_strangers_in() -> None:
    grid = Grid({"p0": "east", "p1": "east"})
    for peer in STRANGERS[:10]:
        grid.add(peer, stranger=True)
    session, places = filled(grid, lambda peer: grid.split and grid.strange(peer), grid)
    assert not places.proven_mesh
    for peer in ("p0", "p1"):
        session.leave(peer, 0.5)
        grid.remove(peer)
    assert grid.source_places() is None
    session.arrange(None)
    session.tick(1.0)
    assert session.next(STRANGERS[:10], 1.0) is not None


@pytest.mark.parametrize("mesh", [False, True])
def test_who_has_no_place_yet_distributes_nothing_while_there_are_strangers(mesh: bool) -> None:
    grid = Grid([f"p{i}" for i in range(3 if mesh else 40)])
    grid.add("s0", stranger=True)
    strangers = {"s0", "new"}
    session, places = filled(grid, strangers.__contains__, ["new", *grid])
    assert places.proven_mesh == mesh
    session.tick(1.0)
    assert session.next(["new"], 1.0) is None and session.next(["p0"], 1.0) is not None
    strangers.discard("new")
    grid.add("new")
    session.arrange(grid.source_places())
    session.tick(2.0)
    found = session.next(["new"], 2.0)
    assert found is not None and found.duty == EVERYWHERE


def test_each_chunk_is_brought_to_strangers_once_through_a_distributor_or_by_the_source() -> None:
    session, places = source(grid_of())
    outside, now = duty_of(places.strangers), 1.0
    brought: list[tuple[str, int]] = []
    for _ in range(200):
        now += 0.02
        session.tick(now)
        while (push := session.next([*PROVEN, *STRANGERS], now)) is not None:
            session.peer_has(push.peer, [push.chunk], now)
            if push.duty == EVERYWHERE or push.duty & outside:
                brought.append((push.peer, push.chunk))
                if push.peer in PROVEN:
                    session.peer_has(STRANGERS[push.chunk % 20], [push.chunk], now + IN_TIME_S / 2)
            if push.duty == EVERYWHERE or push.duty & duty_of([0]):
                for other in PROVEN:
                    session.peer_has(other, [push.chunk], now)
    assert sorted(chunk for _, chunk in brought) == list(range(CHUNKS))
    assert sum(peer in PROVEN for peer, _ in brought) > CHUNKS / 2


def test_who_is_proven_now_takes_part_from_the_next_tick_on() -> None:
    grid = grid_of()
    session, _ = source(grid)
    grid.add("s3")
    session.arrange(grid.source_places())
    session.tick(1.0)
    pushes = [push for _ in range(30) if (push := session.next(["s3"], 1.0)) is not None]
    assert pushes and pushes[0].duty == EVERYWHERE, "it distributes"


def test_no_more_is_on_its_way_through_one_distributor_than_arrives_in_time() -> None:
    session, places = source(grid_of())
    feed = feed_of(session)
    assert [feed.through("p0", chunk, 0.0) for chunk in range(6)] == [True] * int(FIRST_ON_WAY) + [False] * 2
    assert not feed.through("p1", 3, 0.0), "it is brought to them already"
    push = feed.push(STRANGERS, places, 0.0)
    assert push is not None and push.chunk == 4 and push.duty == duty_of(places.strangers)
    for chunk in range(4):
        feed.arrived(chunk, IN_TIME_S / 2)
    assert sum(feed.through("p0", chunk, 1.0) for chunk in range(10, 30)) == 2 * FIRST_ON_WAY
    for chunk in range(10, 18):
        feed.arrived(chunk, 1.0 + 2 * IN_TIME_S)
    assert sum(feed.through("p0", chunk, 4.0) for chunk in range(30, 40)) == 1, "they came late"


def test_what_did_not_come_in_time_or_was_to_come_through_one_that_left_comes_from_the_source_once() -> None:
    session, places = source(grid_of())
    feed = feed_of(session)
    assert feed.through("p0", 1, 0.0) and feed.through("p1", 2, 0.0)
    assert feed.push(STRANGERS, places, 0.1) is None
    feed.left("p1")
    assert feed.push(STRANGERS, places, 0.2)[1:] == (2, duty_of(places.strangers))  # type: ignore[index]
    feed.tick(LATE_S - 0.1)
    assert feed.push(STRANGERS, places, 0.2) is None
    feed.tick(LATE_S + 0.1)
    late = feed.push(STRANGERS, places, LATE_S + 0.1)
    assert late is not None and late.chunk == 1
    for chunk, at in ((1, 2 * LATE_S + 0.3), (2, 2 * LATE_S + 0.4)):
        feed.tick(at)
        assert feed.push(STRANGERS, places, at) is None, f"chunk {chunk}: who still lacks it asks for it"
    assert sum(feed.through("p0", chunk, 9.0) for chunk in range(10, 20)) == FIRST_ON_WAY / 2
