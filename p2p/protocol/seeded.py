"""The uniform numbers that sequences are drawn by: one for each (seed, completion position). Pure.

Nodes draw by them and the learner checks what was drawn, so they are part of the protocol. A counter-based hash (SplitMix64:
Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014). Must not know models or tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""The increment of SplitMix64: 2**64 divided by the golden ratio, made odd."""

_MASK = (1 << 64) - 1
"""The lowest 64 bits, to which a seed is cut."""


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser over uint64 (arithmetic modulo 2**64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def seed_keys(seeds: Sequence[int]) -> np.ndarray:
    """uint64 [n]: seeds (any Python integers, taken modulo 2**64) spread out, so that neighbours share no stream."""
    raw = np.array([seed & _MASK for seed in seeds], dtype=np.uint64)
    return _mix(raw + _GOLDEN)


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """float64 [n] in [0, 1): the number for each (key, completion position); 53 bits each."""
    bits = _mix(keys + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
