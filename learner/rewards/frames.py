"""Messages between us and a scoring process, over a socket. Must not know what they say."""

from __future__ import annotations

import os
import struct
from typing import Any, Protocol

import msgpack

MAX_FRAME = 8 << 20
"""Bytes of one message either way: a prompt and the completions of a group, generously."""


class Stream(Protocol):
    """What we use of a socket."""

    def sendall(self, data: bytes, /) -> None: ...
    def recv(self, size: int, /) -> bytes: ...


class PipeEnds:
    """Two descriptors as a stream: for who may not use sockets."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing

    def sendall(self, data: bytes, /) -> None:
        """All of it; OSError when nobody reads it any more."""
        view = memoryview(data)
        while view:
            view = view[os.write(self._writing, view) :]

    def recv(self, size: int, /) -> bytes:
        """Some of it; b"" at its end."""
        return os.read(self._reading, size)


def send_frame(sock: Stream, message: dict[str, Any]) -> None:
    """ValueError for a message over MAX_FRAME, or with values that cannot be sent, and nothing was sent."""
    try:
        data = msgpack.packb(message, unicode_errors="surrogatepass", default=_plain)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"it cannot be sent to the scoring process: {error}") from None
    if len(data) > MAX_FRAME:
        raise ValueError(f"{len(data)} bytes are too long to score")
    sock.sendall(struct.pack(">I", len(data)) + data)


def _plain(value: Any) -> Any:
    """What msgpack has no type for: arrays and their numbers as lists and numbers, anything else (a date, say) as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def receive_frame(sock: Stream) -> dict[str, Any]:
    """EOFError when the other side is gone; ValueError when it sends no message of ours."""
    (size,) = struct.unpack(">I", _read(sock, 4))
    if size > MAX_FRAME:
        raise ValueError(f"a frame of {size} bytes")
    message = msgpack.unpackb(_read(sock, size), unicode_errors="surrogatepass", strict_map_key=False)
    if not isinstance(message, dict):
        raise ValueError("not a message")
    return message


def _read(sock: Stream, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            raise EOFError("the other side closed the socket")
        data += piece
    return bytes(data)
