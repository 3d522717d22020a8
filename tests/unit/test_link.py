"""The framing and credits core, fuzzed: events or a Refusal, never more than a frame held."""

from __future__ import annotations

import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p.channel.link import CLOSE, CREDIT, DATA, HEADER, KEEPALIVE, Alive, Closed, Granted, LinkCore, ReceivedMessage, cost_of
from p2p.errors import Refusal
from p2p.limits import CHANNEL_WINDOW, MAX_FRAME


def frame(kind: int, body: bytes, length: int | None = None) -> bytes:
    return HEADER.pack(len(body) if length is None else length, kind) + body


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


plausible = st.lists(
    st.one_of(
        st.binary(max_size=20),
        st.builds(frame, st.integers(0, 5), st.binary(max_size=40)),
        st.builds(frame, st.integers(0, 3), st.binary(max_size=8), st.integers(0, 2**32 - 1)),
    ),
    max_size=12,
).map(b"".join)


@given(plausible, st.lists(st.integers(0, 400), max_size=20))
def test_arbitrary_bytes_in_arbitrary_splits(data: bytes, cuts: list[int]) -> None:
    def run(pieces: list[bytes]) -> list[object]:
        core, seen = LinkCore("eve"), []
        for piece in pieces:
            try:
                for event in core.feed(piece):
                    seen.append(event)
            except Refusal as refusal:
                assert refusal.fatal
                assert refusal.peer == "eve"
                with pytest.raises(Refusal):
                    list(core.feed(b"\0"))
                return [*seen, refusal.reason]
            assert core.buffered <= HEADER.size + MAX_FRAME
        return seen

    assert run(split(data, cuts)) == run([data])


@given(st.lists(st.binary(max_size=300), max_size=30), st.lists(st.integers(0, 9000), max_size=30))
def test_what_is_sent_arrives(messages: list[bytes], cuts: list[int]) -> None:
    sender, receiver = LinkCore(), LinkCore()
    wire = b"".join(sender.data_header(len(message)) + message for message in messages)
    wire += sender.keepalive_frame() + sender.close_frame("done")
    events = [event for piece in split(wire, cuts) for event in receiver.feed(piece)]
    assert events == [*map(ReceivedMessage, messages), Alive(), Closed("done")]
    for message in messages:
        receiver.consumed(len(message))
    total = sum(cost_of(len(message)) for message in messages)
    assert receiver.ungranted == total
    left = CHANNEL_WINDOW - total - cost_of(0)
    assert sender.has_credit(left) and not sender.has_credit(left + 1)
    assert list(sender.feed(receiver.grant_frame())) == ([Granted(total)] if total else [])
    assert receiver.ungranted == 0 and sender.has_credit(CHANNEL_WINDOW - cost_of(0))
    assert receiver.grant_frame() == b""


def test_oversized_is_refused_at_its_header() -> None:
    core = LinkCore()
    with pytest.raises(Refusal, match=f"{MAX_FRAME + 1} bytes is over the limit of {MAX_FRAME}"):
        list(core.feed(HEADER.pack(MAX_FRAME + 1, DATA)))
    assert core.buffered == 0


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (frame(CREDIT, struct.pack("!I", 1)), "a grant of 1 bytes with 0 outstanding"),
        (frame(CREDIT, b"\0\0\0\0"), "a grant of 0"),
        (frame(CREDIT, b"", 1 << 20), "a credit frame of 1048576 bytes"),
        (frame(KEEPALIVE, b"x"), "a keepalive frame of 1"),
        (frame(CLOSE, b"", 1025), "a close frame of 1025"),
        (frame(9, b""), "unknown frame type 9"),
    ],
)
def test_malformed_frames_are_refused(bad: bytes, reason: str) -> None:
    with pytest.raises(Refusal, match=reason):
        list(LinkCore().feed(bad))


def test_credits_bound_what_a_peer_can_send_even_in_empty_messages() -> None:
    core, got = LinkCore(), 0
    with pytest.raises(Refusal, match="credits overrun"):
        for _ in range(CHANNEL_WINDOW):
            got += len(list(core.feed(frame(DATA, b""))))
    assert got == CHANNEL_WINDOW // cost_of(0)


def test_a_stranger_is_given_less_than_it_thinks() -> None:
    core = LinkCore(window=10_000)
    core.restrict(1000)
    list(core.feed(frame(DATA, bytes(900))))
    core.restrict(10_000)
    list(core.feed(frame(DATA, bytes(900))))
    core.restrict(1000)
    with pytest.raises(Refusal, match="credits overrun: a message of 0 bytes with 1928 of 1000 outstanding"):
        list(core.feed(frame(DATA, b"")))


def test_consuming_without_granting_gives_nothing_back() -> None:
    core = LinkCore(window=1000)
    list(core.feed(frame(DATA, bytes(900))))
    core.consumed(900)
    with pytest.raises(Refusal, match="credits overrun"):
        list(core.feed(frame(DATA, bytes(900))))


def test_sending_needs_credit() -> None:
    core = LinkCore(window=cost_of(100))
    core.data_header(100)
    assert not core.has_credit(0)
    with pytest.raises(ValueError, match="no credit"):
        core.data_header(0)
    with pytest.raises(ValueError, match="over the limit"):
        core.data_header(MAX_FRAME + 1)
