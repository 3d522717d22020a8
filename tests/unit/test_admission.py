"""Tickets and memberships: what lets a peer in, and every way in which it does not."""

from __future__ import annotations

import base64
import math

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from p2p.errors import Refusal, UsageError
from p2p.identity import Identity
from p2p.membership.admission import (
    MEMBERSHIP_DOMAIN,
    PREFIX,
    Membership,
    check_membership,
    check_ticket,
    make_ticket,
    read_ticket,
    sign_membership,
)

HEAD, OTHER, NODE = (Identity.from_seed(bytes([i]) * 32) for i in (1, 2, 3))
NOW = 1_800_000_000.0
ADDRESSES = ("/ip4/192.0.2.7/tcp/4001/p2p/x", "/ip6/2001:db8::1/tcp/4001")
TICKET = make_ticket(HEAD, "run", ADDRESSES, int(NOW) + 100, id="5eed")
TEXT = TICKET.encode()


def test_a_ticket_survives_being_copied() -> None:
    assert read_ticket(TEXT) == TICKET
    wrapped = "\n  ".join(TEXT[i : i + 40] for i in range(0, len(TEXT), 40)) + "\n"
    assert read_ticket(wrapped) == TICKET
    assert check_ticket(TEXT, head=HEAD.peer_id, run="run", now=NOW, peer=NODE.peer_id).id == "5eed"


def test_a_ticket_of_another_release() -> None:
    for text in ("shoal1" + TEXT[6:], "shoal3abc"):
        with pytest.raises(UsageError, match=f"not a ticket of this release: it starts with '{text[:6]}', not with 'shoal2'"):
            read_ticket(text)


def test_the_id_is_signed() -> None:
    with pytest.raises(UsageError, match="signature"):
        read_ticket(replace(TICKET, id="feed").encode())


@given(st.integers(0, len(TEXT) - 1))
def test_a_ticket_cut_off(length) -> None:
    with pytest.raises(UsageError, match="not a ticket"):
        read_ticket(TEXT[:length])


@settings(max_examples=300)
@given(st.integers(0, len(TEXT) - 1), st.sampled_from("ABCXYZabcxyz019-_=.!é\0"))
def test_a_ticket_with_one_letter_changed(at, letter) -> None:
    changed = TEXT[:at] + letter + TEXT[at + 1 :]
    try:
        found = read_ticket(changed)
    except UsageError as error:
        assert str(error).startswith("not a ticket")
    else:
        assert found == TICKET  # only the unused last bits of base64


@settings(max_examples=200)
@given(st.text(max_size=60) | st.text(alphabet="ABab01-_", max_size=80).map(PREFIX.__add__))
def test_text_that_is_no_ticket(text) -> None:
    with pytest.raises(UsageError, match="not a ticket"):
        read_ticket(text)


@settings(max_examples=100)
@given(st.recursive(st.none() | st.integers() | st.text(max_size=5) | st.binary(max_size=5),
                    lambda x: st.lists(x, max_size=6) | st.dictionaries(st.text(max_size=2), x, max_size=2)))
def test_a_ticket_of_other_contents(value) -> None:
    import base64

    try:
        body = msgpack.packb(value)
    except OverflowError:
        return
    with pytest.raises(UsageError, match="not a ticket"):
        read_ticket(PREFIX + base64.urlsafe_b64encode(body).decode())


def test_a_ticket_with_another_address_is_not_whole() -> None:
    moved = replace(TICKET, addresses=("/ip4/203.0.113.1/tcp/1",))
    with pytest.raises(UsageError, match="signature does not fit"):
        read_ticket(moved.encode())


@pytest.mark.parametrize(("text", "options", "reason"), [
    (TEXT, {"run": "other"}, "the ticket is for run run, this learner runs other"),
    (TEXT, {"head": OTHER.peer_id}, f"the ticket was signed by {HEAD.peer_id}, this head is {OTHER.peer_id}"),
    (TEXT, {"now": NOW + 107}, "the ticket expired 7 s ago"),
    ("", {}, "not a ticket"),
    ("x" * 60_000, {}, "not a ticket"),
])  # fmt: skip
def test_the_head_says_why_a_ticket_is_not_taken(text, options, reason) -> None:
    with pytest.raises(Refusal) as refusal:
        check_ticket(text, **{"head": HEAD.peer_id, "run": "run", "now": NOW, "peer": NODE.peer_id, **options})
    assert reason in refusal.value.reason and refusal.value.peer == NODE.peer_id
    assert len(refusal.value.reason) < 300


def test_a_ticket_without_an_end() -> None:
    check_ticket(make_ticket(HEAD, "run", ()).encode(), head=HEAD.peer_id, run="run", now=1e12)


