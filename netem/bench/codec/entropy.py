"""The least bytes that an update takes, under two models of its changes. Pure arithmetic over words; must not know any codec."""

from __future__ import annotations

import numpy as np

from p2p.codec.classes import SHIFT


def _bits(counts: np.ndarray) -> float:
    """Shannon bits of all symbols together, coded by their own frequencies."""
    counts = counts[counts > 0].astype(np.float64)
    return float((counts * np.log2(counts.sum() / counts)).sum()) if len(counts) else 0.0


def _binary(ones: int, total: int) -> float:
    return _bits(np.array([ones, total - ones]))


def memoryless_bytes(old: np.ndarray, new: np.ndarray) -> float:
    """Bytes when each word changes with one probability, and the XOR of a changed word is coded by its frequency."""
    changed = old != new
    xor = (old ^ new)[changed]
    return (_binary(len(xor), len(old)) + _bits(np.unique(xor, return_counts=True)[1])) / 8


def conditional_bytes(old: np.ndarray, new: np.ndarray) -> float:
    """Bytes when the probability of a change, and the frequencies of steps (new - old as integers), depend on the class of the
    base, which is its exponent."""
    classes = (old >> SHIFT[old.itemsize]).astype(np.int64) & 255
    changed = old != new
    total = 0.0
    for c in np.flatnonzero(np.bincount(classes, minlength=256)):
        mine = classes == c
        steps = (new[mine & changed] - old[mine & changed]).astype(old.dtype)
        total += _binary(len(steps), int(mine.sum())) + _bits(np.unique(steps, return_counts=True)[1])
    return total / 8
