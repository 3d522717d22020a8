"""What the head keeps of members' words about links and places: bounded by how many there are, whatever a member sends."""

from __future__ import annotations

import json
from time import process_time
from typing import Any

import pytest
import trio

from p2p.broadcast.rosters import Rosters
from p2p.channel.opening import MAX_ADDRESS, endpoint_of
from p2p.errors import Refusal
from p2p.membership.addresses import Reach
from p2p.membership.introductions import BURST, MOVE_S, MOVES
from p2p.membership.matchmaking import MAX_PAIRS, Matchmaker
from p2p.membership.pairs import LinkBook, PairLink
from p2p.membership.texts import MAX_WHY
from p2p.protocol.join import Grouping
from p2p.protocol.reach import Introduce, Linked, LinkKinds, NoMeeting, PassingOn, Whereabouts
from p2p.protocol.wire import MANY

UGLY = "\x1b]0;owned\x07\u202e" * 400


class Member:
    """A link of the head's, as far as the matchmaker sees one; it keeps what is posted."""

    def __init__(self, peer: str) -> None:
        self.peer, self.name, self.reach, self.site = peer, peer.upper(), Reach(), ""
        self.posted: list[Any] = []
        self.control = self

    def remote(self) -> str:
        return "/ip4/8.8.8.8/tcp/1"

    def path(self) -> None:
        return None

    def post(self, message: object) -> None:
        self.posted.append(message)


class Head:
    """A matchmaker whose members were all told of each other, but for `strange` ones, who were told of nobody."""

    def __init__(self, peers: list[str], strange: str = "") -> None:
        self.links = {peer: Member(peer) for peer in peers}
        self.addresses: list[str] = []
        self.moved = 0
        self.core = Matchmaker(self, self.links, lambda one, other: strange not in (one, other), self._moved)  # type: ignore[arg-type]

    def _moved(self) -> None:
        self.moved += 1

    def say(self, peer: str, message: object) -> None:
        assert self.core.handle(self.links[peer], message)  # type: ignore[arg-type]

    def rows(self, peer: str, *rows: tuple[str, str]) -> None:
        self.say(peer, LinkKinds(tuple(Linked(other, kind, "") for other, kind in rows)))


def names(count: int) -> list[str]:
    return [f"p{i:03}" for i in range(count)]


def test_one_row_is_kept_for_each_member_that_there_is_to_be_a_link_with() -> None:
    head = Head(["a", "b", "c", "s"], strange="s")
    head.rows("a", ("b", "met"), ("b", "relayed"), ("a", "relayed"), ("x", "relayed"), ("s", "relayed"), ("c", "relayed"))
    head.rows("s", ("a", "relayed"), ("b", "relayed"))
    assert [(p.one, p.other, p.kind) for p in head.core.pairs()] == [("A", "C", "relayed"), ("A", "B", "met")]


def test_sixty_members_with_the_longest_messages_cost_a_flush_milliseconds() -> None:
    """It was a third of a core's second every half second, and the same for each status."""
    peers = names(60)
    head = Head(peers)
    rows = tuple(Linked(peers[i % 60], "relayed", "") for i in range(MANY))
    for peer in peers:
        head.say(peer, LinkKinds(rows))
    took = []
    for _ in range(3):
        began = process_time()
        head.rows(peers[0])
        head.core.flush(set(peers[:32]))
        assert len(head.core.pairs()) == MAX_PAIRS
        head.say(peers[0], LinkKinds(rows))
        head.core.flush(set(peers[:32]))
        took.append(process_time() - began)
    assert min(took) < 0.1


def test_why_there_is_no_link_can_be_shown_and_is_short() -> None:
    head = Head(["a", "b"])
    head.say("a", LinkKinds((Linked("b", "relayed", UGLY),)))
    [pair] = head.core.pairs()
    assert pair.why.isprintable() and 0 < len(pair.why) <= MAX_WHY
    peers = names(60)
    head = Head(peers)
    for peer in peers:
        head.say(peer, LinkKinds(tuple(Linked(other, "relayed", UGLY) for other in peers)))
    assert len(json.dumps([pair._asdict() for pair in head.core.pairs()])) < MAX_PAIRS * (MAX_WHY + 100)


