"""What changed between two runs of words, counted within the classes of the base.

Whether a step changes a weight depends mostly on how large the weight is: the same step is more or less than half of the
distance between two neighbouring values. Both sides know the base; so positions are told as ranks among the words of one class,
and cost what the class's own density makes them cost. The class of a word is `(word >> shift) & 255`: the exponent of a bf16
or fp32. The loops over words are compiled. This module must not know how ranks and steps are written.

The loops go through the words in tiles. Classes that hold most words, and at least one change, are counted class by class, 64
words at once (`vectors`). The few words of all other classes are taken one by one. Which classes are common is guessed from a
sample of the base: a wrong guess costs time (in the worst case every word is taken one by one) and nothing else.
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
"""Classes of words: a class is 8 bits of the word, which is how many bits the exponent of a bf16 or fp32 has."""

SHIFT = {1: 3, 2: 7, 4: 23}
"""Bytes of a word -> how many bits to shift it right, so that its lowest 8 bits are the exponent: of fp8 (e4m3), bf16 and fp32.
Words of other formats fall into other classes, which makes the payload larger and has no other effect."""

BLOCKS = 32
"""Blocks of 64 words in a tile."""

TILE = BLOCK * BLOCKS
"""Words of a tile, 2048: so few that this tile, the next one, their classes and the masks of some ten classes stay in the
processor's nearest cache."""

SAMPLED = 8
"""The first block of one tile in so many is sampled, which is 1 word in 256: it need only tell common classes from rare
ones."""

FEW = 256
"""At most one word in so many may be of the rare classes, whose words are taken one by one: so few of them cost little beside the
classes that are counted 64 words at once."""

MANY = 32
"""At most so many classes are counted 64 words at once. 8-bit floats have so many exponents; the weights of a bf16 model have
ten to twenty."""

_END = 1 << 40
"""A rank that no segment reaches (a segment has at most 2**26 words): the next change of a class that has none left."""


@dataclass(frozen=True, slots=True)
class Changes:
    """The changed words of a segment, in the order of classes and, within a class, of positions."""

    counts: np.ndarray
    """int64 [CLASSES]: how many words of each class changed"""
    ranks: np.ndarray
    """uint32 [changes]: how many words of its class, changed or not, come before each; rising within a class"""
    steps: np.ndarray
    """uN [changes]: new - base, in the words' own arithmetic"""


def readable(words: np.ndarray) -> np.ndarray:
    """The same words as a writable array, for a compiled loop that only reads them. To numba a read-only array is of another
    type, for which the loop would be compiled again."""
    if words.flags.writeable:
        return words
    alias = (ctypes.c_char * words.nbytes).from_address(words.ctypes.data)
    return np.frombuffer(memoryview(alias).cast("B"), words.dtype)


def find(new: np.ndarray, base: np.ndarray, most: int) -> Changes | None:
    """The changes from `base` to `new` (uN [n] of 1, 2 or 4 bytes); None when more than `most` words changed."""
    new, base, shift = readable(new), readable(base), SHIFT[new.itemsize]
    masks, counts = np.empty(len(base) // BLOCK, np.uint64), np.zeros(CLASSES, np.int64)
    count = _compare(new, base, shift, most, masks=masks, counts=counts)
    if count < 0:
        return None
    ranks, steps = np.empty(count, np.uint32), np.empty(count, new.dtype)
    starts = np.cumsum(counts) - counts
    _find(new, base, shift, masks, counts=counts, at=starts, ranks=ranks, steps=steps)
    return Changes(counts, ranks, steps)


def apply(base: np.ndarray, changes: Changes, out: np.ndarray) -> bool:
    """Fill `out` (uN [n]) with `base` (uN [n]) and the changes. False when a change lies beyond the words of its class: then
    `out` holds anything. Ranks must rise within each class."""
    ends = np.cumsum(changes.counts)
    at = ends - changes.counts
    if len(changes.ranks) == 0:
        out[...] = base
        return True
    straight = out.ctypes.data % STREAMED == 0
    _apply(
        readable(base), SHIFT[base.itemsize], changes.ranks, changes.steps, at=at, ends=ends, out=out, straight=straight
    )
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
    """Append first + the place of each set bit to the first `n` of `places`; returns how many there are then. It writes up to
    four places beyond the last one."""
    count = count_bits(bits)
    # Four bits without a test of how many there are: a processor would guess its outcome wrong.
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
    """What `_list` does, faster where there is rarely more than one bit."""
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
    """How many words changed, -1 when more than `most`. Fills a mask for each whole block, and counts the changes of each
    class."""
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
    """(n, low, high): `chosen` (uint8 [MANY]) gets the n classes to count 64 words at once, all of them from `low` to `high`.

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
    """How many of a tile's `classes` are `c`. Fills, from `at` on, each block's mask of these words and how many come before
    it."""
    total = 0
    for block in range(BLOCKS):
        bits = equal(classes, block * BLOCK, c)
        masks[at + block] = bits
        before[at + block] = total
        total += count_bits(bits)
    return total


@njit(nogil=True, cache=True)
def _find(new, base, shift, masks, counts, at, ranks, steps):  # type: ignore[no-untyped-def]
    """Fill `ranks` and `steps`. `at`: the index of each class's next change; each class has room for `counts` changes."""
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
    """Fill `out`. `at`: the index of each class's next change; `ends`: where its changes end. If all were applied, `at` equals
    `ends`.

    A change is applied where its class has as many words before as its rank says. Ranks of a class rise, so one that is not
    below those already seen is still to come, and one that is below a tile's last lies in this tile.

    A tile is put together in `near` and then copied to `out`, past the caches where `straight` says that `out` is aligned for it.
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
