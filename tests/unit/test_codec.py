"""The weight codec: lossless for every bit pattern, and hostile payloads end in Refusal."""

from __future__ import annotations

import struct
import tracemalloc
from unittest import mock

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p.codec import decode_segment, encode_segment, rans, sparse
from p2p.codec.classes import CLASSES, SAMPLED, SHIFT, TILE, Changes, apply, find
from p2p.codec.planes import join_planes, pack, split_planes, zigzag
from p2p.codec.port import Coding
from p2p.codec.rans import SCALE, levels_of, read_levels, tables_of, write_levels
from p2p.codec.registry import CODINGS, DENSE, EMPTY, PLAIN, RAW, SPARSE
from p2p.codec.tokens import FIRST, RAW_BITS, tokens_of, write_raw
from p2p.codec.vectors import BLOCK
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
    n = draw(st.one_of(st.integers(0, 8), st.integers(0, 3000), st.sampled_from([2047, 2048, 2049, 4096, 20_001, 40_000])))
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
    payload, changed = encode_segment(new, base)
    decode_segment(payload, base, out)
    assert out.tobytes() == new.tobytes() and base.tobytes() == before.tobytes()
    assert changed == np.count_nonzero(new != base)
    out = np.empty_like(new)
    payload, changed = encode_segment(new, None)
    decode_segment(payload, None, out)
    assert out.tobytes() == new.tobytes() and payload[0] in (RAW.id, PLAIN.id) and changed == len(new)


any_share = mock.patch.object(sparse, "MOST", 1.0)


def encoded(coding: Coding, new: np.ndarray, base: np.ndarray) -> bytes | None:
    """A payload by this coding, where it is one for these words: SPARSE whatever the density, unless nothing changed."""
    if not len(new) or (coding is SPARSE and not (new != base).any()):
        return None
    with any_share:
        found = coding.encode(new, base)
    if found is None:  # it would take more than the words themselves
        assert coding is DENSE
        return None
    assert found[1] == np.count_nonzero(new != base)
    return bytes([coding.id]) + found[0]


@given(pairs(), st.sampled_from([SPARSE, DENSE, RAW, PLAIN]))
@settings(max_examples=300, deadline=None)
def test_every_coding_round_trips_whatever_the_density(pair: tuple[np.ndarray, np.ndarray], coding: Coding) -> None:
    new, base = pair
    payload = encoded(coding, new, base)
    if payload is None:
        return
    out = np.empty_like(new)
    with any_share:
        decode_segment(payload, base, out)
    assert out.tobytes() == new.tobytes()


def unzigzag(z: np.ndarray) -> np.ndarray:
    """Words: the difference mod 2^w that `zigzag` mapped to `z`."""
    return (z >> 1) ^ np.negative(z & z.dtype.type(1))


@given(pairs())
def test_zigzag_and_planes_are_bijections(pair: tuple[np.ndarray, np.ndarray]) -> None:
    new, base = pair
    z = zigzag(new, base)
    assert np.array_equal(base + ((z >> 1) ^ np.negative(z & z.dtype.type(1))), new)
    assert np.array_equal(join_planes(split_planes(z), z.dtype), z)


def test_zigzag_orders_differences_by_size() -> None:
    base = np.full(5, 100, WORD[2])
    assert zigzag(np.array([100, 99, 101, 98, 102], WORD[2]), base).tolist() == [0, 1, 2, 3, 4]
    assert zigzag(np.array([0], WORD[2]), np.array([0xFFFF], WORD[2])).tolist() == [2]  # wraps: one up


def test_the_choice_follows_the_density() -> None:
    rng = np.random.default_rng(1)
    base = rng.integers(0, 2**16, 20_000, dtype=WORD[2])

    def coding(new: np.ndarray) -> int:
        return encode_segment(new, base)[0][0]

    few, noise, shifted = base.copy(), rng.integers(0, 2**16, len(base), dtype=WORD[2]), base + WORD[2].type(1)
    few[::100] += WORD[2].type(1)
    assert [coding(base.copy()), coding(few), coding(shifted)] == [EMPTY.id, SPARSE.id, DENSE.id]
    assert coding(np.zeros_like(base)) == RAW.id, "a delta that is not smaller than the words themselves is not used"
    assert len(encode_segment(noise, base)[0]) == 1 + base.nbytes, "what cannot be made smaller costs one byte"
    assert coding(noise) == PLAIN.id
    assert encode_segment(few, base) == encode_segment(few, base)


