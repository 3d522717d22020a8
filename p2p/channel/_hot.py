"""The hot path of a libp2p connection: frames of open streams between a TCP socket and their streams, past the layers.

py-libp2p 0.8.1 takes some nine locks, forty log lines and a task switch a layer for every frame, which is most of the time
of a busy peer. Here the same bytes (Noise records, yamux frames) take a straight way; everything but plain data and window
updates of open streams (opening, closing, pings, errors) is left to the library. What trio runs between two awaits is
atomic, so the library's locks, which it holds over no await, are not needed for that. Imported by `_stack` only.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import trio
from libp2p.io.exceptions import ConnectionClosedError, IncompleteReadError
from libp2p.stream_muxer.yamux.yamux import (
    DEFAULT_WINDOW_SIZE,
    HEADER_SIZE,
    MAX_MESSAGE_SIZE,
    TYPE_DATA,
    TYPE_WINDOW_UPDATE,
    YAMUX_HEADER_FORMAT,
)

from p2p.allowance.meter import HostMeter
from p2p.limits import CHANNEL_WINDOW, KIB

READ_AHEAD = 256 * KIB
"""Bytes asked of the socket at once: four Noise records, so that a busy connection takes one system call for several frames."""

SMALL_READ = 4 * KIB
"""Bytes: for a rest of a record shorter than this the kernel is not told to wait (SO_RCVLOWAT); it comes with the next packet."""

UNSENT = 64 * KIB
"""Bytes that the kernel takes before they can leave (trio sets 16 KiB): a whole Noise record, so that writing one is one call.
What the pump sends is paced, so this is not a queue that anything waits in."""

RECEIVE_WINDOW = 1024 * KIB
"""Bytes that the other side may have under way to us from the beginning. Linux starts at 64 KiB, the length of one record: when
half a record has come, the sender waits a round trip to send the rest. SO_RCVBUF would set it too, but stops its growth."""

RETRY_MS = 1000
"""Milliseconds between two retransmissions of a connection that hears nothing, at most. TCP by itself doubles its pauses, so
after an outage a connection could stay silent for as long again as the outage lasted."""

_TCP_RTO_MAX_MS = 44
"""The number of a socket option of Linux 6.15, for which Python has no name yet."""

RECORD = 65535 - 16
"""Plain bytes of one Noise record."""

WINDOW = 2 * CHANNEL_WINDOW
"""Bytes of every stream's yamux window. A channel's own credits are smaller, so a writer never waits for yamux, which gives up
after 5 s."""

_HEADER = struct.Struct(YAMUX_HEADER_FORMAT)


class HotSession:
    """Takes the place of a libp2p SecureSession under a muxer. Attributes that it lacks are those of the session."""

    def __init__(
        self, secure: Any, stream: trio.SocketStream, congestion: str = "", meter: HostMeter | None = None
    ) -> None:
        self._secure, self._stream, self._socket = secure, stream, stream.socket
        self._meter = meter or HostMeter()
        self._noise = secure.conn
        self._sealed = bytearray()  # from the socket
        self._plain = bytearray(secure._drain(None))  # decrypted, not yet taken
        self._low = 1
        self._drained = False
        """the last read left nothing in the socket"""
        self.muxer: Any = None
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT)
        # What the first leaves behind is room for so much, which still grows by itself.
        for low in (RECEIVE_WINDOW, 1) if not self._meter.down.rate else ():
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low)
        with suppress(OSError):  # an older kernel
            stream.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, RETRY_MS)
        if congestion:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._secure, name)

    async def write(self, data: bytes) -> None:
        """Write `data`, encrypted; the caller holds the muxer's write lock. Waits only when the socket does not take all of
        it."""
        await self.finish(self.begin(data))

    def begin(self, data: bytes) -> memoryview:
        """Write as much of `data`, encrypted, as the socket takes now; what is left has to go to `finish` before anything else is
        written."""
        sealed = self._seal(data)
        try:
            taken = os.write(self._socket.fileno(), sealed)
        except BlockingIOError:
            taken = 0
        except OSError as error:
            if self._socket.fileno() < 0:  # closed here: the library takes that for written
                return memoryview(b"")
            raise ConnectionClosedError(f"TCP connection reset by remote peer: {error}", transport="tcp") from error
        return memoryview(sealed)[taken:]

    async def finish(self, rest: memoryview) -> None:
        """Write what `begin` left."""
        if rest:
            try:
                await self._stream.send_all(rest)
            except trio.BrokenResourceError as error:
                raise ConnectionClosedError(f"TCP connection reset by remote peer: {error}", transport="tcp") from error
            except trio.ClosedResourceError:
                return

    def _seal(self, data: bytes) -> bytes:
        if len(data) <= RECORD:
            sealed = self._noise.encrypt(data)
            return len(sealed).to_bytes(2, "big") + sealed
        return b"".join(self._seal(data[start : start + RECORD]) for start in range(0, len(data), RECORD))

    async def read(self, n: int | None = None) -> bytes:
        """The next frame header that the muxer must handle itself; data and window updates of open streams are handled here."""
        if n != HEADER_SIZE:
            return await self.body(1 if n is None else n)
        plain = self._plain
        while True:
            await self._plain_bytes(HEADER_SIZE)
            version, kind, flags, number, length = _HEADER.unpack_from(plain)
            stream = None if flags or version else self.muxer.streams.get(number)
            if stream is None or (length > MAX_MESSAGE_SIZE and kind == TYPE_DATA):
                return await self.body(HEADER_SIZE)
            if kind == TYPE_DATA:
                del plain[:HEADER_SIZE]
                data = await self.body(length)
                buffer = self.muxer.stream_buffers.get(number)
                if buffer is not None:
                    stream.recv_window = max(stream.recv_window - length, 0)
                    take = self.muxer.takers.get(number)
                    if take is not None and not buffer:
                        take(data)
                    else:
                        buffer += data
                        self.muxer.stream_events[number].set()
            elif kind == TYPE_WINDOW_UPDATE:
                del plain[:HEADER_SIZE]
                stream.send_window += length
            else:
                return await self.body(HEADER_SIZE)

    async def body(self, n: int) -> bytes:
        """Exactly `n` plain bytes. Raises what the library's `read_exactly` raises."""
        plain = self._plain
        if len(plain) < n:
            if not plain:
                record = await self._record(n)
                if len(record) == n:
                    return record
                plain += record
            await self._plain_bytes(n)
        if len(plain) == n:
            data = bytes(plain)
            plain.clear()
            return data
        data = bytes(memoryview(plain)[:n])
        del plain[:n]
        return data

    async def _plain_bytes(self, n: int) -> None:
        """Read until at least `n` decrypted bytes are buffered."""
        plain = self._plain
        while len(plain) < n:
            plain += await self._record(n - len(plain))

    async def _record(self, wanted: int) -> bytes:
        sealed = self._sealed
        if len(sealed) < 2:
            await self._fill(2, wanted)
        size = 2 + int.from_bytes(sealed[:2], "big")
        if len(sealed) < size:
            await self._fill(size, wanted)
        if len(sealed) == size:
            record = bytes(memoryview(sealed)[2:])
            sealed.clear()
        else:
            record = bytes(memoryview(sealed)[2:size])
            del sealed[:size]
        return self._noise.decrypt(record)

    async def _fill(self, size: int, wanted: int) -> None:
        """Read until at least `size` sealed bytes are buffered. For a long record, in many packets, the kernel wakes us once."""
        while len(self._sealed) < size:
            missing = size - len(self._sealed)
            limited = bool(self._meter.down.rate)
            low = missing if missing > SMALL_READ and not limited else 1
            try:
                if low != self._low:
                    self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low)
                    self._low = low
                if limited:
                    data = await self._read_slowly()
                    if data is None:
                        continue
                elif low > 1 or self._drained:  # a try that finds nothing costs as much as the wait
                    await trio.lowlevel.wait_readable(self._socket)  # type: ignore[arg-type]
                    try:
                        data = os.read(self._socket.fileno(), READ_AHEAD)
                    except BlockingIOError:
                        continue
                else:
                    data = await self._socket.recv(READ_AHEAD)
                self._drained = len(data) < READ_AHEAD
            except trio.ClosedResourceError:
                data = b""
            except OSError as error:
                raise ConnectionClosedError(f"TCP connection reset by remote peer: {error}", transport="tcp") from error
            if not data:
                raise IncompleteReadError("connection closed", expected_bytes=wanted, received_bytes=len(self._sealed))
            self._sealed += data

    async def _read_slowly(self) -> bytes | None:
        """What is there, as far as the host's limit allows now; None for nothing after all."""
        await trio.lowlevel.wait_readable(self._socket)  # type: ignore[arg-type]
        allowed = await self._meter.may_read(READ_AHEAD)
        data: bytes | None = None
        try:
            data = os.read(self._socket.fileno(), allowed)
        except BlockingIOError:
            pass
        finally:
            self._meter.read(allowed, len(data or b""))
        return data


