"""What changed between two runs of words, counted within the classes of the base.

Whether a step changes a weight depends mostly on how large the weight is: the same step is more or less than half of the
distance between two neighbouring values. Both sides know the base; so positions are told as gaps among the words of one class,
and cost what the class's own density makes them cost. The class of a word is `(word >> shift) & 255`: the exponent of a bf16
or fp32. Loops over words, compiled; must not know how gaps and steps are written.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
from numba import njit

CLASSES = 256

SHIFT = {1: 3, 2: 7, 4: 23}
"""Of words of so many bytes: what makes a class of the exponents of fp8 (e4m3), bf16 and fp32. Others get other classes, which
cost size and nothing else."""

LANES = 2
"""The words of a segment are two lanes, its halves (the second one longer by one if need be), that are counted apart: so a
processor works on both at once, where it would wait for one."""

_END = 1 << 40
"""A gap that no segment reaches the end of."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Of a segment: the changed words in the order of classes, lanes, and positions within one."""

    counts: np.ndarray
    """int64 [CLASSES, LANES]: how many there are"""
    gaps: np.ndarray
    """uint32 [changes]: the unchanged words of its class and lane since the last changed one"""
    steps: np.ndarray
    """uN [changes]: new - base, in the words' own arithmetic"""


def readable(words: np.ndarray) -> np.ndarray:
    """The same words for a compiled loop that only reads them: to it, read-only arrays are of another type, to be compiled for
    anew."""
    if words.flags.writeable:
        return words
    alias = (ctypes.c_char * words.nbytes).from_address(words.ctypes.data)
    return np.frombuffer(memoryview(alias).cast("B"), words.dtype)


def find(new: np.ndarray, base: np.ndarray, most: int) -> Changes | None:
    """What changed; None when it is more than `most` words. `new` and `base` are uN [n] of 1, 2 or 4 bytes."""
    places, gaps, steps = np.empty(most, np.uint16), np.empty(most, np.uint32), np.empty(most, new.dtype)
    count = _find(readable(new), readable(base), SHIFT[new.itemsize], places, gaps, steps)
    if count < 0:
        return None
    counts = np.bincount(places[:count], minlength=CLASSES * LANES)
    gaps_out, steps_out = np.empty(count, np.uint32), np.empty(count, new.dtype)
    _bring_together(places[:count], gaps, steps, np.cumsum(counts) - counts, gaps_out, steps_out)
    return Changes(counts.reshape(CLASSES, LANES), gaps_out, steps_out)


def apply(base: np.ndarray, changes: Changes, out: np.ndarray) -> bool:
    """Fill `out` with `base` and the changes; False when they do not all lie within it."""
    counts = changes.counts.reshape(-1)
    # A gap without end after those of each place; places by lane here, which is faster.
    gaps = np.insert(changes.gaps.astype(np.int64), np.cumsum(counts), _END)
    begin = np.cumsum(counts) - counts + np.arange(len(counts))
    at = np.ascontiguousarray(begin.reshape(CLASSES, LANES).T).reshape(-1)
    ends = at + changes.counts.T.reshape(-1)
    where = np.empty(len(gaps), np.int64)
    _locate(readable(base), SHIFT[base.itemsize], at, gaps, gaps[at], where)
    if (at != ends).any():
        return False
    out[:] = base
    out[np.delete(where, begin + counts)] += changes.steps
    return True


def classes_of(words: np.ndarray) -> np.ndarray:
    """uint8 [n]: the class of each word."""
    out = np.empty(len(words), np.uint8)
    _classes_of(readable(words), SHIFT[words.itemsize], out)
    return out


@njit(nogil=True, cache=True)
def _classes_of(words, shift, out):  # type: ignore[no-untyped-def]
    for i in range(len(words)):
        out[i] = (words[i] >> shift) & 255


@njit(nogil=True, cache=True)
def _find(new, base, shift, places, gaps, steps):  # type: ignore[no-untyped-def]
    """How many words changed, in the order in which both lanes are gone through; -1 when there is no room for them."""
    half = len(new) // 2
    since = np.zeros(CLASSES * LANES, np.int64)
    count, room = 0, len(gaps)
    for i in range(half):
        b, n = base[i], new[i]
        place = ((b >> shift) & 255) * 2
        s = since[place]
        since[place] = s + 1
        if n != b:
            if count == room:
                return -1
            places[count], gaps[count], steps[count] = place, s, n - b
            since[place] = 0
            count += 1
        b, n = base[half + i], new[half + i]
        place = ((b >> shift) & 255) * 2 + 1
        s = since[place]
        since[place] = s + 1
        if n != b:
            if count == room:
                return -1
            places[count], gaps[count], steps[count] = place, s, n - b
            since[place] = 0
            count += 1
    if len(new) & 1 and new[-1] != base[-1]:
        if count == room:
            return -1
        place = ((base[-1] >> shift) & 255) * 2 + 1
        places[count], gaps[count], steps[count] = place, since[place], new[-1] - base[-1]
        count += 1
    return count


@njit(nogil=True, cache=True)
def _bring_together(places, gaps, steps, at, gaps_out, steps_out):  # type: ignore[no-untyped-def]
    for i in range(len(places)):
        k = at[places[i]]
        at[places[i]] = k + 1
        gaps_out[k] = gaps[i]
        steps_out[k] = steps[i]


@njit(nogil=True, cache=True)
def _locate(base, shift, at, gaps, left, where):  # type: ignore[no-untyped-def]
    """Fill `where` with the position of each changed word. `at`: the next of each place; `left`: the words until there."""
    half = len(base) // 2
    for i in range(half):
        # The store is unconditional, and the branch waits for the load alone: twice as fast as a branch on what was stored.
        place = (base[i] >> shift) & 255
        wait = left[place]
        left[place] = wait - 1
        if wait == 0:
            k = at[place]
            where[k] = i
            at[place] = k + 1
            left[place] = gaps[k + 1]
        place = ((base[half + i] >> shift) & 255) + CLASSES
        wait = left[place]
        left[place] = wait - 1
        if wait == 0:
            k = at[place]
            where[k] = half + i
            at[place] = k + 1
            left[place] = gaps[k + 1]
    if len(base) & 1:
        place = ((base[-1] >> shift) & 255) + CLASSES
        if left[place] == 0:
            where[at[place]] = len(base) - 1
            at[place] += 1
