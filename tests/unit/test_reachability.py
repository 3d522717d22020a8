"""How two members come together: what is tried and when, what the head arranges and for whom, who passes on between those that do
not meet."""

from __future__ import annotations

import itertools
import socket
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from p2p.broadcast.session import Session
from p2p.channel.listening import anywhere
from p2p.channel.opening import TcpEnd, end_of, endpoint_of, is_own_fault, source_for
from p2p.errors import Refusal
from p2p.identity import Identity
from p2p.membership.deputies import MAX_DEPUTIES, by_sender, deputies_of, mostly_apart
from p2p.membership.dialling import Dialler
from p2p.membership.introductions import BURST, PAIR_S, Arrangement, Introductions, place_of
from p2p.membership.reachability import ASK_S, PATIENCE_S, Pursuit, dialled_kind, nat_of
from p2p.protocol.join import RosterEntry
from p2p.protocol.reach import Meeting, PassOn, Whereabouts
from tests.support.memory_network import MemorySwitch

# --- one member -----------------------------------------------------------------------------------------------------------


def test_whose_turn_it_is_dials_first_and_the_other_side_later() -> None:
    mine, theirs = Pursuit(True, 10.0), Pursuit(False, 10.0)
    assert mine.next(10.0, dialable=True, may_ask=True) == "dial"
    assert theirs.next(10.0, dialable=True, may_ask=True) == "wait"
    assert theirs.next(10.0 + PATIENCE_S, dialable=True, may_ask=True) == "dial"


def test_a_meeting_is_asked_for_once_dialling_failed() -> None:
    pursuit = Pursuit(True, 0.0)
    pursuit.dial_failed(1.0, "refused")
    assert pursuit.next(1.1, dialable=True, may_ask=True) == "wait"
    at = pursuit.dial_at
    assert pursuit.next(at, dialable=True, may_ask=True) == "dial"
    pursuit.dial_failed(PATIENCE_S, "refused")
    assert pursuit.next(PATIENCE_S, dialable=True, may_ask=True) == "ask"
    assert pursuit.next(PATIENCE_S, dialable=True, may_ask=False) == "wait"


def test_without_addresses_only_a_meeting_is_left_and_is_asked_for_ever_more_rarely() -> None:
    pursuit, now, times = Pursuit(True, 0.0), 0.0, []
    while len(times) < 6:
        now = max(now, pursuit.next_at(dialable=False, may_ask=True))
        assert pursuit.next(now, dialable=False, may_ask=True) == "ask"
        pursuit.asked(now)
        times.append(now)
    assert times[0] == PATIENCE_S and [b - a for a, b in itertools.pairwise(times)] == [*ASK_S, ASK_S[-1]]
    assert pursuit.next_at(dialable=False, may_ask=False) == float("inf")
    assert not pursuit.settled and pursuit.why == "nothing was tried yet"
    pursuit.dial_failed(now, "no answer")
    pursuit.not_met("symmetric")
    assert pursuit.settled and pursuit.why == "dialled: no answer; meeting: symmetric"


