"""Plain data between the tests of an answer and the answer's own process: built-in values only, written by value. Pure.

What comes back from an answer is made anew out of built-in types. So it has no methods of the answer's own: nothing in it can
call itself equal to what a test expects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

DEEPEST = 64
"""Containers in each other, at the most: what a frame's own decoder takes, and more than a test compares."""

Refer = Callable[[Any], Any]
"""Makes of a value that is not plain what stands for it, or raises TypeError."""

_CONTAINERS: dict[str, Callable[[Any], Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_SCALARS = (type(None), bool, float, str, bytes)


def to_plain(value: Any, refer: Refer, depth: int = 0) -> Any:
    """What msgpack can carry. TypeError where the value is too deep or `refer` does not take it; ValueError for a number of more
    digits than Python writes."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is int:
        return value if -(1 << 63) <= value < 1 << 64 else ["int", str(value)]
    if depth >= DEEPEST:
        raise TypeError(f"more than {DEEPEST} containers in each other")
    if kind is complex:
        return ["complex", value.real, value.imag]
    if kind.__name__ in _CONTAINERS and kind is _CONTAINERS[kind.__name__]:
        return [kind.__name__, *(to_plain(item, refer, depth + 1) for item in value)]
    if kind is dict:
        return ["dict", *([to_plain(k, refer, depth + 1), to_plain(v, refer, depth + 1)] for k, v in value.items())]
    return ["that", refer(value)]


def from_plain(said: Any, of: Refer) -> Any:
    """The value again; `of` makes one of what `refer` gave. ValueError for anything else than what `to_plain` writes."""
    if not isinstance(said, list):
        return said
    try:
        kind, *items = said
        if kind == "int":
            return int(items[0])
        if kind == "complex":
            return complex(*items)
        if kind == "dict":
            return {from_plain(k, of): from_plain(v, of) for k, v in items}
        if kind == "that":
            return of(items[0])
        return _CONTAINERS[kind](from_plain(item, of) for item in items)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"not a plain value: {error}") from None
