"""The Coding port: one way to write a segment's words. Must not know segments' places, versions, files or peers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Encoded(NamedTuple):
    """One segment's words, written by one coding."""

    body: bytes
    """the payload after its id byte"""
    changed: int
    """words that differ from the base; without a base, all of them"""


class Coding:
    """Lossless for any bit pattern; holds no state, so threads share one.

    `new`, `base` and `out` are one-dimensional little-endian unsigned words of one dtype (1, 2, 4 or 8 bytes) and one
    length; `out` shares no memory with `base`.
    """

    name: str
    id: int
    """first byte of a payload; never reused for another form"""
    needs_base: bool

    def encode(self, new: np.ndarray, base: np.ndarray | None) -> Encoded | None:
        """Write `new` against `base`. None when this coding would make the payload large or slow to decode. Deterministic."""
        raise NotImplementedError

    def decode(self, body: memoryview, base: np.ndarray | None, out: np.ndarray) -> None:
        """Fill `out`. Refusal on any body that `encode` could not have made. Memory is bounded by the length of `out`, whatever
        the body claims."""
        raise NotImplementedError


def changed(words: np.ndarray, base: np.ndarray | None) -> int:
    """How many words differ from `base`; without one, all of them."""
    return len(words) if base is None else int(np.count_nonzero(words != base))
