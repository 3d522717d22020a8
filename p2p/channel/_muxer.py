"""Yamux as we use it: a reader that never waits for a write, and the straight way of `_hot`. Imported by `_stack` only."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import trio
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.stream_muxer.yamux.yamux import FLAG_ACK, FLAG_RST, TYPE_PING, TYPE_WINDOW_UPDATE, Yamux

from p2p.channel._hot import HotSession

_LATER = {(TYPE_PING, FLAG_ACK), (TYPE_WINDOW_UPDATE, FLAG_ACK), (TYPE_WINDOW_UPDATE, FLAG_RST)}
"""Frames that the reader of a connection writes in answer to the peer."""


class Muxer(Yamux):
    """Yamux whose reader never waits for a write. `parked` are the events that hot streams wait on: the library's own table of
    them may be cleared, or an entry replaced, before anybody has set it."""

    broken = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._write_lock: Any = trio.Semaphore(1, max_value=1)  # a lock could not be released by another task
        self.parked: set[trio.Event] = set()
        self.takers: dict[int, Callable[[bytes | memoryview], None]] = {}
        """number of a stream -> what is called with its data"""

    async def _write_frame(self, data: bytes) -> None:
        if len(data) == 12 and (data[1], data[3]) in _LATER and self._nursery is not None:
            self.beside(self._write_now, data)
        else:
            await self._write_now(data)

    def beside(self, write: Callable[[bytes], Awaitable[None]], data: bytes) -> None:
        """Write in a task of the connection's own. Nothing happens once it is over: its nursery takes no task then, and whoever
        reads or writes next finds out."""
        if self._nursery is not None:
            try:
                self._nursery.start_soon(write, data)
            except RuntimeError as error:  # what trio says of a nursery that is closed; it has no question to ask before
                logging.getLogger("shoal.channel").debug("frame not sent, the connection is over: %s", error)

    async def break_now(self) -> None:
        """Close the socket at once and wake every reader. `close` writes a farewell first, behind any write that is
        stuck, and when the reader task is cancelled in its own clean-up nobody wakes the streams' readers at all."""
        try:
            await self.secured_conn.close()
        finally:
            for stream in self.streams.values():
                stream.closed = stream.send_closed = stream.recv_closed = stream.reset_received = True
            self.broken = True
            for event in {*self.stream_events.values(), *self.parked}:
                event.set()

    def _finalize_stream_locked(self, stream: Any, *, fully_closed: bool) -> None:
        """As a connection ends, the library resets each of its streams: that forgets the event without setting it, and whoever
        reads the stream would wait for ever."""
        event = self.stream_events.get(stream.stream_id)
        if fully_closed:
            self.takers.pop(stream.stream_id, None)
        super()._finalize_stream_locked(stream, fully_closed=fully_closed)
        if fully_closed and event is not None:
            event.set()

    async def _cleanup_on_error(self) -> None:
        try:
            await super()._cleanup_on_error()
        finally:  # cancelled half-way it has told the streams nothing
            for event in set(self.parked):
                event.set()

    async def _write_now(self, data: bytes) -> None:
        lock = self._write_lock
        try:
            lock.acquire_nowait()  # a lock that is free costs a turn of the scheduler otherwise
        except trio.WouldBlock:
            await lock.acquire()
        try:
            await self.secured_conn.write(data)
        finally:
            lock.release()

    def try_write(self, data: bytes) -> bool:
        """Write `data` now, if nobody is writing: False when somebody is. What the socket does not take is written by a task of
        the connection's own, and nobody else writes before that. Raises ConnectionClosedError."""
        session: HotSession = self.secured_conn  # type: ignore[assignment]
        try:
            self._write_lock.acquire_nowait()
        except trio.WouldBlock:
            return False
        rest = memoryview(b"")
        try:
            if self._nursery is None:
                return False
            rest = session.begin(data)
            if rest:
                self._nursery.start_soon(self._finish, rest)
        except RuntimeError as error:  # the nursery is closed
            rest = memoryview(b"")
            raise ConnectionClosedError("the connection is over", transport="tcp") from error
        finally:
            if not rest:
                self._write_lock.release()
        return True

    async def _finish(self, rest: memoryview) -> None:
        """In a task of its own, as `_write_quietly`."""
        try:
            await self.secured_conn.finish(rest)  # type: ignore[attr-defined]
        except ConnectionClosedError as error:
            logging.getLogger("shoal.channel").debug("frame not sent: %s", error)
        finally:
            self._write_lock.release()

    async def _write_quietly(self, data: bytes) -> None:
        """In a task of its own: whoever reads or writes next finds out that the connection is gone."""
        try:
            await self._write_now(data)
        except ConnectionClosedError as error:
            logging.getLogger("shoal.channel").debug("window update not sent: %s", error)

    async def _read_data_body(self, length: int) -> bytes:
        if isinstance(self.secured_conn, HotSession):
            return await self.secured_conn.body(length)  # the channels' own watch ends a peer that falls silent
        return await super()._read_data_body(length)
