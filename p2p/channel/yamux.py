"""One yamux stream of libp2p as a `ByteTransport`, and the closing of broken connections. Must not know peers or channels.

libp2p is imported inside functions only: it is slow to import and configures logging.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Awaitable, Callable
from typing import Any

import trio

from p2p.channel.port import PathState

log = logging.getLogger("shoal.channel")


@functools.cache
def load_stack() -> Any:
    """The module p2p.channel._stack, which imports libp2p and patches it; imported at the first call."""
    from p2p.channel import _stack

    return _stack


class YamuxTransport:
    """A ByteTransport over one yamux stream."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._hot = load_stack().hot(stream)
        self._way = self._hot or stream
        self._eof, self._broken = load_stack().stream_eof, False
        self._socket = load_stack().socket_of(stream.swarm_conn)

    async def write(self, data: bytes) -> None:
        """See `ByteTransport.write`."""
        try:
            await self._way.write(data)
        except Exception as error:  # libp2p has a dozen unrelated classes for one fact
            raise trio.BrokenResourceError(cause_of(error)) from error
        if self._broken:  # a write to a socket that we closed ourselves returns as if all were well
            raise trio.ClosedResourceError("broken here")

    def try_write(self, data: bytes) -> bool:
        """See `ByteTransport.try_write`."""
        if self._hot is None:
            return False
        if self._broken:
            raise trio.ClosedResourceError("broken here")
        try:
            return bool(self._hot.try_write(data))
        except Exception as error:
            raise trio.BrokenResourceError(cause_of(error)) from error

    def on_data(self, take: Callable[[bytes | memoryview], None] | None) -> None:
        """See `ByteTransport.on_data`."""
        if self._hot is not None:
            self._hot.on_data(take)

    async def read(self, max_bytes: int) -> bytes:
        """See `ByteTransport.read`."""
        try:
            return await self._way.read(max_bytes)
        except self._eof:
            return b""
        except Exception as error:
            raise trio.BrokenResourceError(cause_of(error)) from error

    async def aclose(self) -> None:
        await quietly(self._stream.close)

    def path(self) -> PathState | None:
        return load_stack().path_of(self._socket) if self._socket is not None else None

    def remote(self) -> str:
        return str(load_stack().remote_of(self._stream.swarm_conn))

    def local(self) -> str:
        return str(load_stack().local_of(self._stream.swarm_conn))

    def smooth(self, rate: float) -> None:
        if self._socket is not None:
            load_stack().smooth(self._socket, rate)

    async def abort(self) -> None:
        self._broken = True
        await break_connection(self._stream.swarm_conn)


async def break_connection(connection: Any) -> None:
    """Close the socket under a libp2p connection at once; the library then cleans up by itself."""
    with trio.CancelScope(shield=True):
        await quietly(connection.muxed_conn.break_now)


async def quietly(call: Callable[[], Awaitable[None]]) -> None:
    """Await `call`, which closes or resets something; a failure is only logged, since it may be broken already."""
    try:
        await call()
    except Exception as error:  # closing what is broken already
        log.debug("while closing: %s", cause_of(error))


def cause_of(error: BaseException) -> str:
    """The text of the innermost exception: libp2p wraps it in several layers without text."""
    text, inner = str(error), error
    while True:
        group = isinstance(inner, BaseExceptionGroup)
        following = inner.exceptions[0] if group else inner.__cause__ or inner.__context__  # type: ignore[attr-defined]
        if following is None:
            known = isinstance(inner, OSError) and inner.errno  # "Connection refused", without address and number
            return os.strerror(known) if known else text or "the stream was closed"
        inner = following
        text = str(inner) or text
