"""What changed between two runs of words, counted within the classes of the base.

Whether a step changes a weight depends mostly on how large the weight is: the same step is more or less than half of the
distance between two neighbouring values. Both sides know the base; so positions are told as ranks among the words of one class,
and cost what the class's own density makes them cost. The class of a word is `(word >> shift) & 255`: the exponent of a bf16
or fp32. Loops over words, compiled; must not know how ranks and steps are written.

Words are gone through in tiles. In each, the classes that hold most words and any change are counted one after the other, 64
words at once (`vectors`); the few words of all other classes, one after the other. Which classes are which is a guess from a
sample of the base: a wrong one costs time (in the worst case each word is one of the few) and nothing else.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
from numba import njit

from p2p.codec.vectors import (
    BLOCK,
    STREAMED,
    at_most,
    copy_block,
    count_bits,
    different,
    equal,
    expect,
    lowest_bit,
    outside,
    place_of,
    put_octets,
    settle,
    stream_block,
)

CLASSES = 256

SHIFT = {1: 3, 2: 7, 4: 23}
"""Of words of so many bytes: what makes a class of the exponents of fp8 (e4m3), bf16 and fp32. Others get other classes, which
cost size and nothing else."""

BLOCKS = 32
TILE = BLOCK * BLOCKS
"""Words of a tile: these and the next ones, their classes, and masks for some ten of these stay in the nearest cache."""

SAMPLED = 8
"""One tile in so many has its first block sampled."""

FEW = 256
"""One word in so many may be of the classes that are gone through word by word."""

MANY = 32
"""At most so many classes are counted 64 words at once. What 8-bit floats have; exponents of weights are some ten to twenty."""

_END = 1 << 40
"""A rank that no segment reaches."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Of a segment: the changed words in the order of classes, and of positions within one."""

    counts: np.ndarray
    """int64 [CLASSES]: how many there are"""
    ranks: np.ndarray
    """uint32 [changes]: the words of its class, changed or not, before each; rising within a class"""
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
    new, base, shift = readable(new), readable(base), SHIFT[new.itemsize]
    masks, counts = np.empty(len(base) // BLOCK, np.uint64), np.zeros(CLASSES, np.int64)
    count = _compare(new, base, shift, most, masks, counts)
    if count < 0:
        return None
    ranks, steps = np.empty(count, np.uint32), np.empty(count, new.dtype)
    _find(new, base, shift, masks, counts, np.cumsum(counts) - counts, ranks, steps)
    return Changes(counts, ranks, steps)


def apply(base: np.ndarray, changes: Changes, out: np.ndarray) -> bool:
    """Fill `out` with `base` and the changes; False when they do not all lie within it. Ranks must rise within each class."""
    ends = np.cumsum(changes.counts)
    at = ends - changes.counts
    if len(changes.ranks) == 0:
        out[...] = base
        return True
    straight = out.ctypes.data % STREAMED == 0
    _apply(readable(base), SHIFT[base.itemsize], changes.ranks, changes.steps, at, ends, out, straight)
    return bool((at == ends).all())


def classes_of(words: np.ndarray) -> np.ndarray:
    """uint8 [n]: the class of each word."""
    out = np.empty(len(words), np.uint8)
    _classes_of(readable(words), SHIFT[words.itemsize], out)
    return out


@njit(nogil=True, cache=True)
def _classes_of(words, shift, out):  # type: ignore[no-untyped-def]
    whole = len(words) // BLOCK * BLOCK
    for i in range(0, whole, BLOCK):
        put_octets(words, i, shift, out, i)
    for i in range(whole, len(words)):
        out[i] = (words[i] >> shift) & 255


@njit(nogil=True, cache=True)
def _list(bits, first, places, n):  # type: ignore[no-untyped-def]
    """Append first + each bit that is set to the `n` places; how many there are then. Overwrites up to four beyond."""
    count = count_bits(bits)
    # A few bits without asking how many: a processor would guess wrong.
    for k in range(4):
        places[n + k] = first + lowest_bit(bits)
        bits &= bits - np.uint64(1)
    k = 4
    while bits:
        places[n + k] = first + lowest_bit(bits)
        bits &= bits - np.uint64(1)
        k += 1
    return n + count


@njit(nogil=True, cache=True)
def _list_few(bits, first, places, n):  # type: ignore[no-untyped-def]
    """As `_list`, for bits of which there is rarely more than one."""
    count = count_bits(bits)
    places[n] = first + lowest_bit(bits)
    bits &= bits - np.uint64(1)
    k = 1
    while bits:
        places[n + k] = first + lowest_bit(bits)
        bits &= bits - np.uint64(1)
        k += 1
    return n + count


@njit(nogil=True, cache=True)
def _compare(new, base, shift, most, masks, counts):  # type: ignore[no-untyped-def]
    """How many words changed, -1 when more than `most`; fills a mask for each whole block, counts changes of each class."""
    count, whole, places = 0, len(base) // BLOCK * BLOCK, np.empty(TILE + 4, np.uint16)
    for first in range(0, len(masks), BLOCKS):
        n = 0
        for block in range(first, min(first + BLOCKS, len(masks))):
            masks[block] = different(new, base, block * BLOCK)
            n = _list(masks[block], (block - first) * BLOCK, places, n)
        count += n
        if count > most:
            return -1
        for j in range(n):
            counts[(base[first * BLOCK + np.int64(places[j])] >> shift) & 255] += 1
    for i in range(whole, len(base)):
        if new[i] != base[i]:
            count += 1
            counts[(base[i] >> shift) & 255] += 1
    return count if count <= most else -1


@njit(nogil=True, cache=True)
def _choose(base, shift, counts, chosen):  # type: ignore[no-untyped-def]
    """(how many classes to count 64 words at once, filled into `chosen` (uint8 [MANY]), the lowest of their range, the highest).

    The range leaves out, at its ends, classes that hold few of the sampled words. Within it a class without a change need not
    be counted.
    """
    held = np.zeros(CLASSES, np.int64)
    for start in range(0, len(base) - TILE + 1, TILE * SAMPLED):
        for i in range(start, start + BLOCK):
            held[(base[i] >> shift) & 255] += 1
    used = 0
    for c in range(CLASSES):
        used += counts[c] > 0
    few = held.sum() // FEW
    low, high = 0, CLASSES - 1
    while low < high:
        c = low if held[low] <= held[high] else high
        few -= held[c]
        if few < 0 and used <= MANY:
            break
        used -= counts[c] > 0
        if c == low:
            low += 1
        else:
            high -= 1
    n = 0
    for c in range(low, high + 1):
        if counts[c] > 0:
            chosen[n] = c
            n += 1
    return n, low, high


@njit(nogil=True, cache=True)
def _count(classes, c, masks, before, at):  # type: ignore[no-untyped-def]
    """How many of a tile's `classes` are `c`; fills, from `at` on, each block's mask of them and how many there are before it."""
    total = 0
    for block in range(BLOCKS):
        bits = equal(classes, block * BLOCK, c)
        masks[at + block] = bits
        before[at + block] = total
        total += count_bits(bits)
    return total


@njit(nogil=True, cache=True)
def _find(new, base, shift, masks, counts, at, ranks, steps):  # type: ignore[no-untyped-def]
    """Fill `ranks` and `steps`. `at`: where the next change of each class goes; there is room for `counts` of each."""
    chosen, row = np.empty(MANY, np.uint8), np.zeros(CLASSES, np.int64)
    n, low, high = _choose(base, shift, counts, chosen)
    for k in range(n):
        row[chosen[k]] = k * BLOCKS
    seen, totals = np.zeros(CLASSES, np.int64), np.empty(MANY, np.int64)
    classes, places, found = np.empty(TILE, np.uint8), np.empty(TILE + 4, np.uint16), np.empty(TILE + 4, np.uint16)
    of_class, before = np.empty(MANY * BLOCKS, np.uint64), np.empty(MANY * BLOCKS, np.uint16)
    whole = len(base) // TILE * TILE
    for start in range(0, whole, TILE):
        for block in range(BLOCKS):
            put_octets(base, start + block * BLOCK, shift, classes, block * BLOCK)
        for k in range(n):
            totals[k] = _count(classes, chosen[k], of_class, before, k * BLOCKS)
            for block in range(k * BLOCKS // n, (k + 1) * BLOCKS // n):
                expect(base, start + TILE + block * BLOCK)
        changed = few = 0
        for block in range(BLOCKS):
            bits = outside(classes, block * BLOCK, low, high - low)
            few = _list_few(bits, block * BLOCK, places, few)
            changed = _list(masks[start // BLOCK + block] & ~bits, block * BLOCK, found, changed)
        for j in range(changed):
            place = np.int64(found[j])
            c = classes[place]
            block = row[c] + place // BLOCK
            below = of_class[block] & ((np.uint64(1) << np.uint64(place % BLOCK)) - np.uint64(1))
            rank = seen[c] + before[block] + count_bits(below)
            k = at[c]
            at[c] = k + 1
            ranks[k] = rank
            steps[k] = new[start + place] - base[start + place]
        for j in range(few):
            place = np.int64(places[j])
            c = classes[place]
            if (masks[start // BLOCK + place // BLOCK] >> np.uint64(place % BLOCK)) & np.uint64(1):
                k = at[c]
                at[c] = k + 1
                ranks[k] = seen[c]
                steps[k] = new[start + place] - base[start + place]
            seen[c] += 1
        for k in range(n):
            seen[chosen[k]] += totals[k]
    for i in range(whole, len(base)):
        c = (base[i] >> shift) & 255
        if new[i] != base[i]:
            k = at[c]
            at[c] = k + 1
            ranks[k] = seen[c]
            steps[k] = new[i] - base[i]
        seen[c] += 1


@njit(nogil=True, cache=True)
def _apply(base, shift, ranks, steps, at, ends, out, straight):  # type: ignore[no-untyped-def]
    """Fill `out`. `at`: the next change of each class, `ends`: where its changes end; `at` has reached them if all were found.

    A change is applied where its class has as many words before as its rank says. Ranks of a class rise, so one that is not
    below those already seen is still to come, and one that is below a tile's last lies in this tile.

    A tile is put together in `near` and goes to `out` when it is done, `straight` past the caches if that may be.
    """
    chosen = np.empty(MANY, np.uint8)
    n, low, high = _choose(base, shift, ends - at, chosen)
    seen, rank = np.zeros(CLASSES, np.int64), np.full(CLASSES, _END, np.int64)
    for c in range(CLASSES):
        if at[c] < ends[c]:
            rank[c] = ranks[at[c]]
    classes, places, totals = np.empty(TILE, np.uint8), np.empty(TILE + 4, np.uint16), np.empty(MANY, np.int64)
    masks, before = np.empty(MANY * BLOCKS, np.uint64), np.empty(MANY * BLOCKS, np.uint16)
    near, last, nothing = np.empty(TILE, base.dtype), len(ranks) - 1, steps[0] - steps[0]
    whole = len(base) // TILE * TILE
    for start in range(0, whole, TILE):
        for block in range(BLOCKS):
            put_octets(base, start + block * BLOCK, shift, classes, block * BLOCK)
            copy_block(base, start + block * BLOCK, near, block * BLOCK)
        for k in range(n):
            totals[k] = _count(classes, chosen[k], masks, before, k * BLOCKS)
            for block in range(k * BLOCKS // n, (k + 1) * BLOCKS // n):
                expect(base, start + TILE + block * BLOCK)
        few = 0
        for block in range(BLOCKS):
            few = _list_few(outside(classes, block * BLOCK, low, high - low), block * BLOCK, places, few)
        for j in range(few):
            place = np.int64(places[j])
            c = classes[place]
            # Every other one of these words is changed, so a branch would be guessed wrong as often.
            hit, i = seen[c] == rank[c], at[c]
            seen[c] += 1
            near[place] += steps[min(i, last)] if hit else nothing
            i += hit
            at[c] = i
            rank[c] = np.int64(ranks[min(i, last)]) if i < ends[c] else np.int64(_END)
        for k in range(n):
            c = chosen[k]
            first, total = seen[c], totals[k]
            seen[c] = first + total
            i = at[c]
            while i < ends[c]:
                within = np.int64(ranks[i]) - first
                if within >= total:
                    break
                # The last block before which there are no more than `within`: the first one has none before it.
                block = at_most(before, k * BLOCKS, within) - 1
                bit = place_of(masks[k * BLOCKS + block], np.uint64(within - before[k * BLOCKS + block]))
                near[block * BLOCK + bit] += steps[i]
                i += 1
            at[c] = i
        for block in range(BLOCKS):
            if straight:
                stream_block(near, block * BLOCK, out, start + block * BLOCK)
            else:
                copy_block(near, block * BLOCK, out, start + block * BLOCK)
    if straight:
        settle()
    for i in range(whole, len(base)):
        c = (base[i] >> shift) & 255
        out[i] = base[i]
        if at[c] < ends[c] and seen[c] == ranks[at[c]]:
            out[i] += steps[at[c]]
            at[c] += 1
        seen[c] += 1
