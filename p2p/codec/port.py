"""The Coding port: one way to write a segment's words. Must not know segments' places, versions, files or peers."""

from __future__ import annotations

import numpy as np


class Coding:
    """Lossless for any bit pattern; holds no state, so threads share one.

    `new`, `base` and `out` are one-dimensional little-endian unsigned words of one dtype (1, 2, 4 or 8 bytes) and one
    length; `out` shares no memory with `base`.
    """

    name: str
    id: int
    """first byte of a payload; never reused for another form"""
    needs_base: bool

    def encode(self, new: np.ndarray, base: np.ndarray | None) -> tuple[bytes, int] | None:
        """The payload after its id byte, and how many words differ from `base` (from nothing: all). None when these words are
        not for this coding. Deterministic."""
        raise NotImplementedError

    def decode(self, body: memoryview, base: np.ndarray | None, out: np.ndarray) -> int:
        """Fill `out`; returns how many words differ from `base` (from nothing: all). Refusal on any body that `encode`
        could not have made, in memory bounded by `out`'s length whatever the body claims."""
        raise NotImplementedError


def changed(words: np.ndarray, base: np.ndarray | None) -> int:
    """How many words differ from `base`; without one, all of them."""
    return len(words) if base is None else int(np.count_nonzero(words != base))
