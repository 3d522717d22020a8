"""The local protocol: what goes in comes out, however the bytes are cut; the rest is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from node.engine.pipe import (
    MAX_LOCAL_FRAME,
    Call,
    CallRefused,
    Credit,
    Events,
    Failed,
    Farewell,
    PipeDecoder,
    Reply,
    decode,
    encode,
)
from node.engine.port import CommitResult, EngineStats, StateFile
from p2p.layout import Layout
from p2p.protocol.rollout import Generate, TokenEvent
from p2p.version import Version

V = Version(2, 7)
STATE = StateFile(Path("/x/state"), Layout.build([("b", "float32", (2, 3)), ("a", "bfloat16", ())]), V, ("a",))
MESSAGES: list[Any] = [
    Call(1, "load", (Path("/model"), STATE)),
    Call(2, "add", (Generate("r", (1, 2), 9, (0,), -(2**60), V, 0.5, 0.9, (4,)),)),
    Call(2, "add", (Generate("r", (1,), 9, (), 0, V, exact_version=V),)),
    Call(3, "interrupt", (None,)),
    Call(4, "interrupt", (["a", "b"],)),
    Credit(7),
    Reply(5, "stats", EngineStats(1, 2, 3, 4.5, 6, V, 7)),
    Reply(6, "commit", CommitResult(V, 0.25, 0.125)),
    Reply(7, "add", None),
    Failed(8, "boom"),
    Farewell("gone"),
]


@given(cut=st.integers(1, 40))
def test_round_trip_in_any_pieces(cut: int) -> None:
    data = b"".join(encode(m) for m in MESSAGES)
    decoder = PipeDecoder()
    out = [m for at in range(0, len(data), cut) for m in decoder.feed(data[at : at + cut])]
    assert out == MESSAGES


def test_events_arrays_and_refusals_round_trip() -> None:
    events = [
        TokenEvent.of("r", 3, (7, 8), np.array([-0.5, -1.25], np.float32), V),
        TokenEvent.of("s", 5, (), np.empty(0, np.float32), Version(0, 0), "error", "why"),
        TokenEvent.of("t", 5, (), np.empty(0, np.float32), V, "interrupt"),
    ]
    refused = CallRefused(3, "too old", V, "past")
    got = list(PipeDecoder().feed(encode(Events(events)) + encode(refused) + encode(Reply(4, "score", np.ones(3)))))
    assert got[:2] == [Events(events), refused]
    assert got[2].value.tolist() == [1.0, 1.0, 1.0]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "frame",
    [
        (MAX_LOCAL_FRAME + 1).to_bytes(4, "little"),
        b"\x01\0\0\0\xc1",
        (6).to_bytes(4, "little") + msgpack.packb(["what?"])[:6].ljust(6, b"\0"),
        (1).to_bytes(4, "little") + msgpack.packb(3),
        encode(Call(1, "stats", ("unexpected",))),
        encode(Reply(1, "commit", EngineStats(1, 2, 3, 4.5, 6, V, 7))),
    ],
)
def test_what_is_not_a_message_is_an_error(frame: bytes) -> None:
    with pytest.raises(ValueError):
        list(PipeDecoder().feed(frame))


def test_a_value_without_a_wire_form_is_an_error() -> None:
    with pytest.raises(TypeError, match="object does not cross"):
        encode(Reply(1, "stats", object()))


def read(body: bytes) -> None:
    """Decode it; anything but a message or a ValueError is a fault."""
    try:
        decode(body)
    except ValueError:
        pass


@settings(max_examples=300)
@given(st.binary(max_size=120))
@example(b"\x91" * 10_000)
@example(b"\xc7\xff\x01")
@example(msgpack.packb(["events", [[1]]]))  # events that are none
@example(msgpack.packb(["call", 1, 2, []]))  # a call whose method is a number
@example(msgpack.packb(["call", 1, "add", [{"request_id": "r"}]]))  # a request that lacks the rest
@example(msgpack.packb(["call", 1, "load", [3, {}]]))  # a folder that is a number
@example(msgpack.packb(["call", 1, "stats", [4]]))  # an argument too many
@example(msgpack.packb(["refused", 1, "no"]))  # a refusal that is too short
@example(msgpack.packb(["reply", 1, "score", b"nine"]))  # no whole float
def test_arbitrary_bytes_are_a_message_or_a_value_error(body: bytes) -> None:
    read(body)


@settings(max_examples=300)
@given(st.sampled_from([*MESSAGES, Events([TokenEvent.of("r", 3, (7, 8), (-0.5, -1.25), V)])]), st.data())
def test_a_damaged_message_is_a_message_or_a_value_error(message: Any, data: st.DataObject) -> None:
    body = bytearray(encode(message)[4:])
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    read(bytes(body))
