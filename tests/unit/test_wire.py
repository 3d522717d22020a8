"""The message parser: every message survives the wire, and anything else is a Refusal and nothing worse."""

from __future__ import annotations

import re
import typing

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from learner.client.messages import decode as from_trainer
from p2p.broadcast.transfer import bitmap, members
from p2p.errors import Refusal
from p2p.identity import Identity
from p2p.limits import MAX_FRAME
from p2p.protocol import generation
from p2p.protocol.generation import GenerateRequest
from p2p.protocol.join import Hello, Roster, RosterEntry, make_roster
from p2p.protocol.messages import decode
from p2p.protocol.rollout import Completion, Generate, TokenEvent, pack_ids
from p2p.protocol.versions import Allowance, Chunk, GetCatalog, Have, Installed, Parts
from p2p.protocol.wire import FEW, MANY, MAX_TEXT, Message, Record, encode
from p2p.version import Version

MESSAGES = list(decode.kinds.values())
NUMBER = st.integers(0, 2**64 - 1)


def values_of(hint) -> st.SearchStrategy:
    """Any value a field of this annotation may hold."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Version:
        return st.builds(Version, NUMBER, NUMBER)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return instances(hint)
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin is tuple:
        return st.lists(values_of(args[0]), max_size=4).map(tuple)
    if args:
        return st.none() | values_of(next(a for a in args if a is not type(None)))
    plain = {
        int: NUMBER, float: st.floats(allow_nan=False, allow_infinity=False), str: st.text(max_size=40),
        bytes: st.binary(max_size=60), bool: st.booleans(),
    }  # fmt: skip
    return plain[hint]


def instances(cls) -> st.SearchStrategy:
    hints = typing.get_type_hints(cls)
    values = {name: values_of(hints[name]) for name in cls.__struct_fields__}
    if cls is TokenEvent:  # its rows are of one length
        return st.lists(st.tuples(NUMBER.map(lambda n: n % 2**32), st.floats(-60, 0, width=32)), max_size=9).flatmap(
            lambda made: st.builds(
                cls, **values | {"packed_ids": st.just(pack_ids([i for i, _ in made])),
                                 "packed_logprobs": st.just(np.array([p for _, p in made], "<f4").tobytes())}
            )
        )
    if cls is Allowance:  # rates are not below 0
        values = dict.fromkeys(values, st.none() | st.floats(0, allow_nan=False, allow_infinity=False))
    return st.builds(cls, **values)


any_message = st.sampled_from(MESSAGES).flatmap(instances)
junk = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)


def parse(data: bytes):
    """What `decode` makes of it: a message, or None when refused. Anything else is a fault."""
    try:
        return decode(data)
    except Refusal as refusal:
        assert refusal.fatal and refusal.reason and len(refusal.reason) < 1000
        return None


def test_every_family_is_there() -> None:
    assert len(MESSAGES) >= 21


REMOTE = ("p2p.protocol.", "learner.client.messages")
"""Modules whose records arrive from other machines or from the trainer. The engine's pipe, which a process holds with its own
child, has records too."""
BOUNDED = {"Text", "Name", "Line", "Blob", "Digest", "Count", "Rate", "Real", "bool", "Version", "State"}


@pytest.mark.parametrize("decoder", [decode, from_trainer])
def test_every_field_of_every_message_has_a_bounded_type(decoder) -> None:
    messages = list(decoder.kinds.values())
    assert ("Tokens" if decoder is decode else "Ok") in {cls.__name__ for cls in messages}
    records = [cls for cls in Record.__subclasses__() if cls is not Message and cls.__module__.startswith(REMOTE)]
    assert {"GenerateRequest", "TokenEvent", "RosterEntry", "Placed", "CatalogEntry"} <= {cls.__name__ for cls in records}
    assert not any(cls.__struct_defaults__ for cls in records), "a part of a message may lack nothing"
    known = BOUNDED | {cls.__name__ for cls in records}
    for cls in (*messages, *records):
        for field, kind in cls.__annotations__.items():
            inner = kind.removesuffix(" | None").removesuffix("]")
            inner = re.sub(r"^(Row|Many|Few)\[", "", inner)
            assert inner in known, f"{cls.__name__}.{field}: {kind}"


@settings(max_examples=200)
@given(st.sampled_from(list(from_trainer.kinds.values())).flatmap(instances), st.data())
def test_the_trainers_messages_survive_and_nothing_else_passes(message, data) -> None:
    raw = bytearray(encode(message))
    assert from_trainer(bytes(raw)) == message
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    for decoder in (from_trainer, decode):
        try:
            decoder(bytes(raw))
        except Refusal as refusal:
            assert refusal.fatal and refusal.reason


@settings(max_examples=300)
@given(any_message)
def test_every_message_survives_the_wire(message) -> None:
    assert decode(encode(message)) == message


@settings(max_examples=400)
@given(st.binary(max_size=200))
@example(b"")
@example(b"\x91" * 10_000)
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\xc6\xff\xff\xff\xff")
@example(b"\xdf\xff\xff\xff\xff")
@example(b"\xc7\xff\x01")
@example(b"\xd9\x04\xff\xff\xff\xff")
def test_arbitrary_bytes_are_a_message_or_a_refusal(data) -> None:
    found = parse(data)
    assert found is None or type(found) in MESSAGES


@settings(max_examples=400)
@given(any_message, st.data())
def test_a_damaged_message_is_a_message_or_a_refusal(message, data) -> None:
    raw = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        match data.draw(st.sampled_from(["flip", "cut", "insert", "repeat"])):
            case "flip":
                raw[at] ^= data.draw(st.integers(1, 255))
            case "cut":
                del raw[at + 1 :]
            case "insert":
                raw[at:at] = data.draw(st.binary(min_size=1, max_size=4))
            case "repeat":
                raw += raw[at:]
    found = parse(bytes(raw))
    assert found is None or decode(encode(found)) == found


@settings(max_examples=400)
@given(st.sampled_from(MESSAGES), st.lists(junk, max_size=12))
def test_fields_of_any_kind_and_number(cls, fields) -> None:
    found = parse(msgpack.packb([cls.__struct_config__.tag, *fields]))
    if found is not None:
        assert type(found) is cls and len(fields) == len(cls.__struct_fields__)


@settings(max_examples=300)
@given(any_message, st.data())
def test_one_field_of_another_kind(message, data) -> None:
    wire = msgpack.unpackb(encode(message))
    if len(wire) < 2:
        return
    wire[data.draw(st.integers(1, len(wire) - 1))] = data.draw(junk)
    found = parse(msgpack.packb(wire))
    assert found is None or type(found) is type(message)


@pytest.mark.parametrize(("wire", "reason"), [
    (["have", b"m"], "Have has 2 fields, got 1"),
    (["have", b"m", [], 1], "Have has 2 fields, got 3"),
    (["have", b"m", [-1]], "Have.chunks[0]: expected `int` >= 0"),
    (["have", b"m", [True]], "Have.chunks[0]: expected `int`, got `bool`"),
    (["have", b"m", [0, 1.5]], "Have.chunks[1]: expected `int`, got `float`"),
    (["have", "m", [1]], "Have.mid: expected `bytes`, got `str`"),
    (["have", b"m", {}], "Have.chunks: expected `array`, got `object`"),
    (["follow", 1], "Follow.on: expected `bool`, got `int`"),
    (["bye", b"x", True, False], "Bye.reason: expected `str`, got `bytes`"),
    (["report", "p", [1], 0, "r"], "Report.version: expected `array` of at least length 2, got 1"),
    (["report", "p", [1, -2], 0, "r"], "Report.version.step: expected `int` >= 0"),
    (["roster", 1, [["p", [], "n", 1]]], "Roster.members[0]: expected `array` of at most length 3, got 4"),
    (["roster", 1, [["p", [7], "n"]]], "Roster.members[0].addresses[0]: expected `str`, got `int`"),
    (["installed", [1, 1], b"", float("nan"), 0.0, 0.0, 1, 1], "Installed.pause_s: expected `float` >= "),
    (["installed", [1, 1], b"", 0.0, float("inf"), 0.0, 1, 1], "Installed.apply_s: expected `float` <= "),
    (["nonsense" * 20], "not a list that starts with a known tag: invalid value 'nonsense"),
    ([], "not a list that starts with a known tag"),
    ([["have"], b"m", []], "not a list that starts with a known tag"),
    (["t.resume", 1], "not a list that starts with a known tag"),  # the trainer's, on its own socket
    (["bye", "x", True], "Bye has 3 fields, got 2"),
    (["status", True, [1, 2]], "NodeStatus has 14 fields, got 2"),
    (["assign", [["r", b"", b"", b"", 1, 1, [1, "x"], 1.0, 1.0, None]], 0.0], "Assign.requests[0].min_version.step: expected"),
    (["assign", [["r", b"", b"", b"", 1, 1, [1, 1], 1.0, 1.0, [1, -1]]], 0.0], "Assign.requests[0].exact_version.step: expected"),
    (["installed", [1, 1], b"", True, 0.0, 0.0, 1, 1], "Installed.pause_s: expected `float`, got `bool`"),
    (["activate", "busy", ""], "Activate.state: invalid enum value 'busy'"),
    ({"have": 1}, "not a list that starts with a known tag"),
    ("have", "not a list that starts with a known tag"),
    (["bye", "x" * (MAX_TEXT + 1), True, False], "Bye.reason: expected `str` of length <= 65536"),
    (["have", b"m", [0] * (MANY + 1)], "Have.chunks: expected `array` of length <= 8192"),
    (["want", b"m", [0] * (FEW + 1)], "Want.chunks: expected `array` of length <= 256"),
    (["tokens", [["r", 0, b"1234", b"", [1, 1], "", ""]]], "Tokens: request 'r': 4 bytes of token ids with 0 of logprobs"),
    (["tokens", [["r", 0, b"123", b"123", [1, 1], "", ""]]], "Tokens: request 'r': 3 bytes of token ids with 3 of logprobs"),
    (["have", b"m", msgpack.ExtType(4, b"x")], "Have.chunks: expected `array`, got `ext`"),
])  # fmt: skip
def test_a_refusal_names_message_and_field(wire, reason) -> None:
    with pytest.raises(Refusal) as refusal:
        decode(msgpack.packb(wire))
    assert reason in refusal.value.reason and refusal.value.fatal


def test_deep_nesting_is_refused() -> None:
    for depth in (600, 5_000, 200_000):
        with pytest.raises(Refusal):
            decode(b"\x91" * depth + b"\xc0")
        with pytest.raises(Refusal):
            decode(b"\x81\xa1k" * depth + b"\xc0")


def test_trailing_bytes_are_refused() -> None:
    data = encode(Have(b"m", (1, 2)))
    with pytest.raises(Refusal, match="malformed msgpack"):
        decode(data + b"\xc0")


def test_a_frame_is_the_limit_both_ways() -> None:
    with pytest.raises(Refusal, match="over the frame limit"):
        decode(bytes(MAX_FRAME + 1))
    with pytest.raises(ValueError, match="over the frame limit"):
        encode(Chunk(b"m", 0, 0, bytes(MAX_FRAME)))
    part = bytes(MAX_FRAME - 64)
    assert decode(encode(Parts(b"m", (part,)))).parts == (part,)


def test_the_longest_lists_fit() -> None:
    have = Have(b"m" * 16, tuple(range(MANY)))
    assert decode(encode(have)) == have
    roster = Roster(1, tuple(RosterEntry(f"p{i}", ("/ip4/1.2.3.4/tcp/4001",), "n") for i in range(10_000)))
    assert decode(encode(roster)) == roster
    assert decode(encode(Hello(1, "r", "t" * MAX_TEXT, b"", (), "n", "a", ""))).ticket == "t" * MAX_TEXT


@pytest.mark.parametrize(("count", "addresses", "listed", "each"), [
    (3000, 1, 3000, 1),
    (250, 16, 250, 16),
    (1000, 16, 1000, 2),
    (9000, 16, 2383, 1),
])  # fmt: skip
def test_a_roster_fits_a_frame_whatever_its_members_say_of_themselves(count, addresses, listed, each) -> None:
    peer = Identity.from_seed(b"p" * 32).peer_id
    long = tuple(f"/dns4/{i:02d}{'a' * 248}" for i in range(addresses))
    roster = make_roster(7, [RosterEntry(peer, long if addresses > 1 else ("/ip4/1.2.3.4/tcp/4001",), "n" * 128)] * count)
    assert decode(encode(roster)) == roster
    assert (roster.epoch, len(roster.members), len(roster.members[0].addresses)) == (7, listed, each)


def test_requests_and_tokens_carry_what_they_were_made_of() -> None:
    asked = Generate("r", (1, 2**32 - 1), 5, (3,), 9, Version(1, 2), 0.7, 0.9, (4, 5), Version(1, 3))
    assert decode(_wrapped(asked)) == _unwrapped(asked)
    run = TokenEvent("r", 0, b"\1\0\0\0", b"\0\0\0\0", Version(1, 1), "", "")
    assert run.ids == (1,)
    assert run.whole and TokenEvent.of("r", 0, (1,), [0.0], Version(1, 1)) == run
    for name, half in (("packed_ids", b"\1\0\0"), ("packed_logprobs", b""), ("packed_ids", b"\1\0\0\0\2\0\0\0")):
        bad = msgspec.structs.replace(run, **{name: half})
        assert not bad.whole
        with pytest.raises(ValueError, match=r"request 'r': .* bytes of token ids with"):
            generation.Tokens((bad,))
        with pytest.raises(ValueError, match="bytes of token ids with"):
            Completion().add(bad)


def _wrapped(asked: Generate) -> bytes:
    return encode(generation.Assign((GenerateRequest.of(asked),)))


def _unwrapped(asked: Generate) -> generation.Assign:
    request = GenerateRequest.of(asked)
    assert request.generate() == asked
    return generation.Assign((request,))


@given(st.sets(st.integers(0, 3000), max_size=200))
def test_bitmaps_survive(chunks) -> None:
    assert list(members(bitmap(chunks))) == sorted(chunks)


def test_a_bitmap_is_bounded() -> None:
    with pytest.raises(Refusal, match="bitmap too long"):
        members(bytes(MAX_FRAME + 1))


def test_a_number_for_a_float_is_taken() -> None:
    wire = ["installed", [1, 1], b"", 1, 0, 0, 1, 1]
    assert decode(msgpack.packb(wire)) == Installed(Version(1, 1), b"", 1.0, 0.0, 0.0, 1, 1)


@pytest.mark.parametrize("first", [0xE0, 0xFF, 0xC0])
def test_a_number_that_looks_like_a_long_tag_is_refused(first: int) -> None:
    """Found by hypothesis: a byte above those of short texts was read as a text's length, and the reason could not be said."""
    with pytest.raises(Refusal, match="known tag") as raised:
        decode(bytes([0x91, first]) + GetCatalog.__struct_config__.tag.encode())
    assert raised.value.fatal