MEMBER = Membership("run", 4, NODE.peer_id, int(NOW) + 50)
SIGNED = sign_membership(HEAD, MEMBER)
OPTIONS = {"head_key": HEAD.public_key, "run": "run", "peer": NODE.peer_id, "now": NOW, "min_epoch": 4}


def test_a_membership_is_read_back() -> None:
    assert check_membership(SIGNED, **OPTIONS) == MEMBER


@pytest.mark.parametrize(("data", "options", "reason"), [
    (SIGNED, {"peer": OTHER.peer_id}, f"membership belongs to {NODE.peer_id}"),
    (SIGNED, {"run": "other"}, "membership is for run run, this is run other"),
    (SIGNED, {"min_epoch": 5}, "membership is of epoch 4, the run is at 5"),
    (SIGNED, {"now": NOW + 61}, "membership expired 11 s ago"),
    (SIGNED, {"head_key": OTHER.public_key}, f"membership is not signed by the head {OTHER.peer_id}"),
    (sign_membership(NODE, MEMBER), {}, f"membership is not signed by the head {HEAD.peer_id}"),
    (b"", {}, "malformed membership"),
    (SIGNED[:-1], {}, "malformed membership"),
    (SIGNED + b"\0", {}, "malformed membership"),
])  # fmt: skip
def test_memberships_that_do_not_count(data, options, reason) -> None:
    with pytest.raises(Refusal) as refusal:
        check_membership(data, **{**OPTIONS, **options})
    assert reason in refusal.value.reason and refusal.value.fatal
    assert refusal.value.peer == options.get("peer", NODE.peer_id)


@settings(max_examples=300)
@given(st.integers(0, len(SIGNED) - 1), st.integers(1, 255))
def test_a_membership_with_a_changed_byte(at, change) -> None:
    data = bytearray(SIGNED)
    data[at] ^= change
    with pytest.raises(Refusal):
        check_membership(bytes(data), **OPTIONS)


junk = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**64 - 1) | st.floats() | st.text(max_size=5) | st.binary(max_size=70),
    lambda x: st.lists(x, max_size=5) | st.dictionaries(st.text(max_size=2), x, max_size=3),
    max_leaves=8,
)


HOSTILE = [math.inf, -math.inf, math.nan, 2**62, -1, None, [], {}, "x", b"x", True]
"""What int(), bytes() or str() would choke on, or allocate the whole memory for."""


@pytest.mark.parametrize("value", HOSTILE, ids=repr)
@pytest.mark.parametrize("at", range(6))
def test_every_field_of_a_ticket_is_of_its_own_type(at, value) -> None:
    fields = [TICKET.run, TICKET.head, list(ADDRESSES), TICKET.expires, TICKET.id, TICKET.signature]
    fields[at] = value
    text = PREFIX + base64.urlsafe_b64encode(msgpack.packb(fields)).decode().rstrip("=")
    with pytest.raises(Refusal, match="not a ticket"):
        check_ticket(text, head=HEAD.peer_id, run="run", now=NOW)


@pytest.mark.parametrize("value", HOSTILE, ids=repr)
@pytest.mark.parametrize("at", range(4))
def test_every_field_of_a_membership_is_of_its_own_type(at, value) -> None:
    fields = [MEMBER.run, MEMBER.epoch, MEMBER.peer, MEMBER.expires]
    fields[at] = value
    body = msgpack.packb(fields)
    unsigned = msgpack.packb([body, b""])
    with pytest.raises(Refusal, match="not signed by the head"):  # nothing of it is looked at before that
        check_membership(unsigned, **OPTIONS)
    if (at, value) not in ((1, 2**62), (3, 2**62)):  # a whole number is what these two are
        with pytest.raises(Refusal, match="membership"):
            check_membership(msgpack.packb([body, HEAD.sign(MEMBERSHIP_DOMAIN, body)]), **OPTIONS)
    for wire in ([body, value], [value, b""]):
        with pytest.raises(Refusal, match="membership"):
            check_membership(msgpack.packb(wire), **OPTIONS)


@settings(max_examples=300)
@given(junk)
def test_memberships_of_another_shape(value) -> None:
    with pytest.raises(Refusal):
        check_membership(msgpack.packb(value), **OPTIONS)


@settings(max_examples=200)
@given(junk)
def test_signed_bodies_of_another_shape(value) -> None:
    body = msgpack.packb(value)
    with pytest.raises(Refusal):
        check_membership(msgpack.packb([body, HEAD.sign(MEMBERSHIP_DOMAIN, body)]), **OPTIONS)