@pytest.mark.parametrize("n", [1, 2, 3, 1001, 2048, 4097])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_first_and_last_words_can_change(n: int, size: int) -> None:
    base = np.arange(n).astype(WORD[size]) * WORD[size].type(37)
    for at in {0, (n - 1) // 2, n // 2, 63 % n, 64 % n, 2047 % n, n - 1}:
        new, out = base.copy(), np.empty_like(base)
        new[at] ^= WORD[size].type(1 << (8 * size - 1))
        for coding in (SPARSE, DENSE):
            payload = encoded(coding, new, base)
            if payload is not None:
                decode_segment(payload, base, out)
                assert np.array_equal(out, new)
            else:
                assert coding is DENSE and n <= 3


def test_a_class_costs_what_its_own_density_makes_it_cost() -> None:
    """Half of the words lie in a class that always changes, half in one that never does."""
    base = np.tile(np.array([0x3F80, 0x3A00], WORD[2]), 5000)
    new = base + np.tile(np.array([0, 1], WORD[2]), 5000)
    payload = encoded(SPARSE, new, base)
    assert payload is not None and len(payload) < 100


def test_each_class_may_have_a_model_of_its_own() -> None:
    rng = np.random.default_rng(2)
    base = rng.integers(0, 2**16, 1_000_000, dtype=WORD[2])
    new, out = base + (rng.random(len(base)) < 0.1).astype(WORD[2]), np.empty_like(base)
    payload, changed = encode_segment(new, base)
    assert payload[:3] == bytes([SPARSE.id, 255, 255])
    decode_segment(payload, base, out)
    assert changed == np.count_nonzero(new != base) and np.array_equal(out, new)


def ranks_by_definition(base: np.ndarray, new: np.ndarray) -> tuple[list[int], list[int]]:
    """(changes of each class, ranks in the order of classes), a word at a time."""
    seen, ranks = [0] * CLASSES, [[] for _ in range(CLASSES)]  # type: ignore[var-annotated]
    for b, n in zip(base.tolist(), new.tolist(), strict=True):
        c = (b >> SHIFT[base.itemsize]) & 255
        if b != n:
            ranks[c].append(seen[c])
        seen[c] += 1
    return [len(r) for r in ranks], [rank for of_class in ranks for rank in of_class]


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 4]), st.sampled_from(["sample", "few", "zeros", "all"]))
@settings(max_examples=40, deadline=None)
def test_ranks_are_what_they_are_called_whatever_the_sample_says(seed: int, size: int, how: str) -> None:
    """Some tiles of words. Which classes are counted 64 words at once is a guess from a sample, and may be wrong."""
    rng = np.random.default_rng(seed)
    n = int(1.5 * SAMPLED * TILE) + int(rng.integers(0, TILE))
    kinds = (np.arange(CLASSES) << SHIFT[size]).astype(WORD[size])
    base = rng.choice(kinds[rng.integers(0, CLASSES, {"sample": 40, "few": 3, "zeros": 20, "all": 4000}[how])], n)
    if how == "sample":  # what is sampled has one class, which nothing else has
        for start in range(0, n, SAMPLED * TILE):
            base[start : start + BLOCK] = kinds[5]
    elif how == "zeros":
        base[rng.random(n) < 0.7] = 0
    new = base.copy()
    hit = rng.random(n) < rng.choice([0.001, 0.05, 0.5])
    new[hit] += WORD[size].type(1)
    found, out = find(new, base, n), np.empty_like(base)
    assert found is not None
    assert (found.counts.tolist(), found.ranks.tolist()) == ranks_by_definition(base, new)
    assert apply(base, found, out) and np.array_equal(out, new)
    room = np.full((n + 2) * new.itemsize, 7, np.uint8).view(new.dtype)  # one of the two lies at no multiple of 16 bytes
    for first in (0, 1):
        room[:] = 7
        assert apply(base, found, room[first : first + n]) and np.array_equal(room[first : first + n], new)
        assert np.array_equal(np.delete(room, slice(first, first + n)), np.full(2, 7, new.dtype))
    if len(found.ranks):
        assert find(new, base, len(found.ranks) - 1) is None
        late = Changes(found.counts, found.ranks.copy(), found.steps)
        late.ranks[-1] += n  # beyond the last word of its class
        assert not apply(base, late, out)


