"""Changes to bytes and back: of each a rank's gap and a step, tokens, entropy coding and raw bits in one compiled loop.

Changes come in runs, those of one class; all of a run have the tables of its model: `2 * model` for gaps, and the next one
for steps. As in `rans`, but with one state for gaps and one for steps, that take words from one stream; as in `tokens`, with
the raw bits of a gap and then of its step. Must not know what a class is, nor where a run's numbers are told.

A gap is a rank less the rank before it in its run, less 1; before the first comes -1. A step's number is its zigzag, less 1: no
step is 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit

from p2p.codec.rans import BITS, LOW, SCALE
from p2p.codec.tokens import DIRECT, FIRST, RAW_BITS, TOKENS
from p2p.codec.vectors import highest_bit, load_bits, store_bits
from p2p.errors import Refusal

_DIVISION = 44
"""For a state x < slots << (32 - BITS): x // slots == x * ceil(2**_DIVISION / slots) >> _DIVISION, and that fits 64 bits."""

_SLOTS, _START, _WIDTH, _NUMBER = np.uint64(0), np.uint64(13), np.uint64(25), np.uint64(30)
"""Where an entry of a decoder's table has a token's slots, its first slot, its raw bits and its first number."""


@dataclass(frozen=True, slots=True)
class ChangeTokens:
    """What is to be written, before its tables are made."""

    gaps: np.ndarray
    """uint8 [changes]"""
    steps: np.ndarray
    """uint8 [changes]"""
    counts: np.ndarray
    """int64 [tables, TOKENS]: how often each occurs"""


def tokens_of(counts: np.ndarray, models: np.ndarray, ranks: np.ndarray, steps: np.ndarray) -> ChangeTokens:
    """Runs of `counts` (int64 [runs]) changes with `models` (int64 [runs]); `ranks` uint32 and `steps` uN, [changes]."""
    found = ChangeTokens(
        np.empty(len(ranks), np.uint8), np.empty(len(ranks), np.uint8),
        np.zeros((2 * (int(models.max()) + 1), TOKENS), np.int64),
    )  # fmt: skip
    _tokens(counts, models, ranks, steps, found.gaps, found.steps, found.counts)
    return found


def write(
    counts: np.ndarray, models: np.ndarray, ranks: np.ndarray, steps: np.ndarray, tokens: ChangeTokens, tables: np.ndarray
) -> tuple[bytes, bytes]:
    """(token words, raw bits) of what `tokens` were made of, by `tables` (int64 [tables, TOKENS])."""
    inverse = ((1 << _DIVISION) + tables - 1) // np.maximum(tables, 1)
    words = np.empty(2 * len(ranks) + 5, "<u2")
    begin = _write_words(
        counts, models, tokens.gaps, tokens.steps, tables, np.cumsum(tables, axis=1) - tables, inverse.astype(np.uint64), words
    )
    size = (int(tokens.counts.sum(axis=0) @ RAW_BITS) + 7) // 8
    raw = np.zeros(size + 8, np.uint8)
    _write_raw(counts, ranks, steps, raw)
    return words[begin:].tobytes(), raw[:size].tobytes()


