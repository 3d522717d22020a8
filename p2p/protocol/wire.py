"""Typed messages to msgpack and back, with hard limits. Sans-IO. Must not know what any message means.

A message is a frozen struct with a tag; on the wire it is `[tag, field, field, ...]`. Its fields are annotated with the bounded
types below, and msgspec checks them while it reads, so a handler never sees a value of the wrong type, a negative count or a
text that is too long. Anything else is a Refusal that names the message and the field. It is always fatal: the connection
that it came over is dropped.

Refused before the first byte is read: more than MAX_FRAME bytes. Refused while reading: what is not msgpack, bytes after the
message, a tag that this end does not take (`Decoder.kinds`), more or fewer fields than the message has, a value of another
type (True is no integer, a text is no number), and a value outside the bounds of its type:

    type        on the wire      refused
    Text        text             over 65,536 characters; bytes that are not UTF-8
    Name        text             over 256 characters; bytes that are not UTF-8
    Line        text             over 4,096 characters; bytes that are not UTF-8
    Blob        bytes            over MAX_FRAME, which the message around it has passed already
    Digest      bytes            over 64
    Count       integer          below 0, or 2**64 and above
    Real        float, integer   not a number, infinite
    Rate        float, integer   what is refused of a Real; below 0
    bool        boolean
    Version     [epoch, step]    what is refused of a Count
    Row[X]      list             over 65,536 entries; what is refused of an X
    Many[X]     list             over 8,192 entries; what is refused of an X
    Few[X]      list             over 256 entries; what is refused of an X
    X | None    X or nil         what is refused of an X
    a Record    list             another number of entries; what is refused of its fields

Bounds that depend on what the receiver knows (is this chunk part
of the version, was this request made) are the handler's.
"""

from __future__ import annotations

import re
import sys
import typing
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from p2p.errors import Refusal
from p2p.limits import MAX_FRAME

MAX_TEXT = 64 * 1024
"""Characters of the longest text field (a ticket, a reason, an address)."""

MAX_NAME, MAX_LINE = 256, 4096
"""Characters of a name (of a request, a peer), and of what a person is to read. Refusals' reasons are cut to 500 by who sends
them; the rest is room for others."""

MAX_ITEMS = 65_536
"""Entries of the longest list, which only the head or the trainer sends."""

MANY, FEW = 8192, 256
"""Entries of a list that any peer may send. MANY: each costs some microseconds (a number, a run of tokens), so that a message
holds the event loop for less than 50 ms. FEW: each costs a tenth of a millisecond (a signature that is checked, a sequence that
is taken)."""

MAX_FIELDS = 14
"""Fields of the longest message: with its tag it is still an array whose length stands in the first byte."""

_ARRAY, _TEXT = 0x90, 0xA0
"""First byte of an array of fewer than 16 entries, and of a text of fewer than 32 bytes: their length is added to it."""

T = typing.TypeVar("T")
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Name = Annotated[str, Meta(max_length=MAX_NAME)]
Line = Annotated[str, Meta(max_length=MAX_LINE)]
Blob = Annotated[bytes, Meta(max_length=MAX_FRAME)]
Digest = Annotated[bytes, Meta(max_length=64)]
"""A hash, or the id of a manifest, which is one: 32 bytes today."""
Count = Annotated[int, Meta(ge=0)]
"""An integer in [0, 2**64): msgpack has no larger one."""
Real = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
"""A finite number; an integer is taken for one."""
Rate = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
"""As Real, and not below 0."""
Row = Annotated[tuple[T, ...], Meta(max_length=MAX_ITEMS)]
Many = Annotated[tuple[T, ...], Meta(max_length=MANY)]
Few = Annotated[tuple[T, ...], Meta(max_length=FEW)]


