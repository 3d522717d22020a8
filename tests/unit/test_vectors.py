"""Sixty-four words at once: each function does what numpy does, at any place of any words."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from p2p.codec import vectors
from p2p.codec.vectors import BLOCK
from p2p.layout import WORD

# Intrinsics live in compiled code alone, so each has a function around it.
different = njit(lambda ones, others, at: vectors.different(ones, others, at))
equal = njit(lambda words, at, value: vectors.equal(words, at, value))
at_most = njit(lambda words, at, value: vectors.at_most(words, at, value))
outside = njit(lambda words, at, low, span: vectors.outside(words, at, low, span))
copy_block = njit(lambda words, at, out, to: vectors.copy_block(words, at, out, to))
place_of = njit(lambda bits, rank: vectors.place_of(bits, rank))


@njit
def stream_block(words, at, out, to):  # type: ignore[no-untyped-def]
    vectors.stream_block(words, at, out, to)
    vectors.settle()


put_octets = njit(lambda words, at, shift, octets, to: vectors.put_octets(words, at, shift, octets, to))
expect = njit(lambda words, at: vectors.expect(words, at))
count_bits = njit(lambda bits: vectors.count_bits(bits))
lowest_bit = njit(lambda bits: vectors.lowest_bit(bits))
highest_bit = njit(lambda bits: vectors.highest_bit(bits))
load_bits = njit(lambda octets, at: vectors.load_bits(octets, at))
store_bits = njit(lambda octets, at, bits: vectors.store_bits(octets, at, bits))

SIZES = [1, 2, 4]


def mask(found: np.ndarray) -> int:
    return sum(1 << i for i in np.flatnonzero(found).tolist())


def words_of(seed: int, size: int, count: int) -> np.ndarray:
    """Few values, so that equal ones are common, among them the least and the largest."""
    rng = np.random.default_rng(seed)
    values = np.array([0, 1, 2, 2 ** (8 * size - 1) - 1, 2 ** (8 * size - 1), 2 ** (8 * size) - 1, *rng.integers(0, 256, 4)])
    return rng.choice(values.astype(WORD[size]), count)


@given(st.integers(0, 2**32 - 1), st.sampled_from(SIZES), st.integers(0, 70))
@settings(max_examples=100, deadline=None)
def test_comparisons_are_numpys(seed: int, size: int, at: int) -> None:
    words, others = words_of(seed, size, at + BLOCK + seed % 3), words_of(seed + 1, size, at + BLOCK + seed % 3)
    here, value = words[at : at + BLOCK], words[0]
    assert different(words, others, at) == mask(here != others[at : at + BLOCK])
    assert equal(words, at, value) == mask(here == value)
    assert at_most(words, at, value) == np.count_nonzero(here[:32] <= value)
    low, high = sorted(words_of(seed + 2, size, 2).tolist())
    kind = WORD[size].type
    assert outside(words, at, kind(low), kind(high - low)) == mask((here < low) | (here > high))


@given(st.integers(0, 2**32 - 1), st.sampled_from(SIZES), st.integers(0, 70), st.integers(0, 31))
@settings(max_examples=100, deadline=None)
def test_words_are_moved_and_nothing_beside_them(seed: int, size: int, at: int, shift: int) -> None:
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 2 ** (8 * size), at + BLOCK + 5, dtype=WORD[size])
    for move, to in ((copy_block, seed % 40), (stream_block, seed % 3 * 16)):
        room = np.full((BLOCK + 40) * size + vectors.STREAMED, 7, np.uint8)
        out = room[-room.ctypes.data % vectors.STREAMED :][: (BLOCK + 40) * size].view(WORD[size])
        before = out.copy()
        move(words, at, out, to)
        before[to : to + BLOCK] = words[at : at + BLOCK]
        assert np.array_equal(out, before)
    octets, to = np.full(BLOCK + 40, 7, np.uint8), seed % 40
    put_octets(words, at, shift % (8 * size), octets, to)
    assert np.array_equal(octets[to : to + BLOCK], (words[at : at + BLOCK] >> shift % (8 * size)) & 255)
    assert (octets[:to] == 7).all() and (octets[to + BLOCK :] == 7).all()


def test_what_is_expected_may_lie_beyond_the_end() -> None:
    words = np.arange(10, dtype=WORD[4])
    for at in (0, 9, 10**6, -(10**9)):
        expect(words, at)
    assert words.tolist() == list(range(10))


@given(st.integers(0, 2**64 - 1) | st.integers(0, 63).map(lambda place: 1 << place) | st.just(0))
@settings(max_examples=200, deadline=None)
def test_bits_are_counted_and_placed(bits: int) -> None:
    places = [i for i in range(64) if bits >> i & 1]
    assert count_bits(np.uint64(bits)) == len(places)
    assert lowest_bit(np.uint64(bits)) == (places[0] if places else 64)
    assert highest_bit(np.uint64(bits)) == (places[-1] if places else -1)
    for rank, place in enumerate(places):
        assert place_of(np.uint64(bits), np.uint64(rank)) == place == vectors.place_of(bits, rank)


@pytest.mark.parametrize("at", range(9))
def test_eight_octets_at_any_place(at: int) -> None:
    octets = np.arange(1, 18, dtype=np.uint8)
    assert load_bits(octets, at) == int.from_bytes(octets[at : at + 8].tobytes(), "little")
    store_bits(octets, at, np.uint64(0x1122334455667788))
    expected = np.arange(1, 18, dtype=np.uint8)
    expected[at : at + 8] = np.frombuffer((0x1122334455667788).to_bytes(8, "little"), np.uint8)
    assert np.array_equal(octets, expected)
