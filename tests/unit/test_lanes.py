"""The source of a swarm in groups: what it hands out again when somebody is gone who was to relay it."""

from __future__ import annotations

import pytest

from netem.contest.scenario import find_scenario
from netem.networks.faults import Kill
from netem.simulator.simulate import simulate
from p2p.broadcast.peer_groups import EVERYWHERE, Grid, PeerPlaces, duty_of
from p2p.broadcast.policies.seeding import HELP_AFTER_S
from p2p.broadcast.session import Session

CHUNKS = 64


def source() -> tuple[Session, PeerPlaces]:
    """A source with far more chunks than there is room for at its twelve peers in two groups."""
    grid = Grid([f"p{i}" for i in range(12)], mesh=6, group=6)
    places = grid.source_places()
    assert places is not None and len(places.sites) == 2
    session = Session(me="source", source=None, now=0.0, places=places)
    for peer in grid:
        session.join(peer, (), 0.0)
    for chunk in range(CHUNKS):
        session.learn([chunk], 0.0)
        session.hold(chunk, None, duty=0, now=0.0)
    session.close(CHUNKS)
    return session, places


def handed(session: Session, peers: list[str], now: float, most: int = 200) -> list[tuple[str, int, int]]:
    """What leaves until nothing is left to hand out, or so much."""
    out: list[tuple[str, int, int]] = []
    while len(out) < most and (found := session.next(peers, now)) is not None:
        out.append(found)
    return out


@pytest.mark.parametrize("somebody_near_has_it", [False, True])
def test_what_a_distributor_did_not_bring_to_its_own_group_is_brought_there(somebody_near_has_it: bool) -> None:
    session, places = source()
    peers = list(places.groups)
    (gone, chunk, duty), *_ = handed(session, peers, 0.0)
    assert duty == EVERYWHERE
    near = [p for p in peers if places.groups[p] == places.groups[gone] and p != gone]
    far = next(p for p in peers if places.groups[p] != places.groups[gone])
    session.peer_has(gone, [chunk], 0.1)
    session.peer_has(far, [chunk], 0.2)
    if somebody_near_has_it:
        session.peer_has(near[0], [chunk], 0.2)
    session.leave(gone, 0.2)
    peers.remove(gone)
    again = [(to, d) for to, c, d in handed(session, peers, 0.2) if c == chunk]
    if somebody_near_has_it:
        assert again == [], "it may be relayed there already; if not, they ask for it"
    else:
        ((to, duty),) = again
        assert to in near and duty == duty_of([places.groups[gone]])


def test_what_the_source_handed_a_group_is_handed_it_again_when_its_entry_is_gone_and_the_next_as_well() -> None:
    session, places = source()
    peers = list(places.groups)
    seeds = handed(session, peers, 0.0)
    assert all(duty == EVERYWHERE for _, _, duty in seeds)
    first = session.next(peers, HELP_AFTER_S)
    assert first is not None
    gone, chunk, duty = first
    group = places.groups[gone]
    assert duty == duty_of([group]), "no distributor has room, so the source brings it to each group"
    session.peer_has(gone, [chunk], 0.4)
    for _ in range(2):
        session.leave(gone, 0.5)
        peers.remove(gone)
        (gone,) = [to for to, c, d in handed(session, peers, 0.5, 8) if c == chunk and d == duty]
        assert places.groups[gone] == group


def test_killed_entries_cost_a_swarm_in_groups_little() -> None:
    scenario = find_scenario("groups")
    faults = [Kill(at=2.0, host="node-5"), Kill(at=2.0, host="node-9")]
    (result,) = simulate(scenario.profile, scenario.payload_bytes, faults=faults, mesh=scenario.mesh)
    assert len(result.done) == 10 and result.ratio < 1.2
