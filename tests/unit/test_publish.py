"""The size of the chunks a version is cut into."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from p2p.channel.stream import PIECE
from p2p.limits import GIB, KIB, MAX_CHUNK, MAX_SEGMENT, MAX_SEGMENT_CHUNKS, MIB
from p2p.publish import MIN_CHUNK, chunk_bytes_for


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
