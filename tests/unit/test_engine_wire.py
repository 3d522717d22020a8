"""The local protocol: what goes in comes out, however the bytes are cut; the rest is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.engine.pipe import MAX_LOCAL_FRAME, Call, CallRefused, Credit, Decoder, Events, Failed, Farewell, Reply, encode
from node.engine.port import CommitResult, EngineStats, StateFile
from p2p.errors import Refusal
from p2p.layout import Layout
from p2p.protocol.rollout import Generate, TokenEvent
from p2p.version import Version

V = Version(2, 7)
STATE = StateFile(Path("/x/state"), Layout.build([("b", "float32", (2, 3)), ("a", "bfloat16", ())]), V, ("a",))
MESSAGES: list[Any] = [
    Call(1, "load", (Path("/model"), STATE)),
    Call(2, "add", (Generate("r", (1, 2), 9, (0,), -(2**90), V, 0.5, 0.9, (4,)),)),
    Call(2, "add", (Generate("r", (1,), 9, (), 0, V, exact_version=V),)),
    Call(3, "interrupt", (None,)),
    Call(4, "interrupt", (("a", "b"),)),
    Credit(7),
    Reply(5, EngineStats(1, 2, 3, 4.5, 6, V, 7)),
    Reply(6, CommitResult(V, 0.25, 0.125)),
    Reply(7, None),
    Failed(8, "boom"),
    Farewell("gone"),
]


@given(cut=st.integers(1, 40))
def test_round_trip_in_any_pieces(cut: int) -> None:
    data = b"".join(encode(m) for m in MESSAGES)
    decoder = Decoder()
    out = [m for at in range(0, len(data), cut) for m in decoder.feed(data[at : at + cut])]
    assert out == MESSAGES


def test_events_arrays_and_refusals_round_trip() -> None:
    events = [
        TokenEvent("r", 3, (7, 8), np.array([-0.5, -1.25], np.float32), V),
        TokenEvent("s", 5, (), np.empty(0, np.float32), Version(0, 0), "error", "why"),
        TokenEvent("t", 5, (), np.empty(0, np.float32), V, "interrupt", "", Version(1, 1), V),
    ]
    refusal = Refusal("too old", peer="p", version=V, chunk=4, fatal=True, cause="past")
    got = list(Decoder().feed(encode(Events(events)) + encode(CallRefused(3, refusal)) + encode(Reply(4, np.ones(3)))))
    for a, b in zip(got[0].events, events, strict=True):  # type: ignore[union-attr]
        assert (a.request_id, a.start, a.ids, a.version, a.finish, a.message, a.start_version, a.end_version) == (
            b.request_id, b.start, b.ids, b.version, b.finish, b.message, b.start_version, b.end_version,
        )  # fmt: skip
        assert a.logprobs.dtype == np.float32 and a.logprobs.tolist() == b.logprobs.tolist()
    assert str(got[1].refusal) == str(refusal) and got[1].refusal.fatal and got[1].refusal.cause == "past"  # type: ignore[union-attr]
    assert got[2].value.tolist() == [1.0, 1.0, 1.0]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "frame",
    [
        (MAX_LOCAL_FRAME + 1).to_bytes(4, "little"),
        b"\x01\0\0\0\xc1",
        (6).to_bytes(4, "little") + msgpack.packb(["what?"])[:6].ljust(6, b"\0"),
        (1).to_bytes(4, "little") + msgpack.packb(3),
    ],
)
def test_what_is_not_a_message_is_an_error(frame: bytes) -> None:
    with pytest.raises(ValueError):
        list(Decoder().feed(frame))


def test_a_value_without_a_wire_form_is_an_error() -> None:
    with pytest.raises(TypeError, match="object does not cross"):
        encode(Reply(1, object()))
