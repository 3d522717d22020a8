"""Segments of one version, decoded as they come, several at once. Must not know where they come from, nor where they go."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable

import trio

from p2p.layout import Segment

DECODERS = 4
"""Segments that are decoded at once, where there are so many cores; the engine needs some too."""


async def decode_as_they_come(
    segments: Iterable[Segment],
    receive: Callable[[int], Awaitable[bytes]],
    write: Callable[[Segment, bytes], Awaitable[object]],
) -> None:
    """`write` each segment with the payload that `receive` has for its index, in the order of arrival. Raises what the first of
    them raised that failed, once those under way are through: nothing writes any more by then."""
    room, failed = trio.Semaphore(min(DECODERS, len(os.sched_getaffinity(0)))), list[Exception]()

    async def one(segment: Segment, payload: bytes) -> None:
        try:
            await write(segment, payload)
        except Exception as error:
            failed.append(error)
        finally:
            room.release()

    async with trio.open_nursery() as nursery:
        for segment in segments:
            try:
                payload = await receive(segment.index)
            except Exception as error:
                failed.append(error)
            await room.acquire()
            if failed:
                break
            nursery.start_soon(one, segment, payload)
    if failed:
        raise failed[0]
