"""The head's books of its nodes' standing: who is expelled is told once, and a new head knows it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from learner.admission.head_door import HeadDoor
from learner.admission.issuing import own_ticket
from learner.admission.peers_file import PeersFile
from learner.head.trust import APART_S, KEEP_S, ODD_DOUBTS, Trust
from learner.standing.standing import STRANGER_DOUBTS, StandingRules
from p2p.errors import Refusal
from tests.support.harness import identity

PEER = identity(7).peer_id


def open_trust(books: PeersFile, clock: list[float], expelled: list[str], **rules) -> Trust:
    return Trust(
        StandingRules(**rules), {}, HeadDoor(books), wall=lambda: clock[0], expel=lambda peer, why: expelled.append(peer)
    )


def test_an_expulsion_outlives_the_head_and_is_forgiven_by_the_operator(tmp_path: Path) -> None:
    clock, expelled = [1000.0], []
    with PeersFile.open(tmp_path / "peers.sqlite") as books:
        trust = open_trust(books, clock, expelled)
        for _ in range(STRANGER_DOUBTS):
            assert not expelled
            trust.doubt(PEER, "it withheld")
        assert expelled == [PEER]
        clock[0] += KEEP_S
        trust.tick()
    with PeersFile.open(tmp_path / "peers.sqlite") as books:
        books.came(PEER, own_ticket(books, "run", clock[0]).id, clock[0])
        again = open_trust(books, clock, expelled)
        door = HeadDoor(books, again.standing)
        assert again.standing.of(PEER).expelled == 1
        with pytest.raises(Refusal, match="expelled for another"):
            door.knows(PEER, clock[0])
        books.unban(PEER)
        assert door.knows(PEER, clock[0])
        clock[0] += 1000
        again.doubt(PEER, "it withheld again")
        assert len(expelled) == 1


def test_whom_the_operator_answers_for_is_never_expelled(tmp_path: Path) -> None:
    clock, expelled = [1000.0], []
    with PeersFile.open(tmp_path / "peers.sqlite") as books:
        trust = open_trust(books, clock, expelled, trusted=frozenset({PEER}))
        for _ in range(100):
            trust.doubt(PEER, "slow")
            trust.refused(PEER, "odd", 0.0, fatal=False)
        assert not expelled and trust.standing.may_hold(PEER, 16) == 16 and trust.credible(PEER)


def test_whose_word_counts(tmp_path: Path) -> None:
    clock = [1000.0]
    with PeersFile.open(tmp_path / "peers.sqlite") as books:
        trust = open_trust(books, clock, [], proven_tokens=10)
        assert not trust.credible(PEER)
        trust.ended(PEER, 4)
        assert trust.credible(PEER)  # nobody proven is there, and it has delivered something
        trust.ended(PEER, 6)
        assert trust.standing.proven(PEER) and trust.credible(PEER)


def test_strangers_pass_nothing_on_while_a_proven_node_is_there_though_it_takes_no_work_for_a_moment() -> None:
    clock, nodes = [1000.0], dict[str, Any]()
    trust = Trust(StandingRules(trusted=frozenset({PEER})), nodes, wall=lambda: clock[0], expel=lambda peer, why: None)

    def passes_on(*, able: bool) -> bool:
        trust.limits(lambda peer: 0, lambda node: able)
        assert trust.passes_on(PEER)
        return trust.passes_on("a stranger")

    assert passes_on(able=True), "nobody else is there"
    nodes[PEER] = SimpleNamespace(capacity=8)
    assert passes_on(able=False) and not passes_on(able=True)
    assert not passes_on(able=False), "between two versions"
    clock[0] += APART_S + 1
    assert passes_on(able=False), "it sleeps"
    assert not passes_on(able=True)
    del nodes[PEER]
    assert passes_on(able=True), "it left"


def test_who_is_found_wrong_again_and_again_is_expelled(tmp_path: Path) -> None:
    clock, expelled = [1000.0], []
    with PeersFile.open(tmp_path / "peers.sqlite") as books:
        trust = open_trust(books, clock, expelled, checks=True)
        trust.ended(PEER, 10_000)
        for i in range(ODD_DOUBTS):
            trust.odd(PEER, "one token", clock[0])
            trust.odd(PEER, "another one of before", clock[0] + 1)  # it rests: no more than made again
            assert not expelled and trust.standing.of(PEER).doubted == i + 1
            clock[0] += 60.0 * 2**i + 1  # as long as it rests
            trust.ended(PEER, 100)
        trust.odd(PEER, "one token", clock[0])
        assert expelled == [PEER] and trust.caught_nodes == 1
