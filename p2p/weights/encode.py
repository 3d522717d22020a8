"""Encode a version segment by segment into the chunk store. Must not know signing or sending.

The trainer's process calls `encode_version`; the head signs the segments that it yields. So the first chunks can leave while
later segments are still being encoded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import blake3

from p2p.codec import NOTHING_CHANGED, encode_segment
from p2p.codec.classes import Changes
from p2p.layout import Segment
from p2p.limits import KIB, MAX_CHUNK
from p2p.weights.state import FlatState
from p2p.weights.store import ChunkFolder

CHUNKS, MANY_CHUNKS = 512, 4096
"""How many chunks a version is cut into, as far as the sizes below allow. With 20 log2(N) chunks a pipeline of N peers loses
under 5 % of its time to filling (Mundinger, Weber and Weiss 2008), and each distributor has a few chunks to the end. Up to
MEDIUM_CHUNK a chunk grows so that there are CHUNKS of them; beyond it only when there would be more than MANY_CHUNKS."""

MIN_CHUNK, MEDIUM_CHUNK = 16 * KIB, 128 * KIB
"""Bytes. Many chunks below MIN_CHUNK would cost more in digests and announcements than in their own bytes. One of MEDIUM_CHUNK,
handed to seven peers, keeps a slow uplink busy for the better part of a second, so chunks stay at that size for long."""

CHUNK_S, FEW_CHUNKS = 5e-4, 64
"""Seconds that a chunk takes an uplink at the least, as long as there are so many chunks or more: each costs whoever sends or
gets it a few tenths of a millisecond of processor time, whatever its size."""

NODE_CHUNKS, LEAST_CHUNK, MOST_NODES = 12, 4 * KIB, 32
"""Chunks for each node, down to chunks of LEAST_CHUNK bytes, and nodes that count for that: more stand in groups. Where all
uplinks count a node brings a part of the version to each other node, and a chunk that all others get is the least part."""

RECORDS_FROM = 64 * KIB
"""Bytes from which a chunk is made a little smaller than a power of two, so that it just fills whole Noise records: these hold
64 KiB, and a smaller chunk shares one anyway."""

class Payload(NamedTuple):
    """A segment that was encoded elsewhere, against the same base."""

    data: bytes
    changed: int
    """words"""


NOTHING_FOUND: Mapping[int, Changes | Payload] = MappingProxyType({})
"""No segment's changes are known beforehand."""


def chunk_bytes_for(payload: int, uplink: float = 0.0, nodes: int = 0, least: int = 0) -> int:
    """Bytes of a chunk, for a version of about `payload` bytes that leaves over an uplink of `uplink` bytes/s (0: unknown) for so
    many nodes (0: unknown): a power of two from `least` on, or a little less, so that with its headers it just fills whole
    encrypted records (64 KiB)."""
    size = MIN_CHUNK
    while size < MEDIUM_CHUNK and size < CHUNK_S * uplink and 2 * size * FEW_CHUNKS <= payload:
        size *= 2
    while size < MAX_CHUNK and size * (CHUNKS if size < MEDIUM_CHUNK else MANY_CHUNKS) < payload:
        size *= 2
    while LEAST_CHUNK < size <= MIN_CHUNK and size * NODE_CHUNKS * min(nodes, MOST_NODES) > payload:
        size //= 2
    while size < least:
        size *= 2
    return size - (size // 256 if size >= RECORDS_FROM else 0)


@dataclass(frozen=True, slots=True)
class EncodedSegment:
    """One segment, encoded and stored. `changed` counts words that differ from the base (all of them for an anchor)."""

    index: int
    size: int
    digests: tuple[bytes, ...]
    changed: int
    words: int


_Encoded = tuple[Segment, int, list[tuple[bytes, bytes]], int]
"""A segment, the length of its payload, chunks with their digests, and how many words changed."""


def encode_version(
    new: FlatState, base: FlatState | None, store: ChunkFolder, *, segment_bytes: int, chunk_bytes: int, threads: int = 1,
    changes: Mapping[int, Changes | Payload] = NOTHING_FOUND, same: Container[int] = (),
) -> Iterator[EncodedSegment]:
    """Yield every segment of `new` in order, its chunks already in `store`.

    With `base` (same layout) segments are deltas against it, without a base they are whole. `threads` segments are encoded ahead
    of the one that the caller works on; the result does not depend on their number. `changes`: segment index -> its changes
    against `base`, where they were found already, or even encoded; `same`: indices of segments that are known to equal the base's
    and are not read. ValueError when the layouts differ.
    """
    if base is not None and base.layout.digest != new.layout.digest:
        raise ValueError("a delta needs a base with the same tensor table; publish an anchor instead")

    def encode(segment: Segment) -> _Encoded:
        if base is not None and segment.index in same:
            payload, changed = NOTHING_CHANGED, 0
        else:
            words, of = new.words(segment), None if base is None else base.words(segment)
            known = changes.get(segment.index)
            payload, changed = known if isinstance(known, Payload) else encode_segment(words, of, known)
        chunks = [payload[start : start + chunk_bytes] for start in range(0, len(payload), chunk_bytes)]
        return segment, len(payload), [(blake3.blake3(chunk).digest(), chunk) for chunk in chunks], changed

    def store_next() -> EncodedSegment:
        segment, size, chunks, changed = ahead.popleft().result()
        for digest, chunk in chunks:  # in this one thread: two segments may have the same chunk
            store.put_trusted(digest, chunk)
        return EncodedSegment(segment.index, size, tuple(d for d, _ in chunks), changed, segment.nbytes // segment.itemsize)

    pool, ahead = ThreadPoolExecutor(threads, thread_name_prefix="encode"), deque[Future[_Encoded]]()
    try:
        for segment in new.layout.segments(segment_bytes):
            ahead.append(pool.submit(encode, segment))
            if len(ahead) > threads:
                yield store_next()
        while ahead:
            yield store_next()
    finally:
        pool.shutdown(cancel_futures=True)
