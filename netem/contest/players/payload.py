"""The payload of a contest: the same random bytes for every player."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

BLOCK = 4 << 20
"""Bytes made at a time, so that a payload of any size can be written to disk in little memory."""


def payload_blocks(nbytes: int, seed: int) -> Iterator[bytes]:
    """`nbytes` bytes that do not compress, from `seed` (PCG64), BLOCK at a time."""
    generator = np.random.Generator(np.random.PCG64(seed))
    for start in range(0, nbytes, BLOCK):
        yield generator.bytes(min(BLOCK, nbytes - start))


def payload_bytes(nbytes: int, seed: int) -> bytes:
    """The same bytes in one piece."""
    return b"".join(payload_blocks(nbytes, seed))
