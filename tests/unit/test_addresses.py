"""Which addresses of a peer others are told: nobody is made to dial inside his own machine or network by a stranger."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p.channel.listening import check_free
from p2p.errors import UsageError
from p2p.identity import Identity
from p2p.ip import plain_ip
from p2p.membership.addresses import MAX_OTHER_FAMILY, MAX_TOLD, Reach, reach_of, scope_of

ME, OTHER = (Identity.from_seed(bytes([i]) * 32).peer_id for i in (1, 2))
PUBLIC, LAN, LOOP = "/ip4/8.8.4.4/tcp/4001", "/ip4/192.168.1.5/tcp/4001", "/ip4/127.0.0.1/tcp/4001"


@pytest.mark.parametrize(("host", "scope"), [
    ("8.8.8.8", "public"), ("2600::1", "public"),
    ("10.0.0.1", "inside"), ("172.16.9.9", "inside"), ("192.168.0.1", "inside"), ("100.64.0.1", "inside"), ("fd00::1", "inside"),
    ("198.18.0.1", "inside"), ("192.0.2.1", "inside"), ("2001:db8::1", "inside"),
    ("127.0.0.1", "local"), ("127.9.9.9", "local"), ("::1", "local"), ("169.254.169.254", "local"), ("fe80::1", "local"),
    ("0.0.0.0", "never"), ("0.1.2.3", "never"), ("::", "never"), ("224.0.0.1", "never"), ("ff02::1", "never"),
    ("255.255.255.255", "never"), ("240.0.0.1", "never"), ("fec0::1", "never"),
    ("::ffff:127.0.0.1", "local"), ("::ffff:10.0.0.1", "inside"), ("::127.0.0.1", "never"), ("64:ff9b::7f00:1", "never"),
    ("2002:7f00:1::", "never"), ("2001:0:7f00:1::", "never"),
    ("127.1", "never"), ("0177.0.0.1", "never"), ("2130706433", "never"), ("localhost", "never"), ("", "never"),
    ("١٢٧.٠.٠.١", "never"),
])  # fmt: skip
def test_who_can_dial_a_host(host: str, scope: str) -> None:
    assert scope_of(host) == scope


def told(announced: list[str], seen: str, other: str, own: tuple[str, ...] = ()) -> tuple[str, ...]:
    return reach_of(ME, announced, seen, own).told_to(reach_of(OTHER, [], other, own))


def host_of(address: str) -> str:
    with suppress(ValueError, IndexError):
        return str(plain_ip(address.split("/")[2]))
    return ""


def seen(host: str) -> str:
    return f"/ip{6 if ':' in host else 4}/{host}/tcp/50000"


@pytest.mark.parametrize(("peer", "other", "expected"), [
    ("8.8.4.4", "9.9.9.9", [PUBLIC]),
    ("8.8.4.4", "8.8.4.4", [PUBLIC, LAN]),  # behind the same router
    ("8.8.4.4", "192.168.1.9", [PUBLIC]),
    ("192.168.1.5", "9.9.9.9", [PUBLIC]),
    ("192.168.1.5", "192.168.1.9", [LAN, PUBLIC]),  # where it was seen comes first
    ("192.168.1.5", "10.1.1.1", [LAN, PUBLIC]),
    ("192.168.1.5", "127.0.0.1", [LAN, PUBLIC]),
    ("127.0.0.1", "127.0.0.1", [LOOP, PUBLIC, LAN]),
    ("127.0.0.1", "192.168.1.9", [PUBLIC, LAN]),
    ("127.0.0.1", "9.9.9.9", [PUBLIC]),
    ("169.254.1.1", "127.0.0.1", [PUBLIC, LAN]),
    ("::ffff:127.0.0.1", "127.0.0.1", [LOOP, PUBLIC, LAN]),
    ("9.9.9.8", "9.9.9.9", []),  # a third party's, as far as the head can tell
    ("9.9.9.8", "9.9.9.8", [LAN]),
])  # fmt: skip
def test_an_address_is_told_to_those_for_whom_it_is(peer: str, other: str, expected: list[str]) -> None:
    router = "/ip4/8.8.4.4/tcp/9"  # in front of the head: a neighbour's public address is that one, too
    own = (router,) if peer != "8.8.4.4" else ()
    assert list(told([PUBLIC, LAN, LOOP], seen(peer), seen(other), own)) == expected
    # Without it, a neighbour's public address is not believed either.
    if peer != "8.8.4.4":
        assert list(told([PUBLIC, LAN, LOOP], seen(peer), seen(other))) == [text for text in expected if text != PUBLIC]


SIX, SEVEN = "/ip6/2600::1/tcp/4001", "/ip6/2600::2/tcp/4001"


@pytest.mark.parametrize(("peer", "announced", "expected"), [
    ("9.9.9.8", [PUBLIC, SIX, SEVEN], [SIX]),  # both families, and the head sees one of them
    ("2600::2", [SIX, PUBLIC, SEVEN, "/ip4/8.8.8.8/tcp/1"], [SEVEN, PUBLIC]),
    ("2600::9", [SIX, SEVEN], []),
    ("192.168.1.5", [PUBLIC, SIX, SEVEN], [SIX]),
    ("fd00::1", [PUBLIC, SIX], [PUBLIC]),
    ("::ffff:8.8.4.4", [PUBLIC, SIX], [PUBLIC, SIX]),
    ("8.8.4.4", [PUBLIC, "/ip4/8.8.4.4/tcp/61001"], [PUBLIC, "/ip4/8.8.4.4/tcp/61001"]),  # a port that the router mapped
    ("9.9.9.8", ["/ip6/::ffff:8.8.4.4/tcp/1"], []),  # IPv4 in the clothes of IPv6
    ("8.8.4.4", ["/ip6/::ffff:8.8.4.4/tcp/1"], ["/ip6/::ffff:8.8.4.4/tcp/1"]),
])  # fmt: skip
def test_a_public_address_is_of_the_host_that_is_seen_or_one_of_the_other_family(
    peer: str, announced: list[str], expected: list[str]
) -> None:
    assert list(told(announced, seen(peer), seen("9.9.9.9"))) == expected


def test_the_heads_own_machine_is_one_place_by_whichever_address_it_was_reached() -> None:
    own = ("/ip4/192.168.1.2/tcp/1", "/ip4/127.0.0.1/tcp/1")
    assert told([LOOP], seen("192.168.1.2"), seen("127.0.0.1"), own) == (LOOP,)
    assert told([LOOP], seen("192.168.1.3"), seen("127.0.0.1"), own) == ()


def test_where_the_transport_cannot_say_nothing_is_told() -> None:
    assert told([PUBLIC, SIX, LAN, LOOP], "", "") == () == told([PUBLIC, LAN, LOOP], "", seen("127.0.0.1"))
    assert told([PUBLIC, LAN, LOOP], seen("8.8.4.4"), "") == (PUBLIC,)
    assert Reach().told_to(Reach()) == ()


@pytest.mark.parametrize("wrong", [
    "/dns/localhost/tcp/80", "/dns4/evil.example/tcp/80", "/unix/tmp/x", "/ip4/8.8.8.8/udp/53", "/ip4/8.8.8.8/tcp/0",
    "/ip4/8.8.8.8/tcp/65536", "/ip4/8.8.8.8/tcp/80/ws", "/ip4/8.8.8.8/tcp/80/p2p/" + OTHER, "/ip6/8.8.8.8/tcp/80",
    "/ip4/2600::1/tcp/80", "8.8.8.8:80", "", "/", "/ip4", "/ip4//tcp/1", " /ip4/8.8.8.8/tcp/80", "/ip4/8.8.8.8/tcp/80\n",
    "/ip4/8.8.8.8/tcp/²", "/ip6zone/eth0/ip6/fe80::1/tcp/80", "/memory/" + OTHER,
])  # fmt: skip
def test_what_is_no_address_of_a_machine_is_told_to_nobody(wrong: str) -> None:
    assert told([wrong], seen("127.0.0.1"), seen("9.9.9.9")) == ()


@pytest.mark.parametrize("text", ["/ip4/127.0.0.1/tcp/\u00b2", "/ip4/127.0.0.1/tcp/1\u00b2", "/dns/x/tcp/1"])
def test_where_nobody_can_listen(text: str) -> None:
    with pytest.raises(UsageError, match="cannot listen on"):
        check_free([text])


def test_no_more_than_a_handful_and_the_likeliest_first() -> None:
    many = [f"/ip4/8.8.8.8/tcp/{i}" for i in range(1, 16)]
    assert told(["/ip6/2600::1/tcp/1", *many], seen("8.8.8.8"), seen("9.9.9.9")) == tuple(many[:4]) and MAX_TOLD == 4
    mine = f"/ip4/8.8.8.8/tcp/1/p2p/{ME}"
    assert told([mine, mine], seen("8.8.8.8"), seen("9.9.9.9")) == (mine,)


@given(st.lists(st.text(max_size=60) | st.from_regex(r"/ip[46]/[0-9a-f.:]{1,20}/tcp/[0-9]{1,5}", fullmatch=True), max_size=20),
       st.text(max_size=40), st.sampled_from(["8.8.4.4", "127.0.0.1", "10.0.0.1", "fe80::1"]))
def test_whatever_a_peer_says(announced: list[str], place: str, other: str) -> None:
    for where in (place, seen(other)):
        found = told(announced, where, seen("9.9.9.9"))
        assert len(found) <= MAX_TOLD and set(found) <= set(announced)
        assert all(scope_of(text.split("/")[2]) == "public" for text in found)
        assert sum(host_of(text) != host_of(where) for text in found) <= MAX_OTHER_FAMILY
