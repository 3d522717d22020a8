"""The local protocol between an agent and its engine's child process: typed messages, length-prefixed msgpack.

Must not know sockets or engines. Both ends are this program on one machine, so the checks here catch a mixed-up
installation or a broken pipe, not an adversary; lengths are still checked before anything is allocated.

    frame = length u32 little-endian | one msgpack value, an extension whose code says which message it is

Arguments and results are whatever the methods of `EngineCore` take and give, so their types do not follow from the message:
each value names its own by an extension code. The events, which are nearly all of the traffic, are one typed list.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import numpy as np

from node.engine.port import CommitResult, EngineStats, StateFile
from p2p.errors import Refusal
from p2p.layout import Layout
from p2p.protocol.rollout import Generate, TokenEvent
from p2p.protocol.wire import Record, encode_struct
from p2p.version import Version

MAX_LOCAL_FRAME = 64 << 20
"""The longest message is a tensor table: 65,536 rows with names of 512 bytes stay below 40 MiB."""

_LENGTH = struct.Struct("<I")


class Call(Record, frozen=True):
    """Agent to child: run `method` of the engine core."""

    id: int
    method: str
    args: tuple[Any, ...]


class Credit(Record, frozen=True):
    """Agent to child: `batches` more of the event batches that the child sent were taken."""

    batches: int


class Reply(Record, frozen=True):
    """What the call returned."""

    id: int
    value: Any


class CallRefused(Record, frozen=True):
    """The call raised this Refusal."""

    id: int
    refusal: Refusal


class Failed(Record, frozen=True):
    """The call raised something else; the child goes on."""

    id: int
    text: str


class Events(Record, frozen=True):
    """What one step made."""

    events: list[TokenEvent]


class Farewell(Record, frozen=True):
    """The child ends because of this; the last message."""

    text: str


Message = Call | Credit | Reply | CallRefused | Failed | Events | Farewell

_PATH, _LAYOUT, _REFUSAL, _WIDE, _FLOATS = range(1, 6)
"""Extension codes of the values that have a form of their own on the wire."""

_TYPED: dict[int, Any] = dict(enumerate((Credit, Failed, Farewell, Events, Version, EngineStats, CommitResult), 16))
"""Extension code -> type, of those that msgspec writes, reads and checks."""

_OPEN: dict[int, Any] = dict(enumerate((Call, Reply, CallRefused, Generate, StateFile), 32))
"""Extension code -> type, of those whose fields may be extensions again."""

_CODES = {kind: code for code, kind in (_TYPED | _OPEN).items()}
_READERS = {code: msgspec.msgpack.Decoder(kind).decode for code, kind in _TYPED.items()}


def _pack(value: Any) -> bytes:
    return msgpack.packb(value, default=_to_ext)


def _unpack(data: bytes) -> Any:
    return msgpack.unpackb(data, ext_hook=_from_ext, use_list=False, max_ext_len=MAX_LOCAL_FRAME)


def _to_ext(value: Any) -> msgpack.ExtType:
    code = _CODES.get(type(value), 0)
    if code in _TYPED:
        return msgpack.ExtType(code, encode_struct(value))
    if code in _OPEN:
        return msgpack.ExtType(code, _pack([getattr(value, name) for name in _OPEN[code].__match_args__]))
    match value:
        case Path():
            return msgpack.ExtType(_PATH, str(value).encode())
        case Layout():
            return msgpack.ExtType(_LAYOUT, _pack(value.to_wire()))
        case Refusal() as r:
            return msgpack.ExtType(_REFUSAL, _pack([r.reason, r.peer, r.version, r.chunk, r.fatal, r.cause]))
        case int():  # a seed may be wider than msgpack's integers
            return msgpack.ExtType(_WIDE, str(value).encode())
        case np.ndarray():
            return msgpack.ExtType(_FLOATS, value.astype("<f4").tobytes())
    raise TypeError(f"{type(value).__name__} does not cross to the engine process")


def _from_ext(code: int, data: bytes) -> Any:
    if code in _READERS:
        return _READERS[code](data)
    if code in _OPEN:
        kind, values = _OPEN[code], _unpack(data)
        return msgspec.convert(values, kind) if issubclass(kind, Record) else kind(*values)
    if code == _PATH:
        return Path(data.decode())
    if code == _LAYOUT:
        return Layout.from_wire([[name, dtype, list(shape)] for name, dtype, shape in _unpack(data)])
    if code == _REFUSAL:
        reason, peer, version, chunk, fatal, cause = _unpack(data)
        return Refusal(reason, peer=peer, version=version, chunk=chunk, fatal=fatal, cause=cause)
    if code == _WIDE:
        return int(data)
    if code == _FLOATS:
        return np.frombuffer(data, "<f4")
    raise ValueError(f"unknown extension {code}")


def encode(message: Message) -> bytes:
    """One frame. ValueError when it is over MAX_LOCAL_FRAME, TypeError on a value that has no wire form."""
    data = _pack(message)
    if len(data) > MAX_LOCAL_FRAME:
        raise ValueError(f"message of {len(data)} bytes is over {MAX_LOCAL_FRAME}")
    return _LENGTH.pack(len(data)) + data


def decode(data: bytes) -> Message:
    """The message in one frame's body. ValueError, and nothing else, on any other bytes."""
    try:
        found = _unpack(data)
    except (TypeError, RecursionError, msgpack.UnpackException, Refusal) as error:
        raise ValueError(f"not a message of the engine protocol: {type(error).__name__}: {error}"[:300]) from error
    if not isinstance(found, Message):
        raise ValueError(f"not a message of the engine protocol: {type(found).__name__}")
    return found


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
