"""Who is linked to whom, and how a chunk gets from group to group: properties of the grid, and sessions on it."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p.broadcast.peer_groups import EVERYWHERE, MAX_GROUPS, MESH, Grid, PeerPlaces, duty_of, groups_of
from p2p.broadcast.rosters import Rosters, grouping_of, places_of
from p2p.broadcast.session import Session
from p2p.errors import Refusal
from p2p.membership.addresses import Reach
from p2p.protocol.join import Grouping, Placed
from p2p.protocol.messages import decode
from p2p.protocol.wire import encode
from tests.support.nightly import cases


def names(count: int) -> list[str]:
    return [f"p{i}" for i in range(count)]


def check(grid: Grid, peers: set[str]) -> None:
    """Everybody stands somewhere; links are mutual; each is linked to its whole group, and to every other group."""
    groups = [set(g) for g in grid.groups]
    assert sorted(p for g in groups for p in g) == sorted(peers)
    places, links = {p: grid.places(p) for p in peers}, {p: set(grid.links(p)) for p in peers}
    filled = {n for n, g in enumerate(groups) if g}
    assert len(groups) <= MAX_GROUPS
    for peer, mine in places.items():
        assert mine is not None
        linked = links[peer]
        assert linked == set(mine.groups) - {peer} and groups[mine.group] <= linked | {peer}
        assert {mine.groups[p] for p in linked} | {mine.group} == filled
        assert all(peer in links[other] for other in linked), "links are mutual"
        assert all(places[other].group == group for other, group in mine.groups.items())  # type: ignore[union-attr]


def test_a_small_swarm_without_sites_is_one_group() -> None:
    grid = Grid(names(MESH))
    assert not grid.grouped and grid.places("p3") is None and grid.source_places() is None
    assert grid.links("p3") == [p for p in names(MESH) if p != "p3"]
    grid.add("late")
    assert grid.grouped and grid.places("late") is not None
    grid.remove("p3")
    assert not grid.grouped


@pytest.mark.parametrize(
    ("count", "degree"), [(33, 14), (64, 16), (128, 26), (256, 36), (512, 54), (1000, 72), (2000, 100)]
)
def test_the_degree_grows_as_the_square_root(count: int, degree: int) -> None:
    grid = Grid(names(count))
    check(grid, set(names(count)))
    assert max(len(grid.links(p)) for p in grid) <= degree
    source = grid.source_places()
    assert source is not None and len(source.groups) == count
    by_lane: dict[int, set[str]] = {}
    for peer, lane in source.lanes.items():
        by_lane.setdefault(lane, set()).add(peer)
    assert all(peers & source.witnesses for peers in by_lane.values()), "each lane has a witness"
    assert len(source.witnesses) <= 2 * 64 + len(by_lane)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 60), st.sampled_from(["", "", "east", "west"])), max_size=150))
@settings(max_examples=60, deadline=None)
def test_it_heals_whoever_comes_and_goes(steps: list[tuple[bool, int, str]]) -> None:
    grid, there = Grid(mesh=6, group=3), {}
    for comes, number, site in steps:
        peer = f"p{number}"
        if comes:
            grid.add(peer, site)
            there[peer] = site
        else:
            grid.remove(peer)
            there.pop(peer, None)
        assert len(grid) == len(there)
    if grid.grouped:
        check(grid, set(there))
    shared = [s for s in there.values() if s]
    assert grid.grouped == (len(there) > 6 or len(shared) > len(set(shared)))


@given(
    st.lists(
        st.tuples(st.sampled_from(["comes", "strange", "goes"]), st.integers(0, 60), st.sampled_from(["", "", "east", "west"])),
        max_size=150,
    )
)
@settings(max_examples=60, deadline=None)
def test_strangers_stand_in_groups_of_their_own_whoever_comes_and_goes(steps: list[tuple[str, int, str]]) -> None:
    grid, there = Grid(mesh=6, group=3), {}
    for what, number, site in steps:
        peer = f"p{number}"
        if what == "goes":
            grid.remove(peer)
            there.pop(peer, None)
        else:
            grid.add(peer, site, stranger=what == "strange")
            there[peer] = what == "strange"
    source = grid.source_places()
    if source is None or len(set(there.values())) < 2:
        assert source is None or not source.strangers, "where all are strangers, all are alike"
        return
    assert len(grid.groups) <= MAX_GROUPS
    links = {p: set(grid.links(p)) for p in there}
    inside = {n for n, g in enumerate(grid.groups) if g and n not in source.strangers}
    for peer, strange in there.items():
        mine = grid.places(peer)
        assert mine is not None and mine.strangers == source.strangers and (source.groups[peer] in source.strangers) == strange
        assert all(peer in links[other] for other in links[peer]), "links are mutual"
        assert not any(mine.near(other) for other in links[peer] if there[other] != strange)
        if not strange:
            assert {mine.groups[p] for p in links[peer]} | {mine.group} >= inside
            assert mine.outside == {p for p in links[peer] if there[p]}
        else:
            assert not mine.outside, "to a stranger all are alike"


@pytest.mark.parametrize("proven", [1, 3, 40])
def test_few_who_are_proven_have_few_links_to_many_strangers(proven: int) -> None:
    grid = Grid(names(proven))
    for number in range(500):
        grid.add(f"s{number}", stranger=True)
    assert max(len(grid.links(p)) for p in names(proven)) <= 3 * MESH
    assert max(len(grid.links(f"s{number}")) for number in range(500)) <= 3 * MESH
    places = grid.source_places()
    assert places is not None
    mine = [g for g in grid.groups if g and places.groups[g[0]] not in places.strangers]
    assert sum(map(len, mine)) == proven and len(mine) == (1 if proven < 33 else len(mine))


@pytest.mark.parametrize("proven", cases([3, 60, 300], 1000))
def test_strangers_who_come_and_go_move_nobody_else(proven: int) -> None:
    rng, grid = random.Random(proven), Grid(names(proven))
    for number in range(proven // 4):  # not as they would be placed anew
        grid.remove(f"p{rng.randrange(proven)}")
        grid.add(f"late{number}")
    mine = list(grid)

    def links() -> set[frozenset[str]]:
        return {frozenset((one, other)) for one in mine for other in grid.links(one) if other in mine}

    before, there = links(), list[str]()
    for number in range(60):
        there.append(f"s{number}")
        grid.add(there[-1], stranger=True)
        assert number % 20 or links() == before
    while there:
        grid.remove(there.pop(rng.randrange(len(there))))
        assert len(there) % 20 or links() == before
    assert all(grid.places(p) is None or not grid.places(p).strangers for p in mine)  # type: ignore[union-attr]


@pytest.mark.parametrize(("sites", "each", "strange"), [(15, 39, 1), (21, 39, 0), (40, 2, 400), (0, 0, 500)])
def test_no_site_names_make_more_groups_than_a_duty_has_bits(sites: int, each: int, strange: int) -> None:
    grid = Grid({f"p{site}-{n}": f"site{site}" for site in range(sites) for n in range(each)} | {"h": ""})
    for number in range(strange):
        grid.add(f"s{number}", f"mine{number % 7}", stranger=True)
        assert len(grid.groups) <= MAX_GROUPS
    for peer in [p for p in grid if p.startswith("p")][::2]:
        grid.remove(peer)
        assert len(grid.groups) <= MAX_GROUPS
    for peer in list(grid)[::50]:
        assert grid.links(peer)


def test_who_is_a_stranger_no_more_moves_and_few_others_do() -> None:
    grid = Grid(names(20))
    for number in range(40):
        grid.add(f"s{number}", stranger=True)
    before = {p: grid.places(p).group for p in grid}  # type: ignore[union-attr]
    grid.add("s7")
    after = {p: grid.places(p).group for p in grid}  # type: ignore[union-attr]
    assert [p for p in grid if before[p] != after[p]] == ["s7"]
    assert after["s7"] == after["p0"]


def test_those_of_one_site_are_near_and_a_large_site_is_cut() -> None:
    sites = {f"e{i}": "east" for i in range(60)} | {f"w{i}": "west" for i in range(5)} | {"h1": "", "h2": ""}
    grid = Grid(sites)
    check(grid, set(sites))
    places = {p: grid.places(p) for p in sites}
    for peer, mine in places.items():
        assert mine is not None
        assert all(mine.near(o) == (sites[o] == sites[peer] or mine.groups[o] == mine.group) for o in mine.groups)
    assert sum(all(sites[p] == "east" for p in g) for g in grid.groups) in (2, 3)
    few = Grid({"a": "x", "b": "x", "c": "", "d": "y"})
    assert few.grouped and set(few.links("c")) == {"a", "b", "d"}, "few are linked to everybody all the same"


@given(st.sets(st.integers(0, MAX_GROUPS - 1)))
def test_a_duty_fits_an_integer_of_the_wire(groups: set[int]) -> None:
    duty = duty_of(groups)
    assert duty != EVERYWHERE and duty < 1 << 64
    assert set(groups_of(duty, MAX_GROUPS)) == groups
    assert groups_of(EVERYWHERE, 5) == [0, 1, 2, 3, 4]


def test_a_place_survives_the_wire_and_one_that_is_none_is_refused() -> None:
    grid = Grid(names(49))
    leaving = next(p for p in grid if grid.places(p).group == 1)  # type: ignore[union-attr]
    grid.remove(leaving)
    told = [grid.places(p) for p in grid]
    assert any(places.stand_ins == {1} for places in told if places is not None)
    for places in told:
        assert places_of(decode(encode(grouping_of(places)))) == places
    assert places_of(decode(encode(grouping_of(None)))) is None
    for wrong in (
        Grouping(3, (0, 1), True, ()), Grouping(0, (0, 1), True, (Placed("x", 2),)), Grouping(0, (0, 1), True, (), (2,)),
        Grouping(0, (0,) * 99, True, ()),
    ):  # fmt: skip
        with pytest.raises(Refusal):
            places_of(wrong)


class _Link:
    """What the head knows of a node, and what it told it."""

    def __init__(self, peer: str) -> None:
        self.peer, self.name, self.site, self.reach = peer, peer, "", Reach()
        self.told: list[Grouping] = []

    def post(self, message: object) -> None:
        if isinstance(message, Grouping):
            self.told.append(message)


class _Exchange:
    def arrange(self, places: PeerPlaces | None) -> None:
        self.places = places


def test_who_was_a_neighbour_is_told_of_it_if_it_is_still_here() -> None:
    links = {p: _Link(p) for p in names(6)}
    rosters = Rosters(cast(Any, _Exchange()), cast(Any, links), epoch=1, mesh=6)
    rosters.changed()
    assert not any(link.told for link in links.values()), "a mesh"
    links |= {p: _Link(p) for p in names(14)[6:]}
    del links["p5"]
    rosters.changed()
    rosters.flush()
    for peer, link in links.items():
        (told,) = link.told
        before = set(names(6)) if peer in names(6) else set()
        assert set(told.apart) == before - {"p5", peer} - set(rosters.grid.links(peer)), "p5 may have lost us alone"
    assert any(link.told[0].apart for link in links.values())
    del links["p0"]
    rosters.changed()
    rosters.flush()
    assert all(not link.told[1].apart for link in links.values() if len(link.told) > 1), "somebody left; nobody moved"


def test_a_link_that_is_just_coming_up_is_told_when_it_has_a_place() -> None:
    """The timer may find it among the links before anybody was told that it came."""
    links = {p: _Link(p) for p in names(8)}
    rosters = Rosters(cast(Any, _Exchange()), cast(Any, links), epoch=1, mesh=4)
    rosters.changed()
    late = links["late"] = _Link("late")
    rosters.flush()
    assert not late.told and all(link.told for link in links.values() if link is not late)
    assert not any(p.peer == "late" for link in links.values() for g in link.told for p in g.peers)
    rosters.changed()
    rosters.flush()
    assert late.told


def test_strangers_alone_are_trusted_as_all_are_wherever_the_proven_one_is() -> None:
    links, strangers = {p: _Link(p) for p in names(5)}, set(names(5)[1:])
    rosters = Rosters(cast(Any, _Exchange()), cast(Any, links), epoch=1, passes_on=lambda peer: peer not in strangers)
    rosters.apart.add("p0")  # the learner's own
    rosters.changed()
    assert all(rosters.entrusts(p) for p in names(5)) and not rosters.grid.grouped
    links["p5"] = _Link("p5")
    rosters.changed()
    assert rosters.entrusts("p5") and not rosters.entrusts("p1") and rosters.grid.grouped
    del links["p5"]
    rosters.changed()
    assert rosters.entrusts("p1")


def test_who_proves_itself_is_placed_anew_by_the_timer() -> None:
    links, exchange, strangers = {p: _Link(p) for p in names(40)}, _Exchange(), set(names(40)[10:])
    rosters = Rosters(cast(Any, exchange), cast(Any, links), epoch=1, passes_on=lambda peer: peer not in strangers)
    rosters.changed()
    rosters.flush()
    assert rosters.grid.strange("p20") and set(links["p20"].told[-1].strangers) == exchange.places.strangers  # type: ignore[union-attr]
    assert rosters.entrusts("p0") and not rosters.entrusts("p20")
    strangers.discard("p20")
    told = {peer: len(link.told) for peer, link in links.items()}
    rosters.review()
    rosters.flush()
    assert not rosters.grid.strange("p20") and links["p20"].told[-1].group not in links["p20"].told[-1].strangers
    assert 0 < sum(len(link.told) > told[peer] for peer, link in links.items()) < 40
    assert rosters.entrusts("p20")
    strangers.clear()
    rosters.review()
    rosters.flush()
    assert not links["p39"].told[-1].strangers


# --- a chunk's way


class Copies:
    """Sessions on a grid, and copies that arrive at once, in a random order."""

    def __init__(self, grid: Grid, seed: int) -> None:
        self.grid, self.random = grid, random.Random(seed)
        self.sessions: dict[str, Session] = {}
        for peer in grid:
            session = self.sessions[peer] = Session(me=peer, source="source", now=0.0, places=grid.places(peer))
            session.learn([0], 0.0)
            for other in grid.links(peer):
                session.join(other, (), 0.0)
        self.log: list[tuple[str, str]] = []
        self.dead: set[str] = set()

    def run(self, first: str, duty: int = EVERYWHERE) -> None:
        self.sessions[first].hold(0, "source", duty=duty, now=0.0)
        self.settle()

    def settle(self) -> None:
        moved = True
        while moved:
            moved = False
            order = [p for p in self.sessions if p not in self.dead]
            self.random.shuffle(order)
            for peer in order:
                found = self.sessions[peer].next(self.grid.links(peer), 0.0)
                if found is not None:
                    moved = True
                    target, chunk, duty = found
                    self.log.append((peer, target))
                    if target not in self.dead:
                        self.sessions[target].hold(chunk, peer, duty=duty, now=0.0)

    @property
    def holders(self) -> set[str]:
        return {p for p, s in self.sessions.items() if 0 in s.held}


@pytest.mark.parametrize("count", [7, 20, 45, 100])
@pytest.mark.parametrize("seed", range(3))
def test_a_chunk_reaches_everybody_in_one_copy_each(count: int, seed: int) -> None:
    copies = Copies(Grid(names(count), mesh=6, group=4), seed)
    copies.run("p3")
    assert copies.holders == set(names(count))
    assert len(copies.log) == count - 1, "nobody is sent it twice"
    sent = max(sum(1 for one, _ in copies.log if one == peer) for peer in copies.grid)
    largest = max(map(len, copies.grid.groups))
    assert sent <= largest - 1 + len(copies.grid.groups).bit_length(), "the work is shared out"


@pytest.mark.parametrize(("proven", "strange"), [(1, 40), (3, 60), (40, 20), (50, 50)])
@pytest.mark.parametrize("site", ["", "east"])
def test_nobody_gets_a_chunk_through_a_stranger_but_strangers(proven: int, strange: int, site: str) -> None:
    grid, strangers = Grid(dict.fromkeys(names(proven), site)), {f"s{i}" for i in range(strange)}
    for peer in sorted(strangers):
        grid.add(peer, site, stranger=True)
    copies = Copies(grid, 1)
    copies.run("p0")
    assert copies.holders == set(grid) and len(copies.log) == len(grid) - 1
    assert not [1 for one, to in copies.log if one in strangers and to not in strangers]
    assert sum(to in strangers for one, to in copies.log if one not in strangers) == 1, "they get one copy together"
    silent = Copies(grid, 1)
    silent.dead = strangers
    silent.run("p0")
    assert silent.holders == set(names(proven))


@pytest.mark.parametrize("sites", [{"A": 10, "B": 3, "C": 3}, {"": 37}])
def test_no_duty_of_a_stranger_names_a_group_of_others(sites: dict[str, int]) -> None:
    grid = Grid({f"p{site}{n}": site for site, count in sites.items() for n in range(count)})
    proven = list(grid)
    for number in range(30):
        grid.add(f"s{number}", stranger=True)
    for first in proven:
        places = grid.places(first)
        assert places is not None
        session = Session(me=first, source="source", now=0.0, places=places)
        session.learn([0], 0.0)
        for other in grid.links(first):
            session.join(other, (), 0.0)
        session.hold(0, "source", duty=EVERYWHERE, now=0.0)
        while (push := session.next(grid.links(first), 0.0)) is not None:
            if push.peer not in proven and push.duty:
                assert set(groups_of(push.duty, len(places.sites))) <= places.strangers


@pytest.mark.parametrize("linked", [True, False])
def test_an_errand_to_groups_that_are_gone_ends_nothing(linked: bool) -> None:
    grid = Grid(["p0", "p1"])
    for number in range(60):
        grid.add(f"s{number}", stranger=True)
    session = Session(me="p0", source="source", now=0.0, places=grid.places("p0"))
    session.learn(range(4), 0.0)
    for other in grid.links("p0") if linked else ["p1"]:
        session.join(other, (), 0.0)
    session.peer_has("p1", [0], 0.05)
    session.hold(0, "source", duty=EVERYWHERE, now=0.1)
    entry = next((push.peer for _ in range(9) if (push := session.next(session.peers(), 0.2)) and push.duty), "s1")
    for number in range(60):
        if f"s{number}" != entry and number > 2:
            grid.remove(f"s{number}")
    session.arrange(grid.places("p0"))
    session.leave(entry, 0.9)
    again = session.next(session.peers(), 1.0)
    assert again is None or not linked or again.peer != entry


@pytest.mark.parametrize("gone", [0, 1, 5])
def test_who_stands_in_relays_a_chunk_at_home_and_nowhere_else(gone: int) -> None:
    grid = Grid(names(64))
    for peer in [p for p in names(64) if grid.source_places().lanes[p] == 2][:gone]:  # type: ignore[union-attr]
        grid.remove(peer)
    places = grid.source_places()
    assert places is not None and len(grid) == 64 - gone
    for first in [p for p in grid if places.lanes[p] == 2]:
        copies = Copies(grid, 0)
        copies.run(first)
        assert copies.holders == set(grid) and len(copies.log) == len(grid) - 1
        crossing = [(one, to) for one, to in copies.log if places.groups[one] != places.groups[to]]
        assert {places.lanes[one] for one, _ in crossing} == {2}
        assert sum(places.lanes[to] != 2 for _, to in crossing) == gone
        assert max(sum(1 for o, _ in crossing if o == one) for one, _ in crossing) <= 3 + gone


@pytest.mark.parametrize("count", [40, 100, 256, 257, 320, 512, 701, 1000])
def test_groups_come_out_even(count: int) -> None:
    sizes = [len(g) for g in Grid(names(count)).groups]
    last = sum(s > min(sizes) for s in sizes)
    assert max(sizes) - min(sizes) <= 1 and (not last or last >= 0.75 * len(sizes))


@pytest.mark.parametrize("seed", range(3))
def test_it_crosses_into_a_site_once(seed: int) -> None:
    sites = {f"{s}{i}": s for s in "abc" for i in range(30)} | {f"h{i}": "" for i in range(8)}
    copies = Copies(Grid(sites), seed)
    copies.run("a5")
    assert copies.holders == set(sites) and len(copies.log) == len(sites) - 1
    for site in "bc":
        assert sum(sites[one] != site and sites[to] == site for one, to in copies.log) == 1
    assert not [1 for one, to in copies.log if sites[one] != "a" and sites[to] == "a"]


@pytest.mark.parametrize("seed", range(5))
def test_what_was_handed_to_one_that_leaves_goes_another_way(seed: int) -> None:
    grid = Grid(names(60), mesh=6, group=6)
    copies = Copies(grid, seed)
    others = [p for p in grid.links("p3") if grid.places(p).group != grid.places("p3").group]  # type: ignore[union-attr]
    dead = others[seed % len(others)]
    copies.dead = {dead}
    copies.run("p3")
    lost = set(names(60)) - copies.holders
    assert dead in lost
    for peer, session in copies.sessions.items():
        if peer != dead:
            session.leave(dead, 0.5)
    copies.settle()
    group = grid.places(dead).group  # type: ignore[union-attr]
    grid.remove(dead)  # as the head does, and tells who stands in
    for peer in grid:
        copies.sessions[peer].arrange(grid.places(peer))
        for other in grid.links(peer):
            copies.sessions[peer].join(other, copies.sessions[other].held, 0.5)
    copies.settle()
    assert copies.holders == set(names(60)) - {dead}
    assert len(copies.log) <= 59 + len(grid.groups) + len(grid.groups[group]), "few got it twice"


def test_a_duty_of_somebody_elses_is_done_once() -> None:
    places = PeerPlaces(0, {"me": 0, "a": 0, "b": 1, "c": 2}, (0, 1, 2))
    session = Session(me="me", source="source", now=0.0, places=places)
    session.learn([0], 0.0)
    for peer in "abc":
        session.join(peer, (), 0.0)
    session.hold(0, "a", duty=duty_of([1]), now=0.0)
    assert session.next(["a", "b", "c"], 0.0) == ("b", 0, duty_of([1]))
    session.hold(0, "a", duty=duty_of([1, 2]), now=0.0)
    assert session.next(["a", "b", "c"], 0.0) == ("c", 0, duty_of([2])), "group 1 was seen to"
    assert session.next(["a", "b", "c"], 0.0) is None, "its own group was no part of it"
