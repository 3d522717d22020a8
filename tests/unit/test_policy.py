"""The plain policies: who sends to whom."""

from __future__ import annotations

import pytest

from p2p.broadcast.policies.registry import POLICIES, make_policy
from p2p.broadcast.session import Session
from tests.support.swarm_sim import SOURCE, Sim

NODES = "abcdef"


def children(policy: str, me: str, others: str) -> set[str]:
    """To whom `me`, which holds everything, hands chunks when all of `others` (and the source) have room."""
    session = Session(me=me, source=None if me == SOURCE else SOURCE, now=0.0, policy=policy)
    peers = [*others] if me == SOURCE else [SOURCE, *others]
    for peer in peers:
        session.join(peer, (), 0.0)
    session.learn(range(3), 0.0)
    for chunk in range(3):
        session.hold(chunk, None if me == SOURCE else SOURCE, duty=False, now=0.0)
    got: dict[str, list[int]] = {}
    while (found := session.next(peers, 0.0)) is not None:
        assert not found[2], "no plain policy has distributors"
        got.setdefault(found[0], []).append(found[1])
    assert all(chunks == [0, 1, 2] for chunks in got.values()), "each gets each chunk once, lowest first"
    return set(got)


@pytest.mark.parametrize("gone", ["", "b", "a", "f", "ce"])
@pytest.mark.parametrize("policy", ["star", "chain", "tree"])
def test_everybody_has_one_parent_and_nobody_sends_to_the_source(policy, gone) -> None:
    left = "".join(n for n in NODES if n not in gone)
    edges = {me: children(policy, me, left.replace(me, "")) for me in [SOURCE, *left]}
    assert sorted(child for to in edges.values() for child in to) == sorted(left)
    reached, front = set(), [SOURCE]
    while front:
        me = front.pop()
        reached.add(me)
        front += edges[me]
    assert reached == {SOURCE, *left}, "one tree from the source, whoever left"
    widths = {me: len(to) for me, to in edges.items()}
    match policy:
        case "star":
            assert widths[SOURCE] == len(left)
        case "chain":
            assert set(widths.values()) == {0, 1} and edges[SOURCE] == {left[0]}
        case "tree":
            assert max(widths.values()) == 2 and edges[SOURCE] == set(left[:2])


@pytest.mark.parametrize("policy", ["star", "chain", "tree"])
def test_after_a_peer_left_those_behind_it_move_up_and_get_what_they_lack(policy) -> None:
    """The session is told; what the new child holds already is not sent again."""
    session = Session(me=SOURCE, source=None, now=0.0, policy=policy)
    for peer in "abc":
        session.join(peer, (), 0.0)
    for chunk in range(4):
        session.hold(chunk, None, duty=False, now=0.0)
    while session.next(["a", "b"], 0.0) is not None:
        pass
    session.peer_has("c", [0, 1], 1.0)
    session.leave("a", 1.0)
    got: dict[str, list[int]] = {}
    while (found := session.next(["b", "c"], 1.0)) is not None:
        got.setdefault(found[0], []).append(found[1])
    if policy != "chain":
        assert got == {"c": [2, 3]}, "b has all that can be sent to it on its way"
    else:
        assert got == {"b": [0, 1, 2, 3]}


@pytest.mark.parametrize("policy", ["star", "chain", "tree"])
def test_a_plain_policy_pulls_nothing_but_for_a_late_joiner(policy) -> None:
    for catching in (False, True):
        session = Session(me="me", source=SOURCE, now=0.0, policy=policy, catching=catching)
        session.join(SOURCE, (), 0.0)
        session.join("a", range(3), 0.0)
        session.learn(range(3), 0.0)
        asked = [session.wants(float(t)) for t in range(100)]
        assert any(asked) == catching


@pytest.mark.parametrize("policy", ["chain", "tree"])
def test_a_node_dies_in_mid_transfer_and_those_behind_it_go_on(policy) -> None:
    sim = Sim(3, 60, policy=policy)
    sim.add(SOURCE, 0.01)
    for name in NODES:
        sim.add(name, 0.01)
    sim.make(0.01)
    sim.at(0.3, lambda: sim.kill("a"))
    sim.not_before = 1.0
    sim.run(60)
    missing = {p.name: 60 - len(p.session.held) for p in sim.others(SOURCE) if not p.session.complete}
    assert sim.finished, missing


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_is_made_by_its_name(policy) -> None:
    sim = Sim(1, 10, policy=policy)
    for name in (SOURCE, "a", "b"):
        sim.add(name, 0.01)
    sim.make(0.0)
    sim.run(10)
    assert sim.finished


def test_an_unknown_policy_is_refused_by_name() -> None:
    session = Session(me="me", source=SOURCE, now=0.0)
    with pytest.raises(ValueError, match="unknown policy 'gossip'; known: shoal, star"):
        make_policy("gossip", session)
    with pytest.raises(ValueError, match="unknown policy"):
        Session(me="me", source=SOURCE, now=0.0, policy="")
