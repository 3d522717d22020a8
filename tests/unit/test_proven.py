"""The source among strangers and proven peers: what strangers do changes nothing for the others, and still they are fed."""

from __future__ import annotations

import random

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


def source(grid: Grid) -> tuple[Session, PeerPlaces]:
    places = grid.source_places()
    assert places is not None and places.proven_mesh
    session = Session(me="source", source=None, now=0.0, places=places, entrusts=lambda p: not grid.strange(p))
    for peer in grid:
        session.join(peer, (), 0.0)
    session.learn(range(CHUNKS), 0.0)
    for chunk in range(CHUNKS):
        session.hold(chunk, None, duty=0, now=0.0)
    session.close(CHUNKS)
    return session, places


def feed_of(session: Session) -> StrangerFeed:
    return session._policy._feed  # type: ignore[attr-defined]  # what it has on its way cannot be seen from outside


@pytest.mark.parametrize("seed", range(4))
def test_nothing_that_strangers_say_or_do_changes_what_the_proven_are_handed(seed: int) -> None:
    def run(*, noise: bool) -> list[tuple[float, str, int]]:
        session, _ = source(grid_of())
        rng, handed, now = random.Random(seed), [], 0.0
        arriving: list[tuple[float, str, int]] = []
        for _ in range(300):
            now += 0.02
            session.tick(now)
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
            while (push := session.next(PROVEN, now)) is not None:
                handed.append((now, push.peer, push.chunk))
                arriving += [(now + 0.1, push.peer, push.chunk)]
                if push.duty & EVERYWHERE or push.duty & duty_of([0]):
                    arriving += [(now + 0.3, other, push.chunk) for other in PROVEN if other != push.peer]
            for at, to, chunk in [a for a in arriving if a[0] <= now]:
                session.peer_has(to, [chunk], now)
                arriving.remove((at, to, chunk))
        return handed

    quiet = run(noise=False)
    assert {chunk for _, _, chunk in quiet} == set(range(CHUNKS))
    assert run(noise=True) == quiet


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
