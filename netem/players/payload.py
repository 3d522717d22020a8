"""What is broadcast in a contest: the same random bytes for every player."""

from __future__ import annotations

import numpy as np


def payload_bytes(nbytes: int, seed: int) -> bytes:
    """`nbytes` bytes that do not compress, from `seed` (PCG64)."""
    return np.random.Generator(np.random.PCG64(seed)).bytes(nbytes)
