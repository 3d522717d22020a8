"""Changes to bytes and back: tokens, entropy coding and raw bits of every change's gap and step, in one compiled loop.

Changes come in runs, one run for each class. All changes of a run use the tables of the run's model: table `2 * model` for
gaps and table `2 * model + 1` for steps. Entropy coding is that of `rans`, except that gaps and steps have a state each and
both states take their words from one stream. Tokens are those of `tokens`; the raw bits of a gap come before those of its step.
This module must not know what a class is, nor where the length of a run is written.

A gap is a rank less the rank before it in its run, less 1; the rank before the first one counts as -1. The number of a step is
its zigzag, less 1, for no step is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numba import njit

from p2p.codec.rans import BITS, LOW, SCALE
from p2p.codec.tokens import DIRECT, FIRST, RAW_BITS, TOKENS, token_of
from p2p.codec.vectors import highest_bit, load_bits, store_bits
from p2p.errors import Refusal

_DIVISION = 44
"""For a state x < slots << (32 - BITS): x // slots == x * ceil(2**_DIVISION / slots) >> _DIVISION, and that fits 64 bits."""

_SLOTS, _START, _WIDTH, _NUMBER = np.uint64(0), np.uint64(13), np.uint64(25), np.uint64(30)
"""Bit offsets within an entry of a decoder's table: the token's slots, its first slot, its raw bits and its first number."""


@dataclass(frozen=True, slots=True)
class ChangeTokens:
    """The tokens of all changes and how often each occurs: what tables are made from."""

    gaps: np.ndarray
    """uint8 [changes]"""
    steps: np.ndarray
    """uint8 [changes]"""
    counts: np.ndarray
    """int64 [tables, TOKENS]: how often each token occurs with each table"""


class ChangeBytes(NamedTuple):
    """The two streams that a segment's changes are written as."""

    words: bytes
    """the words of the entropy coder, 2 bytes each, little-endian"""
    raw: bytes
    """the raw bits beside the tokens, lowest bits first"""


class ReadChanges(NamedTuple):
    """The changes read back, in the order in which they were written."""

    ranks: np.ndarray
    """uint32 [changes]"""
    steps: np.ndarray
    """uN [changes], of the dtype that was asked for"""


def tokens_of(counts: np.ndarray, models: np.ndarray, ranks: np.ndarray, steps: np.ndarray) -> ChangeTokens:
    """The tokens of all changes.

    `counts` int64 [runs]: the changes of each run; `models` int64 [runs]: its model; `ranks` uint32 [changes]; `steps` uN
    [changes], none of them 0.
    """
    found = ChangeTokens(
        np.empty(len(ranks), np.uint8), np.empty(len(ranks), np.uint8),
        np.zeros((2 * (int(models.max()) + 1), TOKENS), np.int64),
    )  # fmt: skip
    _tokens(counts, models, ranks, steps, gap_tokens=found.gaps, step_tokens=found.steps, held=found.counts)
    return found


def write(
    counts: np.ndarray, models: np.ndarray, ranks: np.ndarray, steps: np.ndarray, tokens: ChangeTokens, tables: np.ndarray
) -> ChangeBytes:
    """Write changes, given as to `tokens_of`, with their `tokens` and `tables` (int64 [tables, TOKENS], slots of each token)."""
    inverse = ((1 << _DIVISION) + tables - 1) // np.maximum(tables, 1)
    words = np.empty(2 * len(ranks) + 5, "<u2")
    begin = _write_words(
        counts, models, tokens.gaps, tokens.steps,
        slots=tables, starts=np.cumsum(tables, axis=1) - tables, inverses=inverse.astype(np.uint64), words=words,
    )  # fmt: skip
    size = (int(tokens.counts.sum(axis=0) @ RAW_BITS) + 7) // 8
    raw = np.zeros(size + 8, np.uint8)
    _write_raw(counts, ranks, steps, raw)
    return ChangeBytes(words[begin:].tobytes(), raw[:size].tobytes())


