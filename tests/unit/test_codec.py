"""The weight codec: lossless for every bit pattern, and hostile payloads end in Refusal."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p.codec import decode_segment, encode_segment
from p2p.codec.base import Coding
from p2p.codec.planes import join_planes, pack, split_planes, unzigzag, zigzag
from p2p.codec.registry import CODINGS, DENSE, EMPTY, PLAIN, RAW, SPARSE
from p2p.errors import Refusal
from p2p.layout import WORD

SPECIAL = {  # +0, -0, +Inf, -Inf, NaNs with payloads, largest, all ones, smallest subnormals
    1: [0x00, 0x80, 0x7E, 0x7F, 0xFF, 0x01, 0x81, 0x7C],
    2: [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x0001, 0x8001],
    4: [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFFFFFFFF, 1, 0x80000001],
    8: [0, 1 << 63, 0x7FF << 52, 0xFFF << 52, (0x7FF << 52) | 5, 2**64 - 1, 1, (1 << 63) | 1],
}


@st.composite
def pairs(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """(new, base): words of one size, any length from 0, any share changed, any bits."""
    size = draw(st.sampled_from([1, 2, 4, 8]))
    n = draw(st.one_of(st.integers(0, 8), st.integers(0, 3000)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    base = rng.integers(0, 2 ** (8 * size), n, dtype=WORD[size], endpoint=False)
    if draw(st.booleans()):
        base = rng.choice(np.array(SPECIAL[size], WORD[size]), n)
    new = base.copy()
    hit = rng.random(n) < draw(st.sampled_from([0, 0.002, 0.03, 0.4, 1]))
    how = draw(st.sampled_from(["ulp", "special", "random"]))
    if how == "ulp":
        new[hit] += rng.integers(-300, 300, int(hit.sum())).astype(np.int64).astype(WORD[size])
    elif how == "special":
        new[hit] = rng.choice(np.array(SPECIAL[size], WORD[size]), int(hit.sum()))
    else:
        new[hit] = rng.integers(0, 2 ** (8 * size), int(hit.sum()), dtype=WORD[size])
    return new, base


@given(pairs())
@settings(max_examples=300, deadline=None)
def test_round_trip_with_and_without_a_base(pair: tuple[np.ndarray, np.ndarray]) -> None:
    new, base = pair
    before, out = base.copy(), np.empty_like(new)
    info = decode_segment(encode_segment(new, base), base, out)
    assert out.tobytes() == new.tobytes() and base.tobytes() == before.tobytes()
    assert info.changed == np.count_nonzero(new != base)
    out = np.empty_like(new)
    info = decode_segment(encode_segment(new, None), None, out)
    assert out.tobytes() == new.tobytes() and info.coding in ("raw", "plain") and info.changed == len(new)


@given(pairs(), st.sampled_from([SPARSE, DENSE, RAW, PLAIN]))
@settings(max_examples=300, deadline=None)
def test_every_coding_round_trips_whatever_the_density(pair: tuple[np.ndarray, np.ndarray], coding: Coding) -> None:
    new, base = pair
    if coding is SPARSE and not (new != base).any():
        base = base.copy()
        if not len(base):
            return
        base[0] ^= WORD[base.itemsize].type(1)
    out = np.empty_like(new)
    info = decode_segment(bytes([coding.id]) + coding.encode(new, base), base, out)
    assert out.tobytes() == new.tobytes()
    assert (info.coding, info.changed) == (coding.name, int(np.count_nonzero(new != base)))


@given(pairs())
def test_zigzag_and_planes_are_bijections(pair: tuple[np.ndarray, np.ndarray]) -> None:
    new, base = pair
    z = zigzag(new, base)
    assert np.array_equal(base + unzigzag(z), new)
    assert np.array_equal(join_planes(split_planes(z), z.dtype), z)


def test_zigzag_orders_differences_by_size() -> None:
    base = np.full(5, 100, WORD[2])
    assert zigzag(np.array([100, 99, 101, 98, 102], WORD[2]), base).tolist() == [0, 1, 2, 3, 4]
    assert zigzag(np.array([0], WORD[2]), np.array([0xFFFF], WORD[2])).tolist() == [2]  # wraps: one up


def test_the_choice_follows_the_density() -> None:
    rng = np.random.default_rng(1)
    base = rng.integers(0, 2**16, 20_000, dtype=WORD[2])

    def coding(new: np.ndarray) -> int:
        return encode_segment(new, base)[0]

    few, noise, shifted = base.copy(), rng.integers(0, 2**16, len(base), dtype=WORD[2]), base + WORD[2].type(1)
    few[::100] += WORD[2].type(1)
    assert [coding(base.copy()), coding(few), coding(shifted)] == [EMPTY.id, SPARSE.id, DENSE.id]
    assert coding(np.zeros_like(base)) == RAW.id, "a delta that is not smaller than the words themselves is not used"
    assert len(encode_segment(noise, base)) == 1 + base.nbytes, "what cannot be made smaller costs one byte"
    assert encode_segment(noise, base)[0] == PLAIN.id
    assert encode_segment(few, base) == encode_segment(few, base)


def test_gaps_beyond_a_block_and_large_values() -> None:
    """Positions and values carry over the decoder's block edge."""
    rng = np.random.default_rng(2)
    base = rng.integers(0, 2**16, 1_500_000, dtype=WORD[2])
    new = base.copy()
    hit = np.flatnonzero(rng.random(len(base)) < 0.45)
    new[hit] += rng.integers(1, 400, len(hit)).astype(WORD[2])
    new[[0, -1]] ^= WORD[2].type(0x8000)
    out = np.empty_like(new)
    payload = bytes([SPARSE.id]) + SPARSE.encode(new, base)
    assert decode_segment(payload, base, out).changed == np.count_nonzero(new != base)
    assert np.array_equal(out, new)


