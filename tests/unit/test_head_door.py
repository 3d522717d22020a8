"""The head's gate with the run's books: who comes in by which ticket, who comes back, and who has to go."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from learner.admission.head_door import HeadDoor
from learner.admission.issuing import own_ticket, ticket_text
from learner.admission.peers_file import PeersFile
from learner.admission.records import BanRow, TicketRow
from learner.standing.standing import Standing
from p2p.errors import Refusal
from p2p.identity import Identity
from p2p.limits import PROTOCOL_VERSION
from p2p.membership.admission import make_ticket
from p2p.membership.gate import VISITOR, Gate
from p2p.protocol.join import Hello

HEAD, *PEERS = (Identity.from_seed(bytes([i]) * 32) for i in range(1, 12))
NOW = 1_800_000_000.0


class House:
    """A gate of the head, its books, and the clock."""

    def __init__(self, books: PeersFile) -> None:
        self.books, self.now, self.standing = books, NOW, Standing()
        self.gate = Gate(HEAD, run="run", head=HEAD.peer_id, wall=lambda: self.now)
        self.gate.doorkeeper = self.door = HeadDoor(books, self.standing)

    def ticket(self, name: str = "t", **more) -> str:
        row = TicketRow(f"id-{name}", name, self.now, **more)
        self.books.add_ticket(row)
        return ticket_text(HEAD, "run", ("/ip4/192.0.2.1/tcp/1",), row)

    def come(self, peer: Identity, ticket: str = "", proof: bytes = b"", agent: str = "shoal") -> bytes:
        return self.gate.admit(peer.peer_id, Hello(PROTOCOL_VERSION, "run", ticket, proof, (), "n", agent, ""), 0.0)

    def refused(self, peer: Identity, ticket: str = "", proof: bytes = b"", agent: str = "shoal") -> Refusal:
        with pytest.raises(Refusal) as refusal:
            self.come(peer, ticket, proof, agent)
        return refusal.value

    def leaving(self) -> dict[str, str]:
        return dict(self.door.unwelcome([p.peer_id for p in PEERS], self.now))


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    with PeersFile.open(tmp_path / "peers.sqlite") as books:
        yield House(books)


def test_a_number_of_uses_counts_identities_and_not_visits(house: House) -> None:
    text = house.ticket(uses=2)
    for _ in range(3):  # both channels of a link, and a link made anew
        house.come(PEERS[0], text)
    house.come(PEERS[1], text)
    refusal = house.refused(PEERS[2], text)
    assert refusal.fatal and "'t' has brought 2 identities, and is for 2" in refusal.reason
    house.come(PEERS[0], text)
    assert house.books.brought("id-t") == 2


def test_who_stays_for_days_is_still_known(house: House) -> None:
    proof = house.come(PEERS[0], house.ticket())
    house.leaving()
    for _ in range(3):
        house.now += 86_400
        house.leaving()
    assert house.books.identity(PEERS[0].peer_id).last_seen == house.now and house.come(PEERS[0], proof=proof)


def test_a_rate_refuses_for_a_while_only(house: House) -> None:
    text = house.ticket(rate=2)
    for peer in PEERS[:2]:
        house.come(peer, text)
    refusal = house.refused(PEERS[2], text)
    assert not refusal.fatal and "2 new identities in the last hour" in refusal.reason
    house.come(PEERS[0], text)  # it is no new one
    house.now += 3601
    house.come(PEERS[2], text)


def test_who_came_once_comes_back_by_its_membership(house: House) -> None:
    text = house.ticket(expires=int(NOW) + 60, uses=1)
    proof = house.come(PEERS[0], text)
    house.now += 3600
    assert "expired 3540 s ago" in house.refused(PEERS[1], text).reason
    house.come(PEERS[0], text, proof)
    assert house.books.identity(PEERS[0].peer_id).last_seen == house.now
    assert "expired" in house.refused(PEERS[0], text).reason  # without it, it needs a ticket


def test_a_revoked_ticket_sends_away_who_came_by_it(house: House, tmp_path: Path) -> None:
    text, other = house.ticket("t"), house.ticket("other")
    proof = house.come(PEERS[0], text)
    house.come(PEERS[1], other)
    for peer in PEERS[2:]:
        house.come(peer, other)
    assert house.leaving() == {}
    with PeersFile.open(tmp_path / "peers.sqlite") as command:
        command.revoke("id-t", NOW)
    assert house.leaving() == {PEERS[0].peer_id: "the ticket 't', by which it came, was revoked"} and house.leaving() == {}
    assert house.refused(PEERS[0], text, proof).reason == "the ticket 't' was revoked"
    assert "needs a ticket" in house.refused(PEERS[0], "", proof).reason
    house.come(PEERS[0], other, proof)  # a good one lets it in again


def test_a_ban_holds_whatever_is_shown(house: House) -> None:
    text, me = house.ticket(), PEERS[0]
    proof = house.come(me, text)
    for peer in PEERS[1:]:
        house.come(peer, text)
    house.leaving()
    house.books.ban(BanRow(me.peer_id, "spam", NOW))
    assert house.leaving() == {me.peer_id: "the operator banned it: spam"}
    for refusal in (house.refused(me, text), house.refused(me, text, proof), house.refused(me, "", proof)):
        assert refusal.fatal and refusal.reason == "the operator banned it: spam" and refusal.peer == me.peer_id
    house.books.unban(me.peer_id)
    house.come(me, text, proof)
    house.books.ban(BanRow(me.peer_id, "", NOW, NOW + 60))
    assert not house.refused(me, text).fatal
    house.now += 61
    house.come(me, text)


def test_an_expulsion_ends_by_itself_or_by_an_unban(house: House) -> None:
    text, me = house.ticket(), PEERS[0]
    proof = house.come(me, text)
    house.standing.expel(me.peer_id, "lied", NOW)
    refusal = house.refused(me, text, proof)
    assert not refusal.fatal and refusal.reason == "it is expelled for another 30 s: lied"
    house.books.unban(me.peer_id)
    house.come(me, text, proof)
    house.standing.expel(me.peer_id, "lied", NOW)
    house.now += 31
    house.come(me, text, proof)


def test_tickets_that_the_books_do_not_know(house: House) -> None:
    for id in ("", "id-other"):
        text = make_ticket(HEAD, "run", (), id=id).encode()
        assert house.refused(PEERS[0], text).fatal
        assert "books do not know the ticket" in house.refused(PEERS[0], text).reason


def test_an_allow_list_goes_by_key(house: House) -> None:
    text = house.ticket(allow=(PEERS[0].peer_id,))
    house.come(PEERS[0], text)
    assert house.refused(PEERS[1], text).reason == f"the ticket 't' is not for this peer, {PEERS[1].peer_id}"


def test_books_that_were_lost_ask_for_the_ticket_again(house: House, tmp_path: Path) -> None:
    proof = house.come(PEERS[0], house.ticket())
    with PeersFile.open(tmp_path / "new.sqlite") as books:
        house.gate.doorkeeper = HeadDoor(books)
        assert "needs a ticket" in house.refused(PEERS[0], "", proof).reason


def test_a_visitor_hears_and_uses_nothing_up(house: House) -> None:
    text = house.ticket(uses=1, allow=(PEERS[5].peer_id,))
    proof = house.come(PEERS[0], text, agent=VISITOR)
    assert house.books.brought("id-t") == 0
    with pytest.raises(Refusal, match="expired"):
        house.gate.check(proof, PEERS[0].peer_id)
    house.come(PEERS[5], text)
    assert "is for 1" in house.refused(PEERS[1], text, agent=VISITOR).reason
    house.books.ban(BanRow(PEERS[1].peer_id, "", NOW))
    assert "banned" in house.refused(PEERS[1], text, agent=VISITOR).reason


def test_books_that_cannot_be_written_let_nobody_in_and_end_nothing(house: House, tmp_path: Path) -> None:
    text = house.ticket()
    with PeersFile.open(tmp_path / "peers.sqlite", wait_s=0.01) as books, sqlite3.connect(tmp_path / "peers.sqlite") as other:
        house.gate.doorkeeper = HeadDoor(books)
        other.execute("BEGIN IMMEDIATE")
        refusal = house.refused(PEERS[0], text)
        assert not refusal.fatal and "just now" in refusal.reason
        other.rollback()
        house.come(PEERS[0], text)


def test_the_runs_own_ticket_stays_good_from_life_to_life(house: House) -> None:
    first = own_ticket(house.books, "run", NOW)
    assert own_ticket(house.books, "run", NOW + 9) == first and first.state(10**5, 1e12) == "live"
    house.books.revoke(first.id, NOW)
    assert own_ticket(house.books, "run", NOW + 10).id != first.id
    engine = own_ticket(house.books, "local-engine", NOW, ("a",))
    assert own_ticket(house.books, "local-engine", NOW, ("b",)).id != engine.id