@pytest.mark.parametrize(("address", "both"), [("2a00::7", True), ("::1", False), ("fe80::1%eth0", False)])
def test_a_node_listens_over_ipv6_where_others_can_dial_it(address: str, both: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    interface = SimpleNamespace(family=socket.AF_INET6, address=address)
    monkeypatch.setattr("psutil.net_if_addrs", lambda: {"eth0": [interface]})
    assert anywhere(4001) == ["/ip4/0.0.0.0/tcp/4001", *(["/ip6/::/tcp/4001"] if both else [])]


def test_the_kind_of_nat_follows_from_what_others_see() -> None:
    here, there = "/ip4/203.0.113.5/tcp/4001", "/ip4/203.0.113.5/tcp/50123"
    assert nat_of({}, ()) == "unknown" == nat_of({"head": here}, ())
    assert nat_of({"head": here, "b": here}, ("192.168.1.2",)) == "steady"
    assert nat_of({"head": here, "b": there}, ()) == "symmetric"
    assert nat_of({"head": here}, ("203.0.113.5",)) == "none"
    other = "/ip6/2001:db8::7/tcp/4001"  # some see it over IPv6, which is not translated: it says nothing of the NAT
    assert nat_of({"head": here, "b": other}, ("2001:db8::7",)) == "unknown"
    assert nat_of({"head": here, "b": here, "c": other}, ("2001:db8::7",)) == "steady"
    assert nat_of({"head": here, "b": there, "c": other}, ("2001:db8::7",)) == "symmetric"
    assert nat_of({"head": other}, ("2001:db8::7",)) == "none"
    assert (dialled_kind("/ip6/::1/tcp/1"), dialled_kind("/ip4/1.2.3.4/tcp/1"), dialled_kind("/memory/x")) == (
        "direct IPv6", "direct IPv4", "in memory",
    )  # fmt: skip


@pytest.mark.parametrize("text", ["", "/ip4/1.2.3.4", "/ip4/1.2.3.4/udp/1", "/ip6/1.2.3.4/tcp/1", "/ip4/x/tcp/1", "/dns/x/tcp/1",
                                  "/ip4/1.2.3.4/tcp/70000", "ip4/1.2.3.4/tcp/1", "/ip4/1.2.3.4/tcp/\u00b2"])  # fmt: skip
def test_what_is_no_end_of_a_connection(text: str) -> None:
    assert endpoint_of(text) is None


def test_a_connection_leaves_from_the_port_of_its_family_that_is_listened_on() -> None:
    assert endpoint_of("/ip6/2001:DB8::1/tcp/5/p2p/x") == TcpEnd("2001:db8::1", 5)
    listening = [TcpEnd("127.0.0.1", 1), TcpEnd("0.0.0.0", 2), TcpEnd("::", 3)]
    assert source_for("1.2.3.4", listening) == TcpEnd("0.0.0.0", 2)
    assert source_for("2001:db8::1", listening) == TcpEnd("::", 3)
    assert source_for("1.2.3.4", listening[:1]) is None, "loopback is nobody's NAT"
    wrapped = RuntimeError()
    wrapped.__cause__ = OSError(99, "EADDRNOTAVAIL")
    assert is_own_fault(wrapped) and not is_own_fault(OSError(111, "ECONNREFUSED")) and not is_own_fault(None)


@pytest.mark.parametrize("name, end", [
    (("192.0.2.1", 5), TcpEnd("192.0.2.1", 5)), (("2001:db8::1", 5, 0, 0), TcpEnd("2001:db8::1", 5)),
    (("fe80::1%eth0", 5, 0, 2), TcpEnd("fe80::1", 5)), (("::ffff:192.0.2.1", 5, 0, 0), TcpEnd("192.0.2.1", 5)),
])  # fmt: skip
def test_what_a_socket_says_of_an_end_is_what_its_address_says(name: tuple[Any, ...], end: TcpEnd) -> None:
    assert end_of(name) == end == endpoint_of(f"/ip{6 if ':' in end.host else 4}/{end.host}/tcp/{end.port}")


def test_whoever_comes_over_ipv6_is_known_by_its_end() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server, socket.socket(socket.AF_INET6) as client:
        client.connect(server.getsockname())
        taken, _ = server.accept()
        with taken:
            expected = {endpoint_of(f"/ip6/::1/tcp/{client.getsockname()[1]}"): "a peer"}
            assert expected.get(end_of(taken.getpeername())) == "a peer"


# --- the head -------------------------------------------------------------------------------------------------------------


def where(met: str = "", nat: str = "unknown", addresses: tuple[str, ...] = ()) -> Whereabouts:
    return Whereabouts(addresses, (met,) if met else (), nat)


def two(nat: str = "unknown", other: str = "unknown") -> Introductions:
    found = Introductions()
    found.put("a", place_of("a", where("/ip4/8.8.8.8/tcp/1", nat), "/ip4/8.8.8.8/tcp/1"))
    found.put("b", place_of("b", where("/ip4/9.9.9.9/tcp/2", other), "/ip4/9.9.9.9/tcp/2"))
    return found


def test_both_are_told_of_each_other_and_one_speaks_first() -> None:
    found = two().arrange("b", "a", 0.0, ways=(0.2, 0.05))
    assert isinstance(found, Arrangement)
    one, other = found
    assert (one.peer, one.addresses, one.first) == ("a", ("/ip4/8.8.8.8/tcp/1",), False)
    assert (other.peer, other.addresses, other.first) == ("b", ("/ip4/9.9.9.9/tcp/2",), True)
    assert one.wait_s + 0.2 == pytest.approx(other.wait_s + 0.05), "at the same moment"


def test_one_meeting_at_a_time_whoever_asks() -> None:
    found = two()
    assert found.arrange("a", "b", 0.0) is not None
    assert found.arrange("b", "a", PAIR_S / 2) is None
    assert isinstance(found.arrange("b", "a", PAIR_S), Arrangement)
    found.forget("b")
    assert "did not say where it is" in str(found.arrange("a", "b", 2 * PAIR_S))
    assert "did not say" in str(found.arrange("b", "a", 2 * PAIR_S))


@pytest.mark.parametrize(("one", "other", "why"), [("symmetric", "steady", "this node is"), ("steady", "symmetric", "it is"),
                                                   ("symmetric", "symmetric", "both are")])  # fmt: skip
def test_symmetric_nats_are_not_tried(one: str, other: str, why: str) -> None:
    assert str(two(one, other).arrange("a", "b", 0.0)).startswith(why)


def test_over_ipv6_symmetric_nats_are_no_matter() -> None:
    found = Introductions()
    for peer, host, ipv6 in ("a", "8.8.8.8", "2a00::1"), ("b", "9.9.9.9", "2a00::2"), ("c", "1.1.1.1", ""):
        seen = f"/ip4/{host}/tcp/1"
        found.put(peer, place_of(peer, where(seen, "symmetric", (f"/ip6/{ipv6}/tcp/5",) if ipv6 else ()), seen))
    arranged = found.arrange("a", "b", 0.0)
    assert isinstance(arranged, Arrangement), "from the ports that they listen on at IPv6, and no others"
    assert (arranged.one.addresses, arranged.other.addresses) == (("/ip6/2a00::2/tcp/5",), ("/ip6/2a00::1/tcp/5",))
    assert str(found.arrange("a", "c", 0.0)).startswith("both are behind a NAT")


def test_nobody_is_sent_to_a_third_party() -> None:
    place = place_of("a", where("/ip4/9.9.9.9/tcp/22"), "/ip4/8.8.8.8/tcp/1")
    assert place.meets.far == (), "it was seen at another host"
    found = two()
    found.put("a", place)
    assert str(found.arrange("b", "a", 1.0)).startswith("no address is known")
    assert str(found.arrange("a", "b", 1.0)).startswith("no address of this node")
    # One inside a network is told to nobody outside.
    inside = place_of("a", where("/ip4/192.168.1.2/tcp/1"), "/ip4/192.168.1.2/tcp/1")
    found.put("a", inside)
    assert str(found.arrange("b", "a", 1.0)).startswith("no address is known")


def test_who_asks_too_often_is_refused() -> None:
    found = two()
    for _ in range(BURST):
        found.arrange("a", "b", 0.0)
    with pytest.raises(Refusal, match="too many meetings"):
        found.arrange("a", "b", 0.0)
    found.put("a", place_of("a", where("/ip4/8.8.8.8/tcp/1"), "/ip4/8.8.8.8/tcp/1"))
    with pytest.raises(Refusal, match="too many meetings"):  # new whereabouts are no new allowance
        found.arrange("a", "b", 0.0)
    assert found.arrange("b", "a", 2 * PAIR_S) is not None


# --- passing on -----------------------------------------------------------------------------------------------------------


def test_those_linked_with_both_share_what_they_pass_on() -> None:
    found = deputies_of("abcd", [("a", "b")])
    assert found.keys() == {"c", "d"}
    for way in (("a", "b"), ("b", "a")):
        rows = [row for rows in found.values() for row in rows if (row.source, row.target) == way]
        assert sorted(row.share for row in rows) == [0, 1] and {row.of for row in rows} == {2}
    assert deputies_of("abc", [("a", "b"), ("b", "c")]) == {}, "b is linked with nobody"
    assert deputies_of("ab", [("a", "x"), ("a", "a")]) == {}
    many = deputies_of([str(i) for i in range(40)], [("0", "1")])
    assert len(many) <= 2 * MAX_DEPUTIES and all(row.of == MAX_DEPUTIES for rows in many.values() for row in rows)


def test_who_is_linked_with_few() -> None:
    members = "abcde"
    assert mostly_apart(members, [("a", "b"), ("b", "a"), ("a", "c")]) == frozenset()
    assert mostly_apart(members, [("a", "b"), ("a", "c"), ("a", "d"), ("x", "e")]) == {"a"}
    assert not mostly_apart(members, [("a", "b"), ("a", "x"), ("a", "y"), ("a", "z")]), "who is no member says nothing"


def test_rows_that_make_no_sense_are_left_out() -> None:
    good = PassOn("a", "b", 1, 2)
    rows = [good, PassOn("a", "x", 0, 1), PassOn("a", "a", 0, 1), PassOn("a", "b", 2, 2), PassOn("a", "b", 0, 0)]
    assert by_sender(rows, ("a", "b")) == {"a": (good,)}


def test_a_session_passes_on_what_comes_from_the_one_to_the_other() -> None:
    session = Session(me="c", source="head", now=0.0)
    session.passing = {"a": (PassOn("a", "b", 0, 2),)}
    for peer in ("head", "a", "b", "d"):
        session.join(peer, (), 0.0)
    session.learn(range(4), 0.0)
    for chunk in (0, 1):
        session.hold(chunk, "a", duty=0, now=0.0)
    session.hold(2, "d", duty=0, now=0.0)
    found = session.next(("a", "b", "d"), 0.0)
    assert found is not None and (found.peer, found.chunk) == ("b", 0)
    assert session.next(("a", "b", "d"), 0.0) is None, "1 is another one's share, and d is linked with b"
    session.hold(4, "a", duty=0, now=0.0)
    session.peer_has("b", (4,), 0.0)
    assert session.next(("b",), 0.0) is None, "it has it already"


# --- the shell ------------------------------------------------------------------------------------------------------------


async def test_the_head_can_have_only_listed_members_met(autojump_clock: trio.abc.Clock) -> None:
    me, other, head = (Identity.generate().peer_id for _ in range(3))
    async with MemorySwitch().network(me) as network, trio.open_nursery() as nursery:

        async def connect(*_: object) -> None:
            raise AssertionError("it was not met")

        dialler = Dialler(network, {}, connect, me=me, head=head, dialable=True, is_banned=lambda peer: False)
        await nursery.start(dialler.run)
        with pytest.raises(Refusal, match="not in the roster"):
            dialler.invite(Meeting(other, ("/ip4/8.8.8.8/tcp/1",), True, 0.0))
        dialler.want([RosterEntry(other, (), "other")])
        await trio.sleep(0.1)
        dialler.invite(Meeting(other, ("/ip4/8.8.8.8/tcp/1",), True, 1e9))
        await trio.sleep(10.0)
        assert "this transport cannot" in dialler.pursuits[other].why, "an hour's wait is cut"
        assert [(row.peer, row.kind) for row in dialler.kinds()] == [(other, "relayed")]
        nursery.cancel_scope.cancel()