def _attempt(payload: bytes, base: np.ndarray | None, n: int, size: int) -> str:
    """Decode into the middle of a larger array; returns "ok" or the reason, and checks that nothing else moved."""
    guard = np.full(n + 32, 0x5A, WORD[size])
    before = None if base is None else base.tobytes()
    try:
        decode_segment(payload, base, guard[16 : 16 + n])
        verdict = "ok"
    except Refusal as refusal:
        verdict = refusal.reason
        assert verdict
    assert (guard[:16] == 0x5A).all() and (guard[16 + n :] == 0x5A).all()
    assert base is None or base.tobytes() == before
    return verdict


@given(st.binary(max_size=200), st.sampled_from([1, 2, 4, 8]), st.integers(0, 100), st.booleans())
@settings(max_examples=400, deadline=None)
def test_random_bytes_are_refused_or_harmless(payload: bytes, size: int, n: int, with_base: bool) -> None:
    base = np.arange(n).astype(WORD[size]) if with_base else None
    verdict = _attempt(payload, base, n, size)
    if not payload or payload[0] not in CODINGS:
        assert verdict != "ok"


@given(pairs(), st.sampled_from([SPARSE, DENSE, RAW, PLAIN]), st.data())
@settings(max_examples=400, deadline=None)
def test_damaged_payloads_are_refused_or_harmless(
    pair: tuple[np.ndarray, np.ndarray], coding: Coding, data: st.DataObject
) -> None:
    new, base = pair
    payload = bytes([coding.id]) + coding.encode(new, base)
    cut = data.draw(st.integers(0, len(payload) - 1))
    assert _attempt(payload[:cut], base, len(new), new.itemsize) != "ok", "truncated"
    assert _attempt(payload + b"\0", base, len(new), new.itemsize) != "ok", "trailing"
    bit = data.draw(st.integers(0, 8 * len(payload) - 1))
    flipped = bytearray(payload)
    flipped[bit // 8] ^= 1 << bit % 8
    _attempt(bytes(flipped), base, len(new), new.itemsize)


@given(st.lists(st.binary(max_size=60), min_size=0, max_size=6), st.sampled_from([0, 1, 2, 3]), st.integers(0, 60))
@settings(max_examples=400, deadline=None)
def test_well_formed_sections_with_any_content(streams: list[bytes], coding: int, n: int) -> None:
    """Past the zstd frames: arbitrary gap, value and plane streams."""
    body = pack([np.frombuffer(s, np.uint8) if s else np.zeros(0, np.uint8) for s in streams])
    _attempt(bytes([coding]) + body, np.arange(n).astype(WORD[2]), n, 2)


def _u8(*values: int) -> np.ndarray:
    return np.array(values, np.uint8)


@pytest.mark.parametrize(
    ("streams", "reason"),
    [
        ([_u8(), _u8(), _u8(), _u8()], "no changed word"),
        ([_u8(3, 255), _u8(0), _u8(), _u8()], "no end"),
        ([_u8(10), _u8(0), _u8(), _u8()], "beyond"),
        ([_u8(4, 5), _u8(0, 0), _u8(), _u8()], "beyond"),
        ([_u8(9), _u8(0, 0), _u8(), _u8()], "at most 1"),
        ([_u8(9, 0), _u8(0), _u8(), _u8()], "expected 2"),
        ([_u8(*[0] * 11), _u8(*[0] * 11), _u8(), _u8()], "at most 10"),
        ([_u8(9), _u8(255), _u8(254), _u8(0)], "form"),
        ([_u8(9), _u8(255), _u8(255), _u8(255)], "form"),
        ([_u8(9), _u8(255), _u8(), _u8()], "expected 1"),
        ([_u8(9), _u8(0), _u8()], "ends before"),
        ([_u8(9), _u8(0), _u8(), _u8(), _u8()], "after the end"),
    ],
)
def test_crafted_sparse_deltas(streams: list[np.ndarray], reason: str) -> None:
    base = np.zeros(10, WORD[2])
    with pytest.raises(Refusal, match=reason):
        decode_segment(bytes([SPARSE.id]) + pack(streams), base, np.empty_like(base))


def test_the_last_word_can_change() -> None:
    base, out = np.zeros(10, WORD[2]), np.empty(10, WORD[2])
    decode_segment(bytes([SPARSE.id]) + pack([_u8(9), _u8(1), _u8(), _u8()]), base, out)
    assert out.tolist() == [0] * 9 + [1]


@pytest.mark.parametrize("size", [1 << 30, 1 << 62, 101])
def test_a_frame_that_claims_much_costs_little(size: int) -> None:
    """A zstd header may claim any size: nothing is allocated for it."""
    honest = zstandard.ZstdCompressor().compress(bytes(100))
    claim = honest[:4] + bytes([0xE0]) + struct.pack("<Q", size) + honest[6:]  # single segment, 8-byte content size
    assert zstandard.frame_content_size(claim) == size
    tracemalloc.start()
    with pytest.raises(Refusal, match="claims"):
        decode_segment(bytes([RAW.id]) + struct.pack("<I", len(claim)) + claim, None, np.empty(100, np.uint8))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_frame_of_unknown_size_or_a_second_frame_is_refused() -> None:
    unknown = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(100))
    twice = zstandard.ZstdCompressor().compress(bytes(100)) * 2
    skippable = struct.pack("<II", 0x184D2A50, 4) + b"\0" * 4
    for frame in (unknown, twice, skippable, b""):
        with pytest.raises(Refusal):
            decode_segment(bytes([RAW.id]) + struct.pack("<I", len(frame)) + frame, None, np.empty(100, np.uint8))