def _attempt(payload: bytes, base: np.ndarray | None, n: int, size: int) -> str:
    """Decode into the middle of a larger array; returns "ok" or the reason, and checks that nothing else moved."""
    guard = np.full(n + 32, 0x5A, WORD[size])
    before = None if base is None else base.tobytes()
    try:
        with any_share:
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
    payload = encoded(coding, new, base)
    if payload is None:
        return
    cut = data.draw(st.integers(0, len(payload) - 1))
    assert _attempt(payload[:cut], base, len(new), new.itemsize) != "ok", "truncated"
    assert _attempt(payload + b"\0", base, len(new), new.itemsize) != "ok", "trailing"
    bit = data.draw(st.integers(0, 8 * len(payload) - 1))
    flipped = bytearray(payload)
    flipped[bit // 8] ^= 1 << bit % 8
    _attempt(bytes(flipped), base, len(new), new.itemsize)


@given(st.lists(st.binary(max_size=60), min_size=0, max_size=6), st.integers(0, 60))
@settings(max_examples=200, deadline=None)
def test_well_formed_sections_with_any_content(streams: list[bytes], n: int) -> None:
    """Past the zstd frames: arbitrary planes."""
    body = pack([np.frombuffer(s, np.uint8) if s else np.zeros(0, np.uint8) for s in streams])
    _attempt(bytes([RAW.id]) + body, np.arange(n).astype(WORD[2]), n, 2)


LEVELS = write_levels(np.array([15], np.uint8))  # a table of one token, number 0, that costs no bits
ONE = bytes([0, 0, 1])  # class 0, by model 0, has one change
WORDS = struct.pack("<I", 8) + struct.pack("<4H", 0, 1, 0, 1)  # two states at their beginning, and nothing between


def sparse_body(
    *, models: int = 1, classes: bytes, count: int = 1, levels: bytes = LEVELS + LEVELS, rest: bytes = WORDS
) -> bytes:
    return bytes([SPARSE.id, models - 1, count - 1]) + classes + levels + rest


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (sparse_body(classes=ONE), "ok"),
        (bytes([SPARSE.id]), "cut short"),
        (sparse_body(classes=ONE, count=2), "list of classes|out of order"),
        (sparse_body(classes=bytes([0, 1, 1])), "out of order"),
        (sparse_body(classes=bytes([1, 0, 1, 0, 0, 1]), count=2), "out of order"),
        (sparse_body(classes=bytes([0, 0, 1, 1, 2, 1]), count=2), "out of order"),
        (sparse_body(classes=bytes([0, 0, 0])), "no change in a class"),
        (sparse_body(classes=bytes([0, 0, 11])), "more than 2, of 10 words"),
        (sparse_body(classes=bytes([0, 0, 3])), "more than 2, of 10 words"),
        (sparse_body(classes=bytes([0, 0, 128, 128, 128, 128, 128, 1])), "does not end"),
        (sparse_body(classes=ONE, models=2), "its classes use 1"),
        (sparse_body(classes=ONE, levels=LEVELS, rest=b""), "ends in a table"),
        (sparse_body(classes=ONE, levels=LEVELS + bytes([0, 14])), "does not use"),
        (sparse_body(classes=ONE, levels=LEVELS + bytes([0, 15 | 16])), "does not use"),
        (sparse_body(classes=ONE, levels=LEVELS + bytes([1, 15])), "does not use"),
        (sparse_body(classes=ONE, levels=LEVELS + bytes([200] + [0xFF] * 101)), "does not use"),
        (sparse_body(classes=ONE, rest=b""), "before its token words"),
        (sparse_body(classes=ONE, rest=struct.pack("<I", 6) + WORDS[4:]), "no stream of tokens"),
        (sparse_body(classes=ONE, rest=struct.pack("<I", 2**32 - 1) + WORDS[4:-1]), "no stream of tokens"),
        (sparse_body(classes=ONE, rest=struct.pack("<I4H", 8, 0, 0, 0, 1)), "cut short or corrupt"),
        (sparse_body(classes=ONE, rest=struct.pack("<I4H", 8, 1, 1, 0, 1)), "cut short or corrupt"),
        (sparse_body(classes=ONE, rest=struct.pack("<I4H", 8, 0, 1, 1, 1)), "cut short or corrupt"),
        (sparse_body(classes=ONE, rest=struct.pack("<I5H", 10, 0, 1, 0, 1, 7)), "cut short or corrupt"),
        (sparse_body(classes=ONE, rest=WORDS + b"\0"), "1 bytes of raw bits, its tokens take 0"),
        (sparse_body(classes=bytes([7, 0, 1])), "reaches beyond"),
    ],
)
def test_crafted_sparse_deltas(body: bytes, reason: str) -> None:
    """Against ten words of one class: the one change that is well formed is at the first of them."""
    base, out = np.zeros(10, WORD[2]), np.empty(10, WORD[2])
    if reason.endswith("ok"):
        decode_segment(body, base, out)
        assert sorted(out.tolist()) == [0] * 9 + [0xFFFF]
        return
    with pytest.raises(Refusal, match=reason):
        decode_segment(body, base, out)