def read(
    words: memoryview, raw: memoryview, counts: np.ndarray, models: np.ndarray, tables: np.ndarray, below: int, dtype: np.dtype
) -> ReadChanges:
    """The `counts.sum()` changes that `write` was given; `counts`, `models` and `tables` must be those it was given.

    Ranks rise within a run and are less than `below`; steps have `dtype`. Refusal when the bytes differ from what `write` makes.
    """
    if len(words) % 2 or len(words) < 8:
        raise Refusal(f"{len(words)} bytes are no stream of tokens")
    # Copies with room at their ends: the compiled loop reads a few bytes beyond the last one.
    stream = np.zeros(len(words) // 2 + 1, "<u2")
    stream[:-1].view(np.uint8)[:] = words
    bits = np.zeros(len(raw) + 8, np.uint8)
    bits[:-8] = raw
    of_slot, entries = np.empty((len(tables), SCALE), np.uint8), np.zeros((len(tables), TOKENS), np.uint64)
    _fill(tables, FIRST, RAW_BITS, of_slot, entries)
    count = int(counts.sum())
    ranks, steps = np.empty(count, np.uint32), np.empty(count, dtype)
    fault, used = _read(
        stream, bits, counts, models,
        of_slot=of_slot, entries=entries, below=below, most=np.iinfo(dtype).max, ranks=ranks, steps=steps,
    )  # fmt: skip
    if fault == 1:
        raise Refusal("stream of tokens is cut short or corrupt")
    if fault == 2:
        raise Refusal(f"sparse delta reaches beyond the {below} words of its segment")
    if fault == 3:
        raise Refusal("sparse delta has a step larger than a word")
    if (used + 7) // 8 != len(raw):
        raise Refusal(f"payload has {len(raw)} bytes of raw bits, its tokens take {(used + 7) // 8}")
    if used % 8 and raw[-1] >> used % 8:
        raise Refusal("raw bits have something in their padding")
    return ReadChanges(ranks, steps)


@njit(nogil=True, cache=True)
def _tokens(counts, models, ranks, steps, gap_tokens, step_tokens, held):  # type: ignore[no-untyped-def]
    bits = 8 * steps.itemsize
    most = (np.int64(1) << bits) - 1
    stop = 0
    for run in range(len(counts)):
        start, stop = stop, stop + counts[run]
        table, last = 2 * models[run], np.int64(-1)
        for i in range(start, stop):
            rank, step = np.int64(ranks[i]), np.int64(steps[i])
            token = token_of(rank - last - 1)
            last = rank
            gap_tokens[i] = token
            held[table, token] += 1
            token = token_of((((step << 1) ^ -(step >> (bits - 1))) & most) - 1)
            step_tokens[i] = token
            held[table + 1, token] += 1


@njit(nogil=True, cache=True)
def _put(state, slots, start, inverse, words, at):  # type: ignore[no-untyped-def]
    """(state, where its words begin) after a token. `words` must have room for one word below `at`.

    There is no branch on `full`: a processor would guess it wrong half of the time. So a word is always written, and the next
    one overwrites it when it is not kept."""
    full = state >= slots << np.uint64(32 - BITS)
    words[at - 1] = state & np.uint64(0xFFFF)
    at -= full
    state = state >> np.uint64(16) if full else state
    quotient = state * inverse >> np.uint64(_DIVISION)
    return (quotient << np.uint64(BITS)) + (state - quotient * slots) + start, at


@njit(nogil=True, cache=True)
def _write_words(counts, models, gap_tokens, step_tokens, slots, starts, inverses, words):  # type: ignore[no-untyped-def]
    """Fill `words` from its end and return where the first one lies. It goes backwards, since the decoder goes forwards."""
    at, start = len(words), len(gap_tokens)
    gap_state = step_state = np.uint64(LOW)
    for run in range(len(counts) - 1, -1, -1):
        start, stop = start - counts[run], start
        table = 2 * models[run]
        for i in range(stop - 1, start - 1, -1):
            token = step_tokens[i]
            step_state, at = _put(
                step_state, np.uint64(slots[table + 1, token]), np.uint64(starts[table + 1, token]),
                inverse=inverses[table + 1, token], words=words, at=at,
            )  # fmt: skip
            token = gap_tokens[i]
            gap_state, at = _put(
                gap_state, np.uint64(slots[table, token]), np.uint64(starts[table, token]),
                inverse=inverses[table, token], words=words, at=at,
            )  # fmt: skip
    for state in (step_state, gap_state):
        words[at - 2], words[at - 1] = state & np.uint64(0xFFFF), state >> np.uint64(16)
        at -= 2
    return at


@njit(nogil=True, cache=True)
def _write_raw(counts, ranks, steps, raw):  # type: ignore[no-untyped-def]
    """Fill `raw`, lowest bits first. It has eight bytes more than the bits take."""
    bits = 8 * steps.itemsize
    most = (np.int64(1) << bits) - 1
    held, filled, at, stop = np.uint64(0), 0, 0, 0
    for run in range(len(counts)):
        start, stop = stop, stop + counts[run]
        last = np.int64(-1)
        for i in range(start, stop):
            rank, step = np.int64(ranks[i]), np.int64(steps[i])
            gap, last = rank - last - 1, rank
            for number in (gap, (((step << 1) ^ -(step >> (bits - 1))) & most) - 1):
                if number >= DIRECT:
                    width = highest_bit(np.uint64(number)) - 2
                    # At most 7 bits are held, and 29 more come.
                    held |= (np.uint64(number) & ((np.uint64(1) << np.uint64(width)) - np.uint64(1))) << np.uint64(filled)
                    filled += width
                    store_bits(raw, at, held)
                    at += filled >> 3
                    held >>= np.uint64(filled & ~7)
                    filled &= 7


@njit(nogil=True, cache=True)
def _fill(tables, first, widths, of_slot, entries):  # type: ignore[no-untyped-def]
    for table in range(len(tables)):
        at = 0
        for token in range(tables.shape[1]):
            slots = tables[table, token]
            if slots:
                of_slot[table, at : at + slots] = token
                entries[table, token] = (
                    np.uint64(slots) | np.uint64(at) << _START | np.uint64(widths[token]) << _WIDTH
                    | np.uint64(first[token]) << _NUMBER
                )  # fmt: skip
                at += slots


@njit(nogil=True, cache=True)
def _next(state, entry, words, at, end):  # type: ignore[no-untyped-def]
    """(state, where its words go on) after the token of the state's lowest bits, whose table entry is `entry`. Where the words
    have ended it reads the last one again; `_read` sees that by `at`."""
    slots, start = entry & np.uint64(0x1FFF), entry >> _START & np.uint64(SCALE - 1)
    state = slots * (state >> np.uint64(BITS)) + (state & np.uint64(SCALE - 1)) - start
    more = state << np.uint64(16) | np.uint64(words[min(at, end)])
    short = state < np.uint64(LOW)
    return more if short else state, at + short


@njit(nogil=True, cache=True)
def _more(entry, raw, place, last):  # type: ignore[no-untyped-def]
    """(number, bit where its raw bits end). Where the raw bits have ended it reads the last eight bytes again."""
    width = entry >> _WIDTH & np.uint64(31)
    found = load_bits(raw, min(place >> 3, last)) >> np.uint64(place & 7)
    return np.int64((entry >> _NUMBER) + (found & ((np.uint64(1) << width) - np.uint64(1)))), place + np.int64(width)


@njit(nogil=True, cache=True)
def _read(words, raw, counts, models, of_slot, entries, below, most, ranks, steps):  # type: ignore[no-untyped-def]
    """(fault, raw bits used). Faults: 0 none; 1 words left over or too few, or states that do not end where the encoder's began;
    2 a rank of `below` or more; 3 a step of more than `most`."""
    end, last_byte = len(words) - 1, len(raw) - 8
    gap_state = np.uint64(words[0]) | np.uint64(words[1]) << np.uint64(16)
    step_state = np.uint64(words[2]) | np.uint64(words[3]) << np.uint64(16)
    if gap_state < np.uint64(LOW) or step_state < np.uint64(LOW):
        return 1, 0
    at, place, stop, beyond, large = 4, 0, 0, False, False
    for run in range(len(counts)):
        start, stop = stop, stop + counts[run]
        table, rank = 2 * models[run], np.int64(-1)
        for i in range(start, stop):
            entry = entries[table, of_slot[table, gap_state & np.uint64(SCALE - 1)]]
            gap_state, at = _next(gap_state, entry, words, at, end)
            number, place = _more(entry, raw, place, last_byte)
            rank += number + 1
            ranks[i] = rank
            entry = entries[table + 1, of_slot[table + 1, step_state & np.uint64(SCALE - 1)]]
            step_state, at = _next(step_state, entry, words, at, end)
            number, place = _more(entry, raw, place, last_byte)
            number += 1
            large |= number > most
            steps[i] = (number >> 1) ^ -(number & 1)
        beyond |= rank >= below
    if at != end or gap_state != np.uint64(LOW) or step_state != np.uint64(LOW):
        return 1, 0
    return 2 if beyond else 3 if large else 0, place
