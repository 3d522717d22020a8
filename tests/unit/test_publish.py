"""The size of the chunks a version is cut into."""

from __future__ import annotations

from pathlib import Path

import blake3
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p.channel.stream import PIECE
from p2p.layout import Layout
from p2p.limits import GIB, KIB, MAX_CHUNK, MAX_SEGMENT, MAX_SEGMENT_CHUNKS, MIB
from p2p.weights.encode import LEAST_CHUNK, MIN_CHUNK, MOST_NODES, NODE_CHUNKS, chunk_bytes_for, encode_version
from p2p.weights.state import FlatState
from p2p.weights.store import ChunkFolder


@given(st.integers(0, 256 * GIB))
def test_chunks_are_powers_of_two_or_just_fill_records_within_the_limits(payload) -> None:
    size = chunk_bytes_for(payload)
    assert MIN_CHUNK <= size <= MAX_CHUNK
    if size < 32 * KIB + 1:
        assert size & (size - 1) == 0
    else:
        records = -(-size // (64 * KIB))
        headers = 128
        assert -(-(size + headers) // PIECE) == records and records & (records - 1) == 0, "no record for a few bytes"
    assert 2 * MAX_SEGMENT // size <= MAX_SEGMENT_CHUNKS, "the digests of one segment fit their record"


@given(st.integers(0, 256 * GIB), st.integers(0, 256 * GIB))
def test_a_larger_version_never_has_smaller_chunks(one, other) -> None:
    assert (chunk_bytes_for(one) <= chunk_bytes_for(other)) == (one <= other) or chunk_bytes_for(one) == chunk_bytes_for(other)


@given(st.integers(1, 256 * GIB))
def test_there_are_enough_chunks_for_a_pipeline_and_not_more_than_pay(payload) -> None:
    size = chunk_bytes_for(payload)
    if size > MIN_CHUNK:
        assert payload / size > 128, "a pipeline of many peers is filled for a few percent of the time"
    if size < MAX_CHUNK - MAX_CHUNK // 256:
        assert payload / size <= 4096 * 256 / 255 + 1


def test_sizes_of_known_versions() -> None:
    assert chunk_bytes_for(0) == chunk_bytes_for(100 * KIB) == MIN_CHUNK
    assert chunk_bytes_for(16 * MIB) <= 64 * KIB, "a delta of a small model: a slow uplink hands one on in a fraction of a second"
    assert chunk_bytes_for(200 * GIB) == MAX_CHUNK - MAX_CHUNK // 256


def test_a_fast_uplink_gets_larger_chunks_while_there_are_enough() -> None:
    assert chunk_bytes_for(4 * MIB, 1e6) == chunk_bytes_for(4 * MIB) == MIN_CHUNK
    assert chunk_bytes_for(4 * MIB, 6e7) == 2 * MIN_CHUNK
    assert chunk_bytes_for(2 * MIB - 1, 1e12) == MIN_CHUNK and chunk_bytes_for(2 * MIB, 1e12) == 2 * MIN_CHUNK, "64 at the least"
    assert chunk_bytes_for(GIB, 1e12) == chunk_bytes_for(GIB), "a large version's are large anyway"


LAYOUT = Layout.build([("a", "bfloat16", (50_000,)), ("b", "float32", (9_000,)), ("same", "float32", (9_000,))])


def two_states() -> tuple[FlatState, FlatState]:
    draw = np.random.default_rng(0)
    old, new = FlatState.in_memory(LAYOUT), FlatState.in_memory(LAYOUT)
    for spec in LAYOUT.tensors:
        words = old.tensor(spec.name)
        words[...] = draw.integers(0, 2**16, words.shape)
        new.tensor(spec.name)[...] = words
    new.tensor("a")[::90] += np.uint16(1)
    new.tensor("b")[:] = 7  # many equal chunks
    return old, new


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_what_is_encoded_does_not_depend_on_threads(tmp_path: Path, threads: int) -> None:
    old, new = two_states()
    one, more = ChunkFolder(tmp_path / "one"), ChunkFolder(tmp_path / "more")
    for base in (None, old):
        kept = list(encode_version(new, base, one, segment_bytes=4096, chunk_bytes=1024))
        found = list(encode_version(new, base, more, segment_bytes=4096, chunk_bytes=1024, threads=threads))
        assert found == kept and [s.index for s in found] == list(range(len(LAYOUT.segments(4096))))
        for segment in found:
            data = b"".join(more.path(d).read_bytes() for d in segment.digests)
            assert len(data) == segment.size and blake3.blake3(data[:1024]).digest() == segment.digests[0]


def test_a_disk_that_fails_and_a_reader_that_stops_end_it(tmp_path: Path) -> None:
    old, new = two_states()

    class Full(ChunkFolder):
        def put_trusted(self, digest: bytes, data: bytes) -> None:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        list(encode_version(new, old, Full(tmp_path), segment_bytes=4096, chunk_bytes=1024, threads=3))
    segments = encode_version(new, old, ChunkFolder(tmp_path), segment_bytes=4096, chunk_bytes=1024, threads=3)
    assert next(segments).index == 0
    segments.close()  # type: ignore[attr-defined]


def test_a_small_version_for_many_nodes_has_smaller_chunks() -> None:
    """Each node brings a part to each other one; with chunks of 16 KiB twenty nodes would share 32 of them."""
    assert chunk_bytes_for(512 * KIB, nodes=20) == LEAST_CHUNK
    assert chunk_bytes_for(3 * MIB, nodes=20) == 8 * KIB
    assert chunk_bytes_for(2 * MIB, nodes=8) == chunk_bytes_for(8 * MIB, nodes=1000) == MIN_CHUNK
    assert chunk_bytes_for(4 * MIB, 6e7, nodes=40) > MIN_CHUNK, "not where the learner's own uplink is ample"


@given(st.integers(0, 256 * GIB), st.integers(0, 20_000))
def test_more_nodes_never_mean_larger_chunks_nor_many_more(payload, nodes) -> None:
    size = chunk_bytes_for(payload, nodes=nodes)
    assert LEAST_CHUNK <= size <= chunk_bytes_for(payload)
    assert size == chunk_bytes_for(payload) or payload / size < 2 * NODE_CHUNKS * MOST_NODES