def one_number(number: int) -> tuple[bytes, bytes]:
    """(levels, raw bits) of a table that has but the token of `number`."""
    token = tokens_of(np.array([number]))
    levels = np.zeros(int(token[0]) + 1, np.uint8)
    levels[-1] = 15
    return write_levels(levels), write_raw(np.array([number]), token)


def test_a_step_larger_than_a_word_is_refused() -> None:
    base = np.zeros(4, WORD[1])
    for last, reason in ((255, "larger than a word"), (256, "larger than a word"), (2**32 - 1, "larger than a word"), (254, "")):
        levels, raw = one_number(last)
        body = sparse_body(classes=ONE, levels=LEVELS + levels, rest=WORDS + raw)
        if reason:
            with pytest.raises(Refusal, match=reason):
                decode_segment(body, base, np.empty_like(base))
        else:
            out = np.empty_like(base)
            decode_segment(body, base, out)
            assert out.tolist() == [128, 0, 0, 0]


@pytest.mark.parametrize("words", [1, 100, 2048, 5000, 70_000])
def test_a_change_beyond_the_words_of_its_class_is_refused(words: int) -> None:
    """The gap of a segment's only change: to its last word, one further, to where 32 bits end."""
    base = np.zeros(words, WORD[2])
    for rank in (words - 1, words, words + 31, 2**32 - 1):
        levels, raw = one_number(rank)
        body = sparse_body(classes=ONE, levels=levels + LEVELS, rest=WORDS + raw)
        verdict = _attempt(body, base, words, 2)
        assert verdict == "ok" if rank < words else "reaches beyond" in verdict
        if words > 2:
            base[-2] = 0x3F80  # of another class: the last rank is now one too many
            verdict = _attempt(body, base, words, 2)
            assert "reaches beyond" in verdict
            base[-2] = 0


def test_ranks_past_the_end_after_many_changes_are_refused() -> None:
    """Gaps add up to more than 32 bits hold."""
    base = np.zeros(40_000, WORD[2])
    levels, raw = one_number(2**31)
    raws = int.from_bytes(raw, "little")
    held = sum(raws << (29 * k) for k in range(4000))
    body = sparse_body(
        classes=bytes([0, 0, 0x80 | 4000 & 127, 4000 >> 7]), levels=levels + LEVELS,
        rest=WORDS + held.to_bytes((29 * 4000 + 7) // 8, "little"),
    )  # fmt: skip
    assert "reaches beyond" in _attempt(body, base, len(base), 2)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda b: b[:1], "other classes"),
        (lambda b: b[:1] + bytes([1]) + b[2:], "other classes"),
        (lambda b: b[:2] + bytes([1]) + b[3:], "other classes"),
        (lambda b: b[:3] + bytes([1]) + b[4:], "other classes"),
        (lambda b: b + b"\0", "raw bits"),
    ],
)
def test_crafted_dense_deltas(change, reason: str) -> None:
    base = np.zeros(10, WORD[2])
    new = base + WORD[2].type(3)
    whole = DENSE.encode(new, base)
    assert whole is not None
    with pytest.raises(Refusal, match=reason):
        decode_segment(bytes([DENSE.id]) + change(whole[0]), base, np.empty_like(base))


