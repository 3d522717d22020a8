"""Flat states: views, digests, padding, files."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import blake3
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p.layout import ITEMSIZE, WORD, Layout
from p2p.weights.state import FlatState, state_digest

LAYOUT = Layout.build(
    [
        ("w", "bfloat16", (3, 5)),
        ("b", "float32", ()),
        ("e", "float32", (0, 4)),
        ("q", "uint8", (70,)),
        ("d", "int64", (2,)),
    ]
)


def test_tensors_are_views_of_the_flat_bytes(tmp_path: Path) -> None:
    for state in (FlatState.in_memory(LAYOUT), FlatState.create(tmp_path / "s", LAYOUT, reserve=True)):
        bits = np.arange(15, dtype=WORD[2]).reshape(3, 5)
        state.write_tensor("w", bits)
        state.write_tensor("b", np.array(1.5, np.float32))  # any dtype of the size: its bits count
        assert np.array_equal(state.tensor("w"), bits) and state.tensor("w").base is not None
        assert state.tensor("b").shape == () and int(state.tensor("b")) == 0x3FC00000
        assert state.tensor("e").shape == (0, 4)
        assert state.padding_is_zero()
        spec = LAYOUT.by_name["w"]
        assert state.bytes[spec.offset : spec.stop].tobytes() == bits.tobytes()
        state.write_tensor("w", bits.T.copy().T)  # not contiguous in C order
        assert np.array_equal(state.tensor("w"), bits)
        words = {s.itemsize: state.words(s) for s in LAYOUT.segments()}
        assert {k: v.dtype for k, v in words.items()} == {1: WORD[1], 2: WORD[2], 4: WORD[4], 8: WORD[8]}
        words[8][0] = 9
        assert int(state.tensor("d")[0]) == 9


def test_a_tensor_that_does_not_fit_is_not_written() -> None:
    state = FlatState.in_memory(LAYOUT)
    for bad in (np.zeros((5, 3), WORD[2]), np.zeros((3, 5), WORD[4]), np.zeros(15, WORD[2])):
        with pytest.raises(ValueError, match="cannot take"):
            state.write_tensor("w", bad)
    with pytest.raises(KeyError):
        state.tensor("nothing")


def test_digests_follow_their_definition_and_every_tensor() -> None:
    state = FlatState.in_memory(LAYOUT)
    want = [xxhash.xxh3_128_digest(bytes(t.nbytes)) for t in LAYOUT.tensors]
    assert state.tensor_digests() == want
    assert state.digest() == blake3.blake3(LAYOUT.digest + b"".join(want)).digest() == state_digest(LAYOUT, want)
    seen = {state.digest()}
    for t in LAYOUT.tensors:
        if t.nbytes:
            state.bytes[t.stop - 1] ^= 1
            seen.add(state.digest())
    assert len(seen) == 5
    renamed = Layout.build([("w2", "bfloat16", (3, 5))])
    assert (
        FlatState.in_memory(renamed).digest() != FlatState.in_memory(Layout.build([("w", "bfloat16", (3, 5))])).digest()
    )
    with pytest.raises(ValueError, match="want 5"):
        state_digest(LAYOUT, want[:-1])
    with pytest.raises(ValueError, match="want 5"):
        state_digest(LAYOUT, [*want[:-1], b"short"])


def test_padding_is_seen() -> None:
    state = FlatState.in_memory(LAYOUT)
    assert state.padding_is_zero()
    inside = {i for t in LAYOUT.tensors for i in range(t.offset, t.stop)}
    for i in sorted(set(range(LAYOUT.nbytes)) - inside)[::37]:
        state.bytes[i] = 1
        assert not state.padding_is_zero()
        state.bytes[i] = 0


def test_a_file_comes_back_and_can_be_read_only(tmp_path: Path) -> None:
    path = tmp_path / "s"
    state = FlatState.create(path, LAYOUT)
    state.write_tensor("q", np.arange(70, dtype=np.uint8))
    digest = state.digest()
    state.flush()
    state.close()
    state.close()
    again = FlatState.open(path, LAYOUT)
    assert again.digest() == digest
    with pytest.raises(ValueError, match="read-only"):
        again.tensor("q")[0] = 1
    FlatState.open(path, LAYOUT, writable=True).tensor("q")[0] = 1
    assert FlatState.open(path, LAYOUT).digest() != digest
    with open(path, "ab") as file:
        file.write(b"x")
    with pytest.raises(ValueError, match="bytes, its layout says"):
        FlatState.open(path, LAYOUT)
    with pytest.raises(FileNotFoundError):
        FlatState.open(tmp_path / "none", LAYOUT)


def test_no_space_is_an_error_before_anything_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="no space"):
        FlatState.create(tmp_path / "s", LAYOUT, reserve=True)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_layout(tmp_path: Path) -> None:
    empty = Layout.build([])
    assert FlatState.create(tmp_path / "s", empty, reserve=True).digest() == FlatState.in_memory(empty).digest()


@given(st.lists(st.tuples(st.sampled_from(sorted(ITEMSIZE)), st.lists(st.integers(0, 9), max_size=3)), max_size=8))
@settings(max_examples=60, deadline=None)
def test_any_layout_holds_what_is_written(tensors: list[tuple[str, list[int]]]) -> None:
    layout = Layout.build([(f"t{i}", d, tuple(s)) for i, (d, s) in enumerate(tensors)])
    state, rng = FlatState.in_memory(layout), np.random.default_rng(0)
    wrote = {}
    for t in layout.tensors:
        wrote[t.name] = rng.integers(0, 256, t.nbytes, dtype=np.uint8).view(WORD[t.itemsize]).reshape(t.shape)
        state.write_tensor(t.name, wrote[t.name])
    assert all(np.array_equal(state.tensor(name), bits) for name, bits in wrote.items())
    assert state.padding_is_zero()
    assert sum(state.words(s).nbytes for s in layout.segments(64)) == layout.nbytes
