"""The local protocol between an agent and its engine's child process: typed messages, length-prefixed msgpack.

Must not know sockets or engines. Both ends are this program on one machine, so the checks here catch a mixed-up
installation or a broken pipe, not an adversary; lengths are still checked before anything is allocated.

    frame = length u32 little-endian | one msgpack list, which begins with its message's tag

Arguments and results are whatever the methods of `EngineCore` take and give: its annotations are their types on the wire.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import numpy as np

from node.engine.port import EngineCore
from p2p.protocol.rollout import TokenEvent
from p2p.protocol.wire import MALFORMED, Record
from p2p.version import Version

MAX_LOCAL_FRAME = 64 << 20
"""The longest message is a tensor table: 65,536 rows with names of 512 bytes stay below 40 MiB."""

_LENGTH = struct.Struct("<I")


class Call(Record, frozen=True, tag="call"):
    """Agent to child: run `method` of the engine core."""

    id: int
    method: str
    args: tuple[Any, ...]


class Credit(Record, frozen=True, tag="credit"):
    """Agent to child: `batches` more of the event batches that the child sent were taken."""

    batches: int


class Reply(Record, frozen=True, tag="reply"):
    """What the call of `method` returned."""

    id: int
    method: str
    value: Any


class CallRefused(Record, frozen=True, tag="refused"):
    """The call raised a Refusal, of which this is what an engine says."""

    id: int
    reason: str
    version: Version | None
    cause: str


class Failed(Record, frozen=True, tag="failed"):
    """The call raised something else; the child goes on."""

    id: int
    text: str


class Events(Record, frozen=True, tag="events"):
    """What one step made."""

    events: list[TokenEvent]


class Farewell(Record, frozen=True, tag="farewell"):
    """The child ends because of this; the last message."""

    text: str


Message = Call | Credit | Reply | CallRefused | Failed | Events | Farewell

METHODS = ("load", "add", "interrupt", "abort", "stage", "commit", "score", "stats")
"""Methods of EngineCore that the agent may call."""

_HINTS = {method: get_type_hints(getattr(EngineCore, method)) for method in METHODS}
_RESULTS = {method: hints.pop("return") for method, hints in _HINTS.items()}
_ARGUMENTS = {method: tuple[tuple(hints.values())] for method, hints in _HINTS.items()}  # type: ignore[misc]


def _to_plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, np.ndarray):
        return value.astype("<f4").tobytes()
    raise TypeError(f"{type(value).__name__} does not cross to the engine process")


def _from_plain(kind: type, value: Any) -> Any:
    return Path(value) if kind is Path else np.frombuffer(value, "<f4")


_encode = msgspec.msgpack.Encoder(enc_hook=_to_plain).encode
_decode = msgspec.msgpack.Decoder(Message, dec_hook=_from_plain).decode


def encode(message: Message) -> bytes:
    """One frame. ValueError when it is over MAX_LOCAL_FRAME, TypeError on a value that has no wire form."""
    data = _encode(message)
    if len(data) > MAX_LOCAL_FRAME:
        raise ValueError(f"message of {len(data)} bytes is over {MAX_LOCAL_FRAME}")
    return _LENGTH.pack(len(data)) + data


def decode(data: bytes) -> Message:
    """The message in one frame's body. ValueError, and nothing else, on any other bytes."""
    try:
        message = _decode(data)
        match message:
            case Call(id, method, args) if method in METHODS:
                return Call(id, method, msgspec.convert(args, _ARGUMENTS[method], dec_hook=_from_plain))
            case Reply(id, method, value) if method in METHODS:
                return Reply(id, method, msgspec.convert(value, _RESULTS[method], dec_hook=_from_plain))
    except MALFORMED as error:
        raise ValueError(f"not a message of the engine protocol: {type(error).__name__}: {error}"[:300]) from error
    return message


class PipeDecoder:
    """Bytes in, messages out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages completed by `data`. ValueError on a frame that is too long or malformed."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_LOCAL_FRAME:
                raise ValueError(f"frame of {length} bytes is over {MAX_LOCAL_FRAME}")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield decode(body)
