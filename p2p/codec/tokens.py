"""Numbers to tokens: a token says about how large a number is, raw bits beside it say which one it is.

Below DIRECT a number is its own token; above, each octave has four tokens. So few tokens, whose frequencies are worth
learning, carry all that a smooth distribution has to tell, and the bits within a token are as good as random. Must not know
what is counted.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from p2p.codec.vectors import highest_bit

DIRECT = 8
"""Numbers below this are their own token: the smallest numbers are the most frequent, and a quarter of an octave below 8 would be
less than one number."""

TOKENS = DIRECT + 4 * 29
"""How many tokens there are: DIRECT, and four for each of the 29 octaves from 8 up to 2**32, more than any rank or step needs."""


def _ladder() -> tuple[np.ndarray, np.ndarray]:
    """(int64 first number of each token, int64 raw bits of each token)"""
    first, raw = list(range(DIRECT)), [0] * DIRECT
    for octave in range(3, 32):
        for quarter in range(4):
            first.append((1 << octave) + (quarter << (octave - 2)))
            raw.append(octave - 2)
    return np.array(first, np.int64), np.array(raw, np.int64)


FIRST, RAW_BITS = _ladder()


def tokens_of(numbers: np.ndarray) -> np.ndarray:
    """uint8 [n] for `numbers` (unsigned or signed integers [n], 0 to 2**32 - 1)."""
    tokens = np.empty(len(numbers), np.uint8)
    _tokens_of(numbers, tokens)
    return tokens


def write_raw(numbers: np.ndarray, tokens: np.ndarray) -> bytes:
    """The raw bits beside the tokens, lowest bits first, padded to whole bytes."""
    out = np.zeros(raw_bytes(tokens), np.uint8)
    _write_raw(numbers, tokens, FIRST, RAW_BITS, out)
    return out.tobytes()


def raw_bytes(tokens: np.ndarray) -> int:
    """Bytes that the raw bits beside `tokens` (uint8 [n], each below TOKENS) take."""
    return (int(histogram(tokens)[:TOKENS] @ RAW_BITS) + 7) // 8


def histogram(values: np.ndarray) -> np.ndarray:
    """int64 [256]: how often each value occurs in `values` (uint8 [n]). It does what numpy's bincount does, which first makes an
    int64 of every value."""
    counts = np.zeros((4, 256), np.int64)
    _histogram(values, counts)
    return counts.sum(axis=0)


@njit(nogil=True, cache=True)
def _histogram(values, counts):  # type: ignore[no-untyped-def]
    # Four rows in turn: equal neighbours would wait for each other's store.
    stop = len(values) // 4 * 4
    for i in range(0, stop, 4):
        counts[0, values[i]] += 1
        counts[1, values[i + 1]] += 1
        counts[2, values[i + 2]] += 1
        counts[3, values[i + 3]] += 1
    for i in range(stop, len(values)):
        counts[0, values[i]] += 1


@njit(nogil=True, cache=True)
def token_of(number):  # type: ignore[no-untyped-def]
    """The token of one number (int64, 0 to 2**32 - 1), for compiled loops."""
    if number < DIRECT:
        return number
    octave = highest_bit(np.uint64(number))
    return DIRECT + 4 * (octave - 3) + ((number >> (octave - 2)) & 3)


@njit(nogil=True, cache=True)
def _tokens_of(numbers, tokens):  # type: ignore[no-untyped-def]
    for i in range(len(numbers)):
        tokens[i] = token_of(np.int64(numbers[i]))


@njit(nogil=True, cache=True)
def _write_raw(numbers, tokens, first, widths, out):  # type: ignore[no-untyped-def]
    held = np.uint64(0)
    count, at = 0, 0
    for i in range(len(tokens)):
        if tokens[i] >= DIRECT:
            held |= np.uint64(np.int64(numbers[i]) - first[tokens[i]]) << np.uint64(count)
            count += widths[tokens[i]]
            while count >= 8:
                out[at] = held & np.uint64(255)
                held >>= np.uint64(8)
                count -= 8
                at += 1
    if count:
        out[at] = held & np.uint64(255)
