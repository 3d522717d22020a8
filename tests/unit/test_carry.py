"""What a state takes over from the one before it: always the very digests that hashing everything gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p.codec import NOTHING_CHANGED
from p2p.layout import Layout
from p2p.weights.carry import digests_after, segments_of, touched_by
from p2p.weights.encode import encode_version
from p2p.weights.state import FlatState
from p2p.weights.store import ChunkFolder

SHAPES = st.lists(
    st.tuples(st.sampled_from(["bfloat16", "float32", "uint8"]), st.sampled_from([(0,), (1,), (7, 3), (33,), (40, 9), (500,)])),
    min_size=1, max_size=8,
)  # fmt: skip


def two_states(table: list[tuple[str, tuple[int, ...]]], seed: int, where: list[float]) -> tuple[FlatState, FlatState]:
    """A state, and another that differs from it in a byte at each of these places (shares of its length), outside of padding."""
    layout = Layout.build([(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(table)])
    draw, old, new = np.random.default_rng(seed), FlatState.in_memory(layout), FlatState.in_memory(layout)
    for spec in layout.tensors:
        old.bytes[spec.offset : spec.stop] = draw.integers(0, 256, spec.nbytes)
    new.bytes[:] = old.bytes
    for spec in layout.tensors:
        for place in where:
            at = int(place * layout.nbytes)
            if spec.offset <= at < spec.stop:
                new.bytes[at] ^= 1
    return old, new


@given(SHAPES, st.integers(0, 9), st.lists(st.floats(0, 1, exclude_max=True), max_size=5), st.sampled_from([64, 128, 512, 4096]))
@settings(max_examples=200, deadline=None)
def test_digests_are_those_of_the_whole(table, seed: int, where: list[float], cut: int) -> None:
    old, new = two_states(table, seed, where)
    segments = new.layout.segments(cut)
    changed = {s.index for s in segments if (old.words(s) != new.words(s)).any()}
    for told in (changed, set(range(len(segments)))):  # more than changed may count as changed
        assert digests_after(new, old, old.tensor_digests(), segments, told) == new.tensor_digests()


@given(SHAPES, st.sampled_from([64, 128, 512]))
@settings(max_examples=100, deadline=None)
def test_the_segments_of_a_tensor_are_those_that_hold_a_byte_of_it(table, cut: int) -> None:
    old, _ = two_states(table, 0, [])
    segments = old.layout.segments(cut)
    for spec, span in zip(old.layout.tensors, segments_of(old.layout, segments), strict=True):
        assert list(span) == [s.index for s in segments if s.start < spec.stop and s.stop > spec.offset and spec.nbytes]
        assert touched_by(old.layout, segments, {spec.name}) == set(span)


@pytest.mark.parametrize("threads", [1, 3])
def test_segments_that_are_known_to_be_the_same_are_not_read(tmp_path: Path, threads: int) -> None:
    old, new = two_states([("bfloat16", (40, 9))] * 4, 1, [0.01])
    segments = new.layout.segments(256)
    store = ChunkFolder(tmp_path)
    want = list(encode_version(new, old, store, segment_bytes=256, chunk_bytes=512, threads=threads))
    same = {s.index for s in want if not s.changed}
    assert 0 < len(same) < len(segments)
    for s in segments:
        if s.index in same:
            new.words(s)[...] = 0xFFFF  # were it read, another payload would come
    found = list(encode_version(new, old, store, segment_bytes=256, chunk_bytes=512, threads=threads, same=same))
    assert found == want and store.path(found[-1].digests[0]).read_bytes() == NOTHING_CHANGED


def test_an_adapter_has_segments_of_its_own() -> None:
    names = ["adapter.a.lora_A", "adapter.a.lora_B", "adapters", "a.weight", "z"]
    layout = Layout.build([(name, "bfloat16", (40,)) for name in names])
    assert layout.adapter == {"adapter.a.lora_A", "adapter.a.lora_B"}
    held = [layout.touched(s.start, s.stop) for s in layout.segments(4096)]
    assert held == [["a.weight"], ["adapter.a.lora_A", "adapter.a.lora_B"], ["adapters", "z"]]
