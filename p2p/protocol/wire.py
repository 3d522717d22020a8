"""Typed messages to msgpack and back, with hard limits. Sans-IO. Must not know what any message means.

A message is a frozen dataclass registered under a short tag; on the wire it is `[tag, field, field, ...]`. Decoding checks
every field against its annotation, so a handler never sees a value of the wrong type, a negative count or text that is
too long. Anything else is a Refusal that names the message and the field.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar

import msgpack

from p2p.errors import Refusal
from p2p.limits import MAX_FRAME
from p2p.version import Version

T = TypeVar("T")

MAX_TEXT = 64 * 1024
"""Longest text field (a ticket, a reason, an address)."""

MAX_ITEMS = 65_536
"""Longest list: a Want for every chunk of a large version stays below it."""

_by_tag: dict[str, type] = {}
_codecs: dict[type, _Codec] = {}
_version = functools.lru_cache(maxsize=256)(Version)
"""Nearly every run of tokens names one of a few versions."""


def message(tag: str) -> Callable[[type[T]], type[T]]:
    """Register a frozen dataclass as a message under `tag`."""

    def register(cls: type[T]) -> type[T]:
        if tag in _by_tag:
            raise ValueError(f"tag {tag!r} is taken by {_by_tag[tag].__name__}")
        _by_tag[tag] = cls
        cls.__shoal_tag__ = tag  # type: ignore[attr-defined]
        return cls

    return register


def encode(value: Any) -> bytes:
    """A registered message as bytes. ValueError when it would exceed MAX_FRAME."""
    data = msgpack.packb([value.__shoal_tag__, *_fields_out(value)], use_bin_type=True)
    if len(data) > MAX_FRAME:
        raise ValueError(f"{type(value).__name__} of {len(data)} bytes is over the frame limit of {MAX_FRAME}")
    return data


def decode(data: bytes) -> Any:
    """The message in `data`. Refusal on anything that is not exactly one well-formed, known message."""
    if len(data) > MAX_FRAME:
        raise Refusal(f"message of {len(data)} bytes is over the frame limit of {MAX_FRAME}", fatal=True)
    wire = unpack(data)
    if not isinstance(wire, list) or not wire or not isinstance(wire[0], str):
        raise Refusal("message is not a list that starts with a tag", fatal=True)
    cls = _by_tag.get(wire[0])
    if cls is None:
        raise Refusal(f"unknown message {wire[0][:40]!r}", fatal=True)
    return _fields_in(cls, wire[1:])


def unpack(data: bytes) -> Any:
    """msgpack with our limits and no extension types; Refusal on anything malformed."""
    try:
        return msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            use_list=True,
            max_str_len=MAX_TEXT,
            max_bin_len=MAX_FRAME,
            max_array_len=MAX_ITEMS,
            max_map_len=4096,
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException, UnicodeDecodeError, RecursionError, OverflowError, TypeError) as error:
        raise Refusal(f"malformed msgpack: {type(error).__name__}: {error}"[:300], fatal=True) from None


@dataclasses.dataclass(frozen=True, slots=True)
class _Codec:
    names: tuple[str, ...]
    writers: tuple[Callable[[Any], Any], ...]
    readers: tuple[tuple[type | None, Callable[[Any], Any]], ...]
    """(a type whose values are taken as they are, what reads any other value)"""


def _codec(cls: type) -> _Codec:
    found = _codecs.get(cls)
    if found is None:
        hints = typing.get_type_hints(cls)
        names = tuple(f.name for f in dataclasses.fields(cls))
        plain = tuple(hints[n] if hints[n] in (str, bytes, bool) else None for n in names)
        readers = tuple((kind, _reader(hints[n])) for n, kind in zip(names, plain, strict=True))
        found = _codecs[cls] = _Codec(names, tuple(_writer(hints[n]) for n in names), readers)
    return found


def _fields_out(value: Any) -> list[Any]:
    codec = _codec(type(value))
    return [write(getattr(value, name)) for name, write in zip(codec.names, codec.writers, strict=True)]


def _fields_in(cls: type, wire: list[Any]) -> Any:
    codec = _codecs.get(cls) or _codec(cls)
    readers = codec.readers
    if len(wire) != len(readers):
        raise Refusal(f"{cls.__name__} has {len(readers)} fields, got {len(wire)}", fatal=True)
    values: list[Any] = []
    try:  # the hot path of everything that is received: text and bytes are taken without a call
        for (kind, read), item in zip(readers, wire, strict=True):
            values.append(item if type(item) is kind else read(item))
    except (ValueError, TypeError) as error:
        raise Refusal(f"{cls.__name__}.{codec.names[len(values)]}: {error}", fatal=True) from None
    try:
        return cls(*values)
    except ValueError as error:  # a class may check itself in __post_init__
        raise Refusal(f"{cls.__name__}: {error}", fatal=True) from None


def _same(value: Any) -> Any:
    return value


def _writer(hint: Any) -> Callable[[Any], Any]:
    origin = typing.get_origin(hint)
    if hint is Version:
        return lambda v: [v.epoch, v.step]
    if dataclasses.is_dataclass(hint):
        return _fields_out
    if origin is tuple:
        inner = _writer(typing.get_args(hint)[0])
        return list if inner is _same else lambda items: [inner(i) for i in items]
    if origin in (typing.Union, types.UnionType):
        inner = _writer(_optional(hint))
        return lambda v: None if v is None else inner(v)
    return _same


def _reader(hint: Any) -> Callable[[Any], Any]:
    origin = typing.get_origin(hint)
    if hint is Version:
        return _read_version
    if dataclasses.is_dataclass(hint):
        return lambda v: _fields_in(hint, v if type(v) is list else _check(v, list))  # type: ignore[arg-type]
    if origin is tuple:
        inner = _reader(typing.get_args(hint)[0])
        return lambda items: tuple([inner(i) for i in _check(items, list)])
    if origin in (typing.Union, types.UnionType):
        inner = _reader(_optional(hint))
        return lambda v: None if v is None else inner(v)
    if hint is int:
        return _read_int
    if hint is float:
        return _read_float
    if hint in (str, bytes, bool):
        return lambda v: _check(v, hint)
    raise TypeError(f"a message field cannot be {hint!r}")


def _optional(hint: Any) -> Any:
    inner = [a for a in typing.get_args(hint) if a is not type(None)]
    if len(inner) != 1:
        raise TypeError(f"only `X | None` is a message field, not {hint!r}")
    return inner[0]


def _check(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"expected {kind.__name__}, got {type(value).__name__}")
    return value


def _read_int(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise ValueError("expected an integer in [0, 2**64)")
    return value


def _read_float(value: Any) -> float:
    if type(value) not in (float, int):
        raise ValueError(f"expected a number, got {type(value).__name__}")
    if not math.isfinite(value):
        raise ValueError("expected a finite number")
    return float(value)


def _read_version(value: Any) -> Version:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("expected [epoch, step]")
    return _version(_read_int(value[0]), _read_int(value[1]))