def read(
    words: memoryview, raw: memoryview, counts: np.ndarray, models: np.ndarray, tables: np.ndarray, below: int, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """(ranks uint32, steps `dtype`) that `write` was given, [counts.sum()]; ranks rise within a run and are less than `below`.
    Refusal when the bytes are not just what it writes."""
    if len(words) % 2 or len(words) < 8:
        raise Refusal(f"{len(words)} bytes are no stream of tokens")
    # Copies, whose ends can be read beyond.
    stream = np.zeros(len(words) // 2 + 1, "<u2")
    stream[:-1].view(np.uint8)[:] = words
    bits = np.zeros(len(raw) + 8, np.uint8)
    bits[:-8] = raw
    of_slot, entries = np.empty((len(tables), SCALE), np.uint8), np.zeros((len(tables), TOKENS), np.uint64)
    _fill(tables, FIRST, RAW_BITS, of_slot, entries)
    count = int(counts.sum())
    ranks, steps = np.empty(count, np.uint32), np.empty(count, dtype)
    fault, used = _read(stream, bits, counts, models, of_slot, entries, below, np.iinfo(dtype).max, ranks, steps)
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
    return ranks, steps


@njit(nogil=True, cache=True)
def _token(number):  # type: ignore[no-untyped-def]
    """As `tokens.tokens_of`."""
    if number < DIRECT:
        return number
    octave = highest_bit(np.uint64(number))
    return DIRECT + 4 * (octave - 3) + ((number >> (octave - 2)) & 3)


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
            token = _token(rank - last - 1)
            last = rank
            gap_tokens[i] = token
            held[table, token] += 1
            token = _token((((step << 1) ^ -(step >> (bits - 1))) & most) - 1)
            step_tokens[i] = token
            held[table + 1, token] += 1


@njit(nogil=True, cache=True)
def _put(state, slots, start, inverse, words, at):  # type: ignore[no-untyped-def]
    """(state, where its words begin) after a token. Without a branch, which a processor would guess wrong half of the time: what
    is written and not kept is overwritten. There is room for a word below `at`."""
    full = state >= slots << np.uint64(32 - BITS)
    words[at - 1] = state & np.uint64(0xFFFF)
    at -= full
    state = state >> np.uint64(16) if full else state
    quotient = state * inverse >> np.uint64(_DIVISION)
    return (quotient << np.uint64(BITS)) + (state - quotient * slots) + start, at


@njit(nogil=True, cache=True)
def _write_words(counts, models, gap_tokens, step_tokens, slots, starts, inverses, words):  # type: ignore[no-untyped-def]
    """Fills `words` from its end; returns where they begin. Backwards, for the decoder goes forwards."""
    at, start = len(words), len(gap_tokens)
    gap_state = step_state = np.uint64(LOW)
    for run in range(len(counts) - 1, -1, -1):
        start, stop = start - counts[run], start
        table = 2 * models[run]
        for i in range(stop - 1, start - 1, -1):
            token = step_tokens[i]
            step_state, at = _put(
                step_state, np.uint64(slots[table + 1, token]), np.uint64(starts[table + 1, token]),
                inverses[table + 1, token], words, at,
            )  # fmt: skip
            token = gap_tokens[i]
            gap_state, at = _put(
                gap_state, np.uint64(slots[table, token]), np.uint64(starts[table, token]), inverses[table, token], words, at
            )
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
    """(state, where its words go on) after the token of its lowest bits, which has `entry`. Beyond the end it reads the end."""
    slots, start = entry & np.uint64(0x1FFF), entry >> _START & np.uint64(SCALE - 1)
    state = slots * (state >> np.uint64(BITS)) + (state & np.uint64(SCALE - 1)) - start
    more = state << np.uint64(16) | np.uint64(words[min(at, end)])
    short = state < np.uint64(LOW)
    return more if short else state, at + short


@njit(nogil=True, cache=True)
def _more(entry, raw, place, last):  # type: ignore[no-untyped-def]
    """(number, where its raw bits end). Beyond the end it reads the end."""
    width = entry >> _WIDTH & np.uint64(31)
    found = load_bits(raw, min(place >> 3, last)) >> np.uint64(place & 7)
    return np.int64((entry >> _NUMBER) + (found & ((np.uint64(1) << width) - np.uint64(1)))), place + np.int64(width)


@njit(nogil=True, cache=True)
def _read(words, raw, counts, models, of_slot, entries, below, most, ranks, steps):  # type: ignore[no-untyped-def]
    """(what is wrong, raw bits used). 1: words left over or too few, or states that do not end where the encoder's began;
    2: a rank that is not `below`; 3: a step of more than `most`."""
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