def test_a_delta_needs_its_base_and_arrays_must_fit() -> None:
    base = np.zeros(10, WORD[2])
    new = base.copy()
    new[3] = 7
    for coding in (EMPTY, SPARSE, DENSE):
        with pytest.raises(Refusal, match="needs a base"):
            decode_segment(bytes([coding.id]) + coding.encode(new, base), None, new.copy())
    with pytest.raises(ValueError, match="base is"):
        encode_segment(new, np.zeros(9, WORD[2]))
    with pytest.raises(ValueError, match="unsigned words"):
        encode_segment(new.astype(np.float32), None)
    with pytest.raises(ValueError, match="share memory"):
        decode_segment(encode_segment(new, base), base, base)


def _bf16(x: np.ndarray) -> np.ndarray:
    bits = x.astype("<f4").view("<u4").astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(WORD[2])


@pytest.mark.parametrize(("lr", "bits"), [(2e-7, 12.0), (1.7e-6, 9.5), (4.2e-5, 6.5)])
def test_bits_per_changed_value_stay_at_the_measured_mark(lr: float, bits: float) -> None:
    """Gaussian bf16 weights (sigma 0.02) with Adam-like steps: 0.5, 3 and 36 % changed."""
    rng = np.random.default_rng(0)
    master = rng.normal(0, 0.02, 1 << 20)
    base, new = _bf16(master), _bf16(master + lr * np.clip(rng.normal(0, 0.6, len(master)), -1.5, 1.5))
    payload = encode_segment(new, base)
    assert 8 * len(payload) / np.count_nonzero(new != base) < bits
    assert len(encode_segment(new, None)) < 0.7 * new.nbytes
