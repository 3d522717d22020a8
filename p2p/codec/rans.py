"""Entropy coding: tokens to 16-bit words and back, by range asymmetric numeral systems with tables made beforehand.

rANS (Duda 2013; the form with two interleaved states after Giesen 2014). Which table a token is coded with, both sides know.
Deterministic in integers. Must not know what tokens mean.

A table is a row of slots: how many of SCALE each token has. It is made from levels, four bits a token, which are what is written.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from p2p.errors import Refusal

BITS = 12
SCALE = 1 << BITS
"""Slots of a table: a token costs log2(SCALE / its slots) bits."""

_WEIGHTS = np.array([0] + [(16 * 3**k) // 2**k for k in range(15)], np.int64)
"""What a level stands for: half as much again as the one below."""

TOP = len(_WEIGHTS) - 1
"""The level of a table's most frequent token."""

_BETWEEN = np.sqrt(_WEIGHTS[1:-1] * _WEIGHTS[2:].astype(np.float64)) / _WEIGHTS[-1]

LOW = 1 << 16
"""States are in [LOW, LOW << 16)."""


def frequencies(tokens: np.ndarray, rows: np.ndarray, tables: int) -> np.ndarray:
    """int64 [tables, 256]: how often each token (uint8 [n]) occurs with each row (uint8 [n])."""
    counts = np.zeros((tables, 256), np.int64)
    _count(tokens, rows, counts)
    return counts


def levels_of(counts: np.ndarray) -> np.ndarray:
    """uint8 [tables, tokens]: how often each token occurs against its table's most frequent one, in 15 steps (0: never).

    `counts` int [tables, tokens]; one must occur in each. A step of half as much again costs a token 0.01 bits in the mean,
    and a table half a byte a token.
    """
    nearest = np.searchsorted(_BETWEEN, counts / counts.max(axis=1, keepdims=True)) + 1
    return np.where(counts > 0, nearest, 0).astype(np.uint8)


def tables_of(levels: np.ndarray) -> np.ndarray:
    """int64 [tables, tokens]: slots in proportion to what the levels stand for, at least 1 for each that is not 0."""
    weights = _WEIGHTS[levels]
    slots = np.where(weights > 0, np.maximum(1, weights * SCALE // weights.sum(axis=1, keepdims=True)), 0)
    # What rounding left over or took too much goes to the token that notices it least.
    slots[np.arange(len(slots)), np.argmax(slots, axis=1)] += SCALE - slots.sum(axis=1)
    return slots


def write_levels(levels: np.ndarray) -> bytes:
    """One table's, up to its last token that occurs."""
    found = levels.tobytes().rstrip(b"\0")
    octets = np.frombuffer(found + b"\0" * (len(found) % 2), np.uint8)
    return bytes([len(found) - 1]) + (octets[::2] | octets[1::2] << 4).tobytes()


def read_levels(body: memoryview, at: int, levels: np.ndarray) -> int:
    """Fill `levels` (uint8 [tables, tokens]) from where `at` is; where they ended. Refusal on anything `write_levels` does not
    write."""
    octets = np.array(body[at : at + levels.shape[0] * (1 + (levels.shape[1] + 1) // 2)], np.uint8)
    stop = _read_levels(octets, levels)
    if stop < 0:
        raise Refusal("payload ends in a table, or has one in a form that its encoder does not use")
    return at + int(stop)


def encode(tokens: np.ndarray, rows: np.ndarray, tables: np.ndarray) -> bytes:
    """`tokens` uint8 [n], each coded with table `rows` (uint8 [n]) of `tables` (int64 [tables, tokens]), which must have it."""
    words = np.empty(len(tokens) + 4, "<u2")
    return words[_encode(tokens, rows, tables, np.cumsum(tables, axis=1) - tables, words) :].tobytes()


def decode(body: memoryview, rows: np.ndarray, tables: np.ndarray) -> np.ndarray:
    """uint8 [n]: the tokens, by the tables that `rows` (uint8 [n], each below len(tables)) says. Refusal when `body` is not
    just what `encode` makes of them."""
    if len(body) % 2 or len(body) < 8:
        raise Refusal(f"{len(body)} bytes are no stream of tokens")
    tokens, slots = np.empty(len(rows), np.uint8), np.empty((len(tables), SCALE), np.uint32)
    _fill(tables, slots)
    if not _decode(np.frombuffer(body, "<u2"), rows, slots, tokens):
        raise Refusal("stream of tokens is cut short or corrupt")
    return tokens


@njit(nogil=True, cache=True)
def _read_levels(octets, levels):  # type: ignore[no-untyped-def]
    """Where they ended; -1 for what `write_levels` does not write."""
    at, room = np.int64(0), levels.shape[1]
    for table in range(len(levels)):
        if at == len(octets):
            return -1
        count = np.int64(octets[at]) + 1
        at += 1
        if count > room or at + (count + 1) // 2 > len(octets):
            return -1
        most = last = 0
        for k in range(room):
            if k < count:
                last = int(octets[at + k // 2] >> (k % 2 * 4)) & 15
            levels[table, k] = last if k < count else 0
            most = max(most, last)
        if last == 0 or most != TOP or (count % 2 and octets[at + count // 2] >> 4):
            return -1
        at += (count + 1) // 2
    return at


@njit(nogil=True, cache=True)
def _count(tokens, rows, counts):  # type: ignore[no-untyped-def]
    for i in range(len(tokens)):
        counts[rows[i], tokens[i]] += 1


@njit(nogil=True, cache=True)
def _fill(tables, slots):  # type: ignore[no-untyped-def]
    """Of each slot of each table its token (low 8 bits), the token's slots less 1 (12), which of them it is (12)."""
    for row in range(len(tables)):
        at = 0
        for token in range(tables.shape[1]):
            count = tables[row, token]
            for k in range(count):
                slots[row, at] = token | (count - 1) << 8 | k << 20
                at += 1


@njit(nogil=True, cache=True)
def _encode(tokens, rows, freq, first, words):  # type: ignore[no-untyped-def]
    """Fills `words` from its end; returns where they begin. Backwards, for the decoder goes forwards."""
    at = len(words)
    now = after = np.int64(LOW)
    for i in range(len(tokens) - 1, -1, -1):
        now, after = after, now
        count = freq[rows[i], tokens[i]]
        if now >= count << (32 - BITS):
            at -= 1
            words[at] = now & 0xFFFF
            now >>= 16
        now = ((now // count) << BITS) + now % count + first[rows[i], tokens[i]]
    words[at - 4], words[at - 3] = now & 0xFFFF, now >> 16
    words[at - 2], words[at - 1] = after & 0xFFFF, after >> 16
    return at - 4


@njit(nogil=True, cache=True)
def _decode(words, rows, slots, tokens):  # type: ignore[no-untyped-def]
    """Whether all words were used and the states ended where the encoder's began."""
    now = np.int64(words[0]) | np.int64(words[1]) << 16
    after = np.int64(words[2]) | np.int64(words[3]) << 16
    at, end = 4, len(words)
    if now < LOW or after < LOW:
        return False
    for i in range(len(rows)):
        entry = np.int64(slots[rows[i], now & (SCALE - 1)])
        tokens[i] = entry & 255
        now = (((entry >> 8) & 4095) + 1) * (now >> BITS) + (entry >> 20)
        if now < LOW:
            if at == end:
                return False
            now = now << 16 | np.int64(words[at])
            at += 1
        now, after = after, now
    return at == end and now == LOW and after == LOW
