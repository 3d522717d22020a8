"""The local protocol between an agent and its engine's child process: typed messages, length-prefixed msgpack.

Must not know sockets or engines. Both ends are this program on one machine, so the checks here catch a mixed-up
installation or a broken pipe, not an adversary; lengths are still checked before anything is allocated.

    frame = length u32 little-endian | msgpack [kind, ...]

Arguments and results are whatever the methods of `EngineCore` take and give, so their types do not follow from the message:
each value names its own by an extension code. The events, which are nearly all of the traffic, are one typed list.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import numpy as np

from node.engine.port import CommitResult, EngineStats, StateFile
from p2p.errors import Refusal
from p2p.layout import Layout
from p2p.protocol.rollout import Generate, TokenEvent
from p2p.protocol.wire import encode_struct
from p2p.version import Version

MAX_LOCAL_FRAME = 64 << 20
"""The longest message is a tensor table: 65,536 rows with names of 512 bytes stay below 40 MiB."""

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Call:
    """Agent to child: run `method` of the engine core."""

    id: int
    method: str
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Credit:
    """Agent to child: `batches` more of the event batches that the child sent were taken."""

    batches: int


@dataclass(frozen=True, slots=True)
class Reply:
    id: int
    value: Any


@dataclass(frozen=True, slots=True)
class CallRefused:
    """The call raised this Refusal."""

    id: int
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class Failed:
    """The call raised something else; the child goes on."""

    id: int
    text: str


@dataclass(frozen=True, slots=True)
class Events:
    events: list[TokenEvent]


@dataclass(frozen=True, slots=True)
class Farewell:
    """The child ends because of this; the last message."""

    text: str


Message = Call | Credit | Reply | CallRefused | Failed | Events | Farewell

_PATH, _STATE, _GENERATE, _FLOATS = range(1, 5)
"""Extension codes of the values with a form of their own that may stand anywhere inside arguments and results."""

_EVENTS = 5
_TYPED: dict[int, Any] = {_EVENTS: list[TokenEvent], 6: Version, 7: EngineStats, 8: CommitResult}
"""Extension code -> type, of those that msgspec writes and checks."""

_CODES = {kind: code for code, kind in _TYPED.items() if isinstance(kind, type)}
_READERS = {code: msgspec.msgpack.Decoder(kind).decode for code, kind in _TYPED.items()}


def _pack(value: Any) -> bytes:
    return msgpack.packb(value, default=_to_ext)


def _unpack(data: bytes) -> Any:
    return msgpack.unpackb(data, ext_hook=_from_ext, use_list=False, max_ext_len=MAX_LOCAL_FRAME)


def _to_ext(value: Any) -> msgpack.ExtType:
    if type(value) in _CODES:
        return msgpack.ExtType(_CODES[type(value)], encode_struct(value))
    if isinstance(value, Path):
        return msgpack.ExtType(_PATH, str(value).encode())
    if isinstance(value, StateFile):
        return msgpack.ExtType(_STATE, _pack([value.path, value.layout.to_wire(), value.version, value.changed]))
    if isinstance(value, Generate):
        g = value
        fields = [g.request_id, g.prompt_ids, g.max_new_tokens, g.stop_ids, str(g.seed), g.min_version]
        return msgpack.ExtType(_GENERATE, _pack([*fields, g.temperature, g.top_p, g.prefix_ids, g.exact_version]))
    if isinstance(value, np.ndarray):
        return msgpack.ExtType(_FLOATS, value.astype("<f4").tobytes())
    raise TypeError(f"{type(value).__name__} does not cross to the engine process")


def _from_ext(code: int, data: bytes) -> Any:
    if code in _READERS:
        return _READERS[code](data)
    if code == _PATH:
        return Path(data.decode())
    if code == _STATE:
        path, table, version, changed = _unpack(data)
        layout = Layout.from_wire([[name, dtype, list(shape)] for name, dtype, shape in table])
        return StateFile(path, layout, version, changed)
    if code == _GENERATE:
        fields = list(_unpack(data))
        fields[4] = int(fields[4])  # text on the wire: a seed may be wider than msgpack's integers
        return Generate(*fields)
    if code == _FLOATS:
        return np.frombuffer(data, "<f4")
    raise ValueError(f"unknown extension {code}")


def encode(message: Message) -> bytes:
    """One frame. ValueError when it is over MAX_LOCAL_FRAME, TypeError on a value that has no wire form."""
    body: list[Any]
    match message:
        case Call(id, method, args):
            body = ["call", id, method, args]
        case Credit(batches):
            body = ["credit", batches]
        case Reply(id, value):
            body = ["reply", id, value]
        case CallRefused(id, r):
            body = ["refused", id, r.reason, r.peer, r.version, r.chunk, r.fatal, r.cause]
        case Failed(id, text):
            body = ["failed", id, text]
        case Events(events):
            body = ["events", msgpack.ExtType(_EVENTS, encode_struct(events))]
        case Farewell(text):
            body = ["farewell", text]
    data = _pack(body)
    if len(data) > MAX_LOCAL_FRAME:
        raise ValueError(f"message of {len(data)} bytes is over {MAX_LOCAL_FRAME}")
    return _LENGTH.pack(len(data)) + data


def decode(data: bytes) -> Message:
    """The message in one frame's body. ValueError, and nothing else, on any other bytes."""
    try:
        found = _unpack(data)
    except (TypeError, IndexError, RecursionError, msgpack.UnpackException, Refusal) as error:
        raise ValueError(f"not a message of the engine protocol: {type(error).__name__}: {error}"[:300]) from error
    match found:
        case ("events", [*events]):
            return Events(events)
        case ("call", int(id), str(method), tuple(args)):
            return Call(id, method, args)
        case ("credit", int(batches)):
            return Credit(batches)
        case ("reply", int(id), value):
            return Reply(id, value)
        case ("refused", int(id), reason, peer, version, chunk, fatal, cause):
            return CallRefused(id, Refusal(reason, peer=peer, version=version, chunk=chunk, fatal=fatal, cause=cause))
        case ("failed", int(id), str(text)):
            return Failed(id, text)
        case ("farewell", str(text)):
            return Farewell(text)
    raise ValueError("not a message of the engine protocol")


class Decoder:
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