def test_the_word_of_either_is_enough_for_a_link() -> None:
    book = LinkBook()
    assert book.put("b", [Linked("a", "relayed", "no answer")], lambda peer: True)
    assert book.gaps("ab") == {("a", "b")} and book.gaps("ac") == frozenset()
    assert not book.put("b", [Linked("a", "relayed", "no answer")], lambda peer: True), "nothing new"
    assert book.put("a", [Linked("b", "inbound", "")], lambda peer: True)
    assert book.gaps("ab") == frozenset() and book.pairs("ab", 9) == [PairLink("a", "b", "inbound", "")]
    book.put("b", [Linked("a", "direct IPv4", "")], lambda peer: True)
    assert book.pairs("ab", 9) == [PairLink("a", "b", "direct IPv4", "")]
    book.forget("a")
    assert book.pairs("b", 9) == [] and book.pairs("ab", 9) == [PairLink("a", "b", "direct IPv4", "")]
    book.forget("b")
    assert book.pairs("ab", 9) == []


def test_of_many_pairs_those_without_a_link_come_first() -> None:
    book, peers = LinkBook(), names(40)
    for i, peer in enumerate(peers):
        book.put(peer, [Linked(other, "relayed" if i == 39 else "met", "") for other in peers[:i]], lambda peer: True)
    found = book.pairs(set(peers), 50)
    assert [(p.one, p.other) for p in found[:39]] == [(peer, "p039") for peer in peers[:39]]
    assert [(p.one, p.other) for p in found[39:]] == [("p000", peer) for peer in peers[1:12]]


async def test_duties_change_with_links_and_are_told_again_to_who_comes_back(autojump_clock) -> None:
    head = Head(["a", "b", "c"])
    head.core.flush({"a", "b", "c"})
    head.rows("a", ("b", "relayed"))
    head.core.flush({"a", "b", "c"})
    [duties] = head.links["c"].posted
    assert isinstance(duties, PassingOn) and len(duties.rows) == 2
    head.rows("a", ("b", "relayed"), ("c", "met"))
    head.core.flush({"a", "b", "c"})
    assert len(head.links["c"].posted) == 1, "nothing new to do"
    head.core.forget("c")
    head.links["c"] = Member("c")  # between two flushes
    head.core.flush({"a", "b", "c"})
    assert head.links["c"].posted == [duties]
    head.core.forget("a")
    del head.links["a"]
    head.core.flush({"b", "c"})
    assert head.links["c"].posted[-1] == PassingOn(())


async def test_who_changes_its_addresses_all_the_time_costs_the_others_few_rosters(autojump_clock) -> None:
    """Each change that counts is a roster to everybody."""
    head = Head(["a", "b"])
    for i in range(600):
        head.say("a", Whereabouts((f"/ip4/8.8.8.8/tcp/{1000 + i}",), (), "none"))
        if i % 5 == 0:
            head.core.flush({"a", "b"})
        await trio.sleep(0.1)
    assert head.moved <= MOVES + 60 / MOVE_S + 1
    for _ in range(3):
        await trio.sleep(MOVE_S)
        head.core.flush({"a", "b"})
    assert head.links["a"].reach.far == ("/ip4/8.8.8.8/tcp/1599",), "the last word counts in the end"
    before = head.moved
    await trio.sleep(10 * MOVE_S)
    head.core.flush({"a", "b"})
    assert head.moved == before


async def test_who_never_said_where_it_is_may_not_ask_without_end(autojump_clock) -> None:
    head = Head(["a", "b"])
    with pytest.raises(Refusal, match="too many meetings"):
        for _ in range(BURST + 1):
            head.say("a", Introduce("b", "no answer"))
    assert [type(m) for m in head.links["a"].posted] == [NoMeeting] * BURST


def test_rosters_know_whom_they_listed_to_whom() -> None:
    links = {peer: Member(peer) for peer in "ab"}

    class Exchange:
        def arrange(self, places: object) -> None:
            pass

    rosters = Rosters(Exchange(), links, epoch=1)  # type: ignore[arg-type]
    rosters.changed()
    assert rosters.lists("a", "b") and rosters.lists("b", "a") and not rosters.lists("a", "x") and not rosters.lists("x", "a")
    del links["b"]
    rosters.changed()
    assert not rosters.lists("a", "b") and not rosters.lists("b", "a")
    assert all(not isinstance(m, Grouping) for m in links["a"].posted)


@pytest.mark.parametrize("text", ["/ip4/1.2.3.4/tcp/\u00b2", "/ip4/1.2.3.4/tcp/" + "1" * 5000,
                                  "/ip4/1.2.3.4/tcp/1/" + "x" * MAX_ADDRESS, "/" * 65_536])  # fmt: skip
def test_addresses_that_no_honest_node_says_are_none(text: str) -> None:
    assert endpoint_of(text) is None