class HotStream:
    """Reads and writes one yamux stream of a muxer over a HotSession."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream  # libp2p's NetStream
        self._yamux = stream.muxed_stream
        self._muxer = self._yamux.conn
        self._deaf = False
        self._consumed = WINDOW - DEFAULT_WINDOW_SIZE  # the window starts smaller than we let it be
        self._grant(0)

    async def write(self, data: bytes) -> None:
        """Write `data` to the stream, as one frame where its window has room, else by the library."""
        yamux = self._yamux
        size = len(data)
        if yamux.send_closed or yamux.closed or yamux.send_window < size or size > MAX_MESSAGE_SIZE:
            await self._stream.write(data)
            return
        yamux.send_window -= size
        await self._muxer._write_frame(_HEADER.pack(0, TYPE_DATA, 0, yamux.stream_id, size) + data)

    def try_write(self, data: bytes) -> bool:
        """Write `data` without waiting, if nobody else is writing. Raises the library's exceptions."""
        yamux = self._yamux
        size = len(data)
        if yamux.send_closed or yamux.closed or yamux.send_window < size or size > MAX_MESSAGE_SIZE:
            return False
        if not self._muxer.try_write(_HEADER.pack(0, TYPE_DATA, 0, yamux.stream_id, size) + data):
            return False
        yamux.send_window -= size
        return True

    def on_data(self, take: Callable[[bytes | memoryview], None] | None) -> None:
        """See `ByteTransport.on_data`."""
        number, muxer = self._yamux.stream_id, self._muxer
        if take is None:
            self._deaf = True
            muxer.takers.pop(number, None)
            event = muxer.stream_events.get(number)
            if event is not None:
                event.set()
        elif number in muxer.streams:

            def taken(data: bytes | memoryview) -> None:
                take(data)
                self._grant(len(data))

            muxer.takers[number] = taken

    async def read(self, max_bytes: int) -> bytes:
        """The bytes that have arrived, at least one and at most `max_bytes`. Raises the library's exceptions at the end."""
        yamux, muxer = self._yamux, self._muxer
        while not self._deaf:
            buffer = muxer.stream_buffers.get(yamux.stream_id)
            if buffer:
                data = bytes(memoryview(buffer)[:max_bytes])
                del buffer[: len(data)]
                self._grant(len(data))
                return data
            if muxer.broken:
                raise ConnectionClosedError("broken here", transport="tcp")
            over = yamux.recv_closed or yamux.reset_received or yamux.closed or muxer.event_shutting_down.is_set()
            event = muxer.stream_events.get(yamux.stream_id)
            if buffer is None or over or event is None:
                return await self._stream.read(max_bytes)
            muxer.parked.add(event)
            try:
                await event.wait()
            finally:
                muxer.parked.discard(event)
            if muxer.stream_events.get(yamux.stream_id) is event:
                muxer.stream_events[yamux.stream_id] = trio.Event()
        return b""

    def _grant(self, size: int) -> None:
        """Give the window of `size` read bytes back, by a task of its own: a reader must never wait for a write."""
        self._consumed += size
        if self._consumed >= WINDOW // 8 and self._muxer._nursery is not None:
            self._yamux.recv_window += self._consumed
            frame = _HEADER.pack(0, TYPE_WINDOW_UPDATE, 0, self._yamux.stream_id, self._consumed)
            self._consumed = 0
            self._muxer.beside(self._muxer._write_quietly, frame)