def read_raw(raw: bytes, tokens: np.ndarray) -> list[int]:
    """The numbers, from tokens and all the raw bits beside them: lowest bit first, zeros in the last byte's padding."""
    held, numbers, used = int.from_bytes(raw, "little"), [], 0
    for token in tokens.tolist():
        width = int(RAW_BITS[token])
        numbers.append(int(FIRST[token]) + (held & ((1 << width) - 1)))
        held >>= width
        used += width
    assert held == 0 and len(raw) == (used + 7) // 8
    return numbers


@given(st.integers(0, 2**32 - 1), st.integers(1, 4000), st.integers(1, 200))
@settings(max_examples=100, deadline=None)
def test_tokens_and_their_bits_round_trip(seed: int, n: int, distinct: int) -> None:
    rng = np.random.default_rng(seed)
    numbers = rng.choice((2.0 ** rng.uniform(0, 32, distinct)).astype(np.int64), n)
    numbers[0] = rng.choice([0, 7, 8, 2**32 - 1])
    tokens = tokens_of(numbers)
    assert (FIRST[tokens] <= numbers).all() and (numbers < FIRST[tokens] + (1 << RAW_BITS[tokens])).all()
    assert read_raw(write_raw(numbers, tokens), tokens) == numbers.tolist()
    rows = rng.integers(0, 3, n).astype(np.uint8)
    tables = tables_of(levels_of(np.stack([np.bincount(tokens)] * 3)))
    assert np.array_equal(rans.decode(memoryview(rans.encode(tokens, rows, tables)), rows, tables), tokens)


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=124).filter(any))
@settings(max_examples=300, deadline=None)
def test_tables_are_whole_whatever_was_counted(counts: list[int]) -> None:
    levels = levels_of(np.array([counts]))
    tables = tables_of(levels)
    assert tables.sum() == SCALE and ((tables > 0) == (np.array([counts]) > 0)).all()
    back = np.ones((1, len(counts)), np.uint8)
    assert read_levels(memoryview(write_levels(levels[0])), 0, back) == len(write_levels(levels[0]))
    assert np.array_equal(back, levels)


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
            decode_segment(bytes([coding.id]) + (coding.encode(new, base) or (b"",))[0], None, new.copy())
    with pytest.raises(ValueError, match="base is"):
        encode_segment(new, np.zeros(9, WORD[2]))
    with pytest.raises(ValueError, match="unsigned words"):
        encode_segment(new.astype(np.float32), None)
    with pytest.raises(ValueError, match="share memory"):
        decode_segment(encode_segment(new, base)[0], base, base)


def _bf16(x: np.ndarray) -> np.ndarray:
    bits = x.astype("<f4").view("<u4").astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(WORD[2])


@pytest.mark.parametrize(("lr", "bits"), [(2e-7, 8.6), (1.7e-6, 6.6), (4.2e-5, 4.6)])
def test_bits_per_changed_value_stay_at_the_measured_mark(lr: float, bits: float) -> None:
    """Gaussian bf16 weights (sigma 0.02) with Adam-like steps: 0.5, 3 and 36 % changed."""
    rng = np.random.default_rng(0)
    master = rng.normal(0, 0.02, 1 << 20)
    base, new = _bf16(master), _bf16(master + lr * np.clip(rng.normal(0, 0.6, len(master)), -1.5, 1.5))
    payload, changed = encode_segment(new, base)
    assert 8 * len(payload) / changed < bits
    assert len(encode_segment(new, None)[0]) < 0.7 * new.nbytes


def test_read_only_words_are_read_and_nothing_else() -> None:
    rng = np.random.default_rng(3)
    base = rng.integers(0, 2**16, 5000, dtype=WORD[2])
    for share in (0.01, 0.5):
        new, out = base + (rng.random(5000) < share).astype(WORD[2]), np.empty_like(base)
        new.flags.writeable = base.flags.writeable = False
        payload, changed = encode_segment(new, base)
        decode_segment(payload, base, out)
        assert changed == np.count_nonzero(new != base)
        assert np.array_equal(out, new) and payload[0] == (SPARSE.id if share < 0.1 else DENSE.id)
