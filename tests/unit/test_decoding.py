"""Segments of a version, decoded several at once: all of them, or the first thing that went wrong."""

from __future__ import annotations

import pytest
import trio

from node.install.decoding import DECODERS, decode_as_they_come
from p2p.errors import Refusal, ShoalError
from p2p.layout import Segment

SEGMENTS = [Segment(i, 64 * i, 64 * (i + 1), 2) for i in range(20)]


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)))


async def test_each_is_written_once_and_few_at_a_time(autojump_clock) -> None:
    written, now, most = [], 0, 0

    async def receive(index: int) -> bytes:
        await trio.sleep(0.1)
        return bytes([index])

    async def write(segment: Segment, payload: bytes) -> None:
        nonlocal now, most
        now, most = now + 1, max(most, now + 1)
        await trio.sleep(1.0)
        now -= 1
        written.append((segment.index, payload[0]))

    began = trio.current_time()
    await decode_as_they_come(SEGMENTS, receive, write)
    assert sorted(written) == [(i, i) for i in range(20)] and most == DECODERS
    assert trio.current_time() - began < 20 * 1.0 / DECODERS + 1


@pytest.mark.parametrize("where", ["receive", "write"])
async def test_the_first_error_comes_out_as_it_was_and_nothing_writes_any_more(autojump_clock, where) -> None:
    under_way, begun = set(), []

    async def receive(index: int) -> bytes:
        await trio.sleep(0.1)
        if where == "receive" and index == 7:
            raise ShoalError("no chunk from any peer")
        return b""

    async def write(segment: Segment, payload: bytes) -> None:
        begun.append(segment.index)
        under_way.add(segment.index)
        await trio.sleep(0.25)
        under_way.discard(segment.index)
        if where == "write" and segment.index in (7, 8):
            raise Refusal(f"segment {segment.index}: corrupt")

    with pytest.raises(ShoalError, match="no chunk from any peer" if where == "receive" else "segment 7: corrupt"):
        await decode_as_they_come(SEGMENTS, receive, write)
    assert not under_way and max(begun) < 7 + 2 * DECODERS


async def test_who_is_cancelled_leaves_nothing_running(autojump_clock) -> None:
    ended = []

    async def receive(index: int) -> bytes:
        return b""

    async def write(segment: Segment, payload: bytes) -> None:
        try:
            await trio.sleep_forever()
        finally:
            ended.append(segment.index)

    with trio.move_on_after(1):
        await decode_as_they_come(SEGMENTS, receive, write)
    assert sorted(ended) == list(range(DECODERS))