class Record(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A part of a message: its fields in order, none of them optional. (It holds no cycles: the collector need not look.)"""


class Message(Record, frozen=True):
    """Base of all messages. A subclass gives its `tag`, a short text."""


class Signed(Record, frozen=True):
    """Base of what the head signs: it travels inside messages, as bytes."""


encode_struct = msgspec.msgpack.Encoder().encode

MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises on bytes that are not what was asked for."""


def encode(message: Any) -> bytes:
    """A message as bytes. ValueError when it would exceed MAX_FRAME."""
    data = encode_struct(message)
    if len(data) > MAX_FRAME:
        raise ValueError(f"{type(message).__name__} of {len(data)} bytes is over the frame limit of {MAX_FRAME}")
    return data


def prefix_of(kind: type[Message]) -> bytes:
    """The bytes that every message of this kind begins with, and no other."""
    tag = str(kind.__struct_config__.tag).encode()
    return bytes([_ARRAY + 1 + len(kind.__struct_fields__), _TEXT + len(tag)]) + tag


class Decoder:
    """Reads the messages that are defined or imported in `namespaces` (`vars(module)`, `globals()`), and no others."""

    def __init__(self, *namespaces: Mapping[str, object]) -> None:
        found = [value for names in namespaces for value in names.values() if isinstance(value, type)]
        self.kinds = {kind.__struct_config__.tag: kind for kind in found if issubclass(kind, Message) and kind is not Message}
        """tag -> message"""
        assert all(len(kind.__struct_fields__) <= MAX_FIELDS for kind in self.kinds.values())
        self._decode = msgspec.msgpack.Decoder(typing.Union[tuple(self.kinds.values())]).decode  # noqa: UP007

    def __call__(self, data: bytes) -> Any:
        """The message in `data`. Refusal, always fatal, on anything that is not exactly one well-formed, known message."""
        if len(data) > MAX_FRAME:
            raise Refusal(f"message of {len(data)} bytes is over the frame limit of {MAX_FRAME}", fatal=True)
        try:
            message = self._decode(data)
        except MALFORMED as error:
            raise Refusal(self._reason(data, error), fatal=True) from None
        if data[0] != _ARRAY + 1 + len(message.__struct_fields__):  # msgspec fills a missing field from its default
            raise Refusal(_miscounted(type(message), data), fatal=True)
        return message

    def _reason(self, data: bytes, error: Exception) -> str:
        """Why `data` is no message, in terms of the message that it claims to be."""
        what, _, path = str(error).partition(" - at `$")
        if not isinstance(error, msgspec.ValidationError):
            return f"malformed msgpack: {type(error).__name__}: {what}"[:300]
        claimed = len(data) > 1 and _ARRAY < data[0] < _TEXT <= data[1] < _TEXT + 32  # a short text stands first
        kind = self.kinds.get(data[2 : 2 + data[1] - _TEXT].decode(errors="replace")) if claimed else None
        if kind is None:
            return f"message is not a list that starts with a known tag: {what[:1].lower()}{what[1:]}"[:200]
        if not path and data[0] == _ARRAY + 1 + len(kind.__struct_fields__):  # its fields do not go together
            return f"{kind.__name__}: {what}"[:300]
        return f"{_field(kind, path)}: {what[:1].lower()}{what[1:]}"[:300] if path else _miscounted(kind, data)


def _miscounted(kind: type[Message], data: bytes) -> str:
    return f"{kind.__name__} has {len(kind.__struct_fields__)} fields, got {data[0] - _ARRAY - 1}"


def _field(kind: Any, path: str) -> str:
    """msgspec's path by number, as in "[2][0][1]", with names: "Roster.members[0].addresses"."""
    name = kind.__name__
    for index in map(int, re.findall(r"\[(\d+)\]", path)):
        if isinstance(kind, type) and issubclass(kind, Struct):
            field = kind.__struct_fields__[index - isinstance(kind.__struct_config__.tag, str)]
            name, kind = f"{name}.{field}", typing.get_type_hints(kind)[field]
        else:
            name, kind = f"{name}[{index}]", typing.get_args(kind)[0]
        if type(None) in typing.get_args(kind):
            kind = typing.get_args(kind)[0]
    return name


def unpack(data: bytes, kind: type[T]) -> T:
    """What the head signed, read as `kind`. Refusal, always fatal, on anything else."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except MALFORMED as error:
        raise Refusal(f"malformed msgpack: {type(error).__name__}: {error}"[:300], fatal=True) from None
