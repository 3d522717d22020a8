"""Signed manifests: the list of a version's chunks, provable piece by piece while the version is still being encoded.

Pure. Must not know channels, stores or how segments are coded. A manifest is a set of **parts**, each signed by the head
by itself: one header, one record per segment (its chunk digests), one seal (totals and the digest of the installed state). A
chunk may be relayed as soon as its segment's record is known; a version is installed only under its seal.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import blake3
import msgpack
import zstandard

from p2p.errors import Refusal
from p2p.identity import Identity, verify
from p2p.layout import Layout, Segment
from p2p.limits import GIB, MAX_CHUNK, MAX_SEGMENT, MAX_SEGMENT_CHUNKS, MAX_TABLE
from p2p.protocol.wire import unpack
from p2p.version import Version

DOMAIN = {kind: f"shoal/manifest/{kind}/1".encode() for kind in ("header", "record", "seal")}
"""Kind of a part -> the domain under which the head signs it, so that no part passes for one of another kind."""

DELTAS = ("delta", "cumulative")
"""Kinds of manifests with a base. delta: the difference to the version before, pushed to every node that follows the run.
cumulative: the difference to a version many steps back, fetched by nodes that hold that one."""

KINDS = ("anchor", *DELTAS, "descriptor")
"""All kinds of manifests. anchor: a whole state; descriptor: the model's files (config, tokenizer), sent as a state is."""

CODEC = "shoal-1"
"""Name of the segment codec. A node that does not know it refuses the header instead of guessing."""

MAX_LIFETIME_S = 400 * 24 * 3600
"""Seconds that a manifest may be valid: longer than any run, which signs its model descriptor once an epoch."""

MAX_CLOCK_SKEW_S = 24 * 3600
"""Seconds: a manifest created further in the future is refused. Volunteers' clocks are often wrong by hours."""


@dataclass(frozen=True, slots=True)
class Header:
    """What the manifest is of. Times are Unix seconds; `segment_bytes` fixes how `layout` is cut into segments."""

    run: str
    version: Version
    kind: str
    base: Version | None
    base_digest: bytes
    codec: str
    segment_bytes: int
    chunk_bytes: int
    created: int
    expires: int
    layout: Layout = field(repr=False)


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """One encoded segment: `size` payload bytes, cut into chunks of header.chunk_bytes, numbered from `first`."""

    segment: int
    first: int
    size: int
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Seal:
    """The end of a manifest: totals, and the digests that the installed state must have."""

    segments: int
    chunks: int
    size: int
    tensor_digests: tuple[bytes, ...]
    state_digest: bytes
    records_digest: bytes


def _part(identity: Identity, kind: str, body: bytes) -> bytes:
    return msgpack.packb([kind, body, identity.sign(DOMAIN[kind], body)])


def _pack_table(layout: Layout) -> bytes:
    table = msgpack.packb(layout.to_wire())
    if len(table) > MAX_TABLE:
        raise ValueError(f"a tensor table of {len(table)} bytes is over the limit of {MAX_TABLE}")
    return zstandard.ZstdCompressor(level=9).compress(table)


@lru_cache(maxsize=4)  # every version of a run brings the same table: parsed once, and one Layout for all of them
def _read_table(data: bytes) -> Layout:
    try:
        # The decompressor allocates what the frame's header claims, so the claim is checked first.
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= MAX_TABLE:
            raise Refusal(f"tensor table claims {size} bytes, at most {MAX_TABLE} can be", fatal=True)
        table = zstandard.ZstdDecompressor().decompress(data, max_output_size=MAX_TABLE, allow_extra_data=False)
    except (zstandard.ZstdError, ValueError, MemoryError) as error:
        raise Refusal(f"tensor table is not a zstd frame: {error}", fatal=True) from None
    return Layout.from_wire(unpack(table))


def mid_of(header_body: bytes) -> bytes:
    """Manifest id: first 16 bytes of the BLAKE3 of the signed header bytes."""
    return blake3.blake3(header_body).digest()[:16]


class SignedPart(NamedTuple):
    """One part of a manifest whose signature was checked."""

    kind: str
    """header, record or seal"""
    body: bytes
    """the msgpack bytes that were signed"""


class ManifestSigner:
    """The head's side: turns header, records and seal into signed parts, in order."""

    def __init__(self, identity: Identity, header: Header) -> None:
        self._identity, self.header = identity, header
        h = header
        base = None if h.base is None else [h.base.epoch, h.base.step]
        body = msgpack.packb([
            h.run, [h.version.epoch, h.version.step], h.kind, base, h.base_digest, h.codec, h.segment_bytes,
            h.chunk_bytes, h.created, h.expires, _pack_table(h.layout),
        ])  # fmt: skip
        self.mid = mid_of(body)
        self.header_part = _part(identity, "header", body)
        self._records = blake3.blake3()
        self._chunks = self._size = self._segments = 0

    def record(self, segment: int, size: int, digests: tuple[bytes, ...]) -> bytes:
        """Sign the next segment: its `size` payload bytes and its chunks' digests (32 bytes each). Returns the part. ValueError
        when it is not the next one."""
        if segment != self._segments:
            raise ValueError(f"segment {segment} out of order, expected {self._segments}")
        body = msgpack.packb([self.mid, segment, self._chunks, size, b"".join(digests)])
        self._records.update(body)
        self._segments, self._chunks, self._size = segment + 1, self._chunks + len(digests), self._size + size
        return _part(self._identity, "record", body)

    def seal(self, tensor_digests: list[bytes], state_digest: bytes) -> bytes:
        """Sign the totals and the digests of the state (16 bytes for each tensor in layout order, 32 for the whole). Returns the
        part. ValueError before the last segment's record."""
        if self._segments != len(self.header.layout.segments(self.header.segment_bytes)):
            raise ValueError("seal before the last segment")
        body = msgpack.packb([
            self.mid, self._segments, self._chunks, self._size, b"".join(tensor_digests), state_digest,
            self._records.digest(),
        ])  # fmt: skip
        return _part(self._identity, "seal", body)


class Manifest:
    """A peer's verified view of one manifest, growing as parts arrive in any order."""

    def __init__(self, mid: bytes, header: Header, header_part: bytes) -> None:
        self.mid, self.header = mid, header
        self.segments: tuple[Segment, ...] = header.layout.segments(header.segment_bytes)
        self.records: dict[int, SegmentRecord] = {}
        self.seal: Seal | None = None
        self._bodies: dict[int, bytes] = {}
        self._parts: dict[int, bytes] = {-1: header_part}
        self._owner: dict[int, int] = {}
        self._seen: set[bytes] = {header_part}

    @property
    def version(self) -> Version:
        return self.header.version

    @property
    def max_chunks(self) -> int:
        """The number of chunks: exact once sealed, before that the most that the bound on a segment's payload allows."""
        if self.seal is not None:
            return self.seal.chunks
        cut = len(self.segments)
        return (2 * self.header.layout.nbytes + 4096 * cut) // self.header.chunk_bytes + cut

    @property
    def whole(self) -> bool:
        """Whether the seal and every record have arrived."""
        return self.seal is not None and len(self.records) == len(self.segments)

    @property
    def size(self) -> int:
        """Payload bytes: of the whole once sealed, before that of the segments whose records have arrived."""
        return self.seal.size if self.seal else sum(r.size for r in self.records.values())

    def parts(self) -> list[bytes]:
        return [self._parts[i] for i in sorted(self._parts)]

    def part_of(self, chunk: int) -> bytes | None:
        """The signed record that proves this chunk, to send ahead of it."""
        segment = self._owner.get(chunk)
        return None if segment is None else self._parts[segment]

    def segment_of(self, chunk: int) -> int | None:
        return self._owner.get(chunk)

    def chunk_digest(self, chunk: int) -> bytes | None:
        """BLAKE3 of this chunk, or None while no record covers it."""
        segment = self._owner.get(chunk)
        if segment is None:
            return None
        record = self.records[segment]
        return record.digests[chunk - record.first]

    def chunk_size(self, chunk: int) -> int:
        """Bytes of this chunk; the most it can be while no record covers it."""
        segment = self._owner.get(chunk)
        if segment is None:
            return self.header.chunk_bytes
        record = self.records[segment]
        return min(self.header.chunk_bytes, record.size - (chunk - record.first) * self.header.chunk_bytes)

    def chunks_of(self, segment: int) -> range | None:
        record = self.records.get(segment)
        return None if record is None else range(record.first, record.first + len(record.digests))

    def add(self, part: bytes, head_key: bytes) -> list[int]:
        """Take a record or the seal. Returns the chunks that became provable ([] for a seal or a part that came before).
        Refusal when the head did not sign it, when it is of another manifest, or when it contradicts an earlier part."""
        if part in self._seen:
            return []  # every neighbour brings every record once: the signature is checked the first time
        kind, body = open_part(part, head_key, self.version)
        try:
            fields = unpack(body)
            if kind == "record":
                return self._add_record(part, body, *fields)
            if kind == "seal":
                self._add_seal(part, *fields)
                return []
        except (TypeError, ValueError) as error:
            raise Refusal(f"malformed manifest {kind}: {error}", version=self.version, fatal=True) from None
        if mid_of(body) != self.mid:
            raise Refusal("header of another manifest", version=self.version, fatal=True)
        return []

    def _add_record(self, part: bytes, body: bytes, mid: bytes, segment: int, first: int, size: int, joined: bytes) -> list[int]:
        self._mine(mid)
        if any(type(x) is not int or x < 0 for x in (segment, first, size)) or not isinstance(joined, bytes):
            raise ValueError("a field is of the wrong type")
        if segment in self.records:
            if self._bodies[segment] != body:
                raise Refusal(f"two signed records for segment {segment}: the head equivocates", version=self.version)
            return []
        digests = tuple(joined[i : i + 32] for i in range(0, len(joined), 32))
        if not 0 <= segment < len(self.segments) or len(joined) % 32 or not digests:
            raise Refusal(f"record of segment {segment} is out of range", version=self.version, fatal=True)
        if len(digests) != -(-size // self.header.chunk_bytes) or size > 2 * self.segments[segment].nbytes + 4096:
            raise Refusal(f"segment {segment}: {size} bytes in {len(digests)} chunks", version=self.version, fatal=True)
        chunks = range(first, first + len(digests))
        if first < segment or any(c in self._owner for c in chunks):
            raise Refusal(f"segment {segment}: chunk numbers overlap", version=self.version)
        if chunks.stop > self.max_chunks:
            raise Refusal(f"segment {segment}: chunks beyond {'the seal' if self.seal else 'policy'}", version=self.version)
        record = SegmentRecord(segment, first, size, digests)
        # Checked before anything is kept: a manifest that does not add up must never look whole.
        if len(self.records) + 1 == len(self.segments):
            self._check_whole({**self.records, segment: record}, {**self._bodies, segment: body}, self.seal)
        self.records[segment] = record
        self._bodies[segment], self._parts[segment] = body, part
        self._owner.update(dict.fromkeys(chunks, segment))
        self._seen.add(part)
        return list(chunks)

    def _add_seal(self, part: bytes, mid: bytes, n: int, chunks: int, size: int, joined: bytes, state: bytes, rec: bytes) -> None:
        self._mine(mid)
        if any(type(x) is not int or x < 0 for x in (n, chunks, size)):
            raise ValueError("a field is of the wrong type")
        if not all(isinstance(x, bytes) for x in (joined, state, rec)):
            raise ValueError("a field is of the wrong type")
        tensors = tuple(joined[i : i + 16] for i in range(0, len(joined), 16))
        seal = Seal(n, chunks, size, tensor_digests=tensors, state_digest=state, records_digest=rec)
        if self.seal is not None:
            if self.seal != seal:
                raise Refusal("two signed seals: the head equivocates", version=self.version)
            return
        if n != len(self.segments) or len(tensors) != len(self.header.layout.tensors) or len(state) != 32:
            raise Refusal("seal does not fit the header", version=self.version, fatal=True)
        if chunks > self.max_chunks:
            raise Refusal(f"a seal of {chunks} chunks: over policy", version=self.version)
        if any(chunk >= chunks for chunk in self._owner):
            raise Refusal("seal leaves out chunks of a signed record", version=self.version)
        self._check_whole(self.records, self._bodies, seal)
        self.seal = seal
        self._parts[len(self.segments)] = part
        self._seen.add(part)

    def _check_whole(self, records: dict[int, SegmentRecord], bodies: dict[int, bytes], seal: Seal | None) -> None:
        if seal is None or len(records) < len(self.segments):
            return
        order = [records[i] for i in range(len(self.segments))]
        first = 0
        for record in order:
            if record.first != first:
                raise Refusal(f"segment {record.segment}: chunks do not follow on", version=self.version)
            first += len(record.digests)
        joined = blake3.blake3(b"".join(bodies[i] for i in range(len(self.segments)))).digest()
        total = sum(r.size for r in order)
        if (first, total, joined) != (seal.chunks, seal.size, seal.records_digest):
            raise Refusal("records do not add up to the seal", version=self.version)

    def _mine(self, mid: Any) -> None:
        if mid != self.mid:
            raise Refusal("part of another manifest", version=self.version, fatal=True)


def open_part(part: bytes, head_key: bytes, version: Version | None = None) -> SignedPart:
    """Read a part and check its signature. Refusal unless `head_key` signed it as a part of its kind; `version` is only for the
    refusal's message."""
    wire = unpack(part)
    if not isinstance(wire, list) or len(wire) != 3:
        raise Refusal("malformed manifest part", version=version, fatal=True)
    kind, body, signature = wire
    if not isinstance(kind, str) or kind not in DOMAIN or not isinstance(body, bytes) or not isinstance(signature, bytes):
        raise Refusal("malformed manifest part", version=version, fatal=True)
    if not verify(head_key, DOMAIN[kind], body, signature):
        raise Refusal(f"manifest {kind} is not signed by the head", version=version or _claimed(body), fatal=True)
    return SignedPart(kind, body)


def _claimed(body: bytes) -> Version | None:
    """The version that a badly signed header claims; only for the refusal's message."""
    try:
        return _version(unpack(body)[1])
    except (Refusal, TypeError, ValueError, IndexError, KeyError):
        return None


def _version(wire: Any) -> Version:
    if not isinstance(wire, list) or len(wire) != 2 or any(type(n) is not int or n < 0 for n in wire):
        raise ValueError("a version is not [epoch, step]")
    return Version(*wire)


def open_header(part: bytes, *, head_key: bytes, run: str, min_epoch: int, now: float) -> Manifest:
    """Verify a header part and start a Manifest. Refusal: not the head's, another run, an older epoch, an unknown kind or
    codec, sizes over policy, expired or from the future."""
    kind, body = open_part(part, head_key)
    if kind != "header":
        raise Refusal(f"expected a manifest header, got a {kind}", fatal=True)
    try:
        h_run, v, h_kind, base, base_digest, codec, segment_bytes, chunk_bytes, created, expires, layout = unpack(body)
        version = _version(v)
        base_version = None if base is None else _version(base)
        if any(type(x) is not int for x in (segment_bytes, chunk_bytes, created, expires)):
            raise ValueError("a size or a time is not a whole number")
        if not isinstance(h_run, str) or not isinstance(h_kind, str) or not isinstance(base_digest, bytes):
            raise ValueError("a field is of the wrong type")
    except (TypeError, ValueError) as error:
        raise Refusal(f"malformed manifest header: {error}", fatal=True) from None
    if h_run != run:
        raise Refusal(f"manifest is for run {h_run}, this is run {run}", version=version, fatal=True)
    if version.epoch < min_epoch:
        raise Refusal(f"manifest of older epoch {version.epoch}, the run is at epoch {min_epoch}", version=version)
    if h_kind not in KINDS:
        raise Refusal(f"unknown manifest kind {h_kind!r}", version=version)
    if codec != CODEC:
        raise Refusal(f"unknown codec {codec!r}, this node knows {CODEC}", version=version)
    if (h_kind in DELTAS) != (base_version is not None) or (base_version is not None and base_version >= version):
        raise Refusal(f"{h_kind} with base {base_version}", version=version, fatal=True)
    if not 1024 <= chunk_bytes <= MAX_CHUNK or not 1024 <= segment_bytes <= MAX_SEGMENT:
        raise Refusal(f"chunks of {chunk_bytes} and segments of {segment_bytes} bytes: over policy", version=version, fatal=True)
    if segment_bytes > chunk_bytes * MAX_SEGMENT_CHUNKS:
        raise Refusal(f"segments of {segment_bytes} bytes in chunks of {chunk_bytes}: over policy", version=version, fatal=True)
    if not created <= now + MAX_CLOCK_SKEW_S or expires - created > MAX_LIFETIME_S:
        raise Refusal("manifest is dated in the future or lives too long", version=version)
    if expires <= now:
        raise Refusal(f"manifest expired {now - expires:.0f} s ago", version=version)
    try:
        if not isinstance(layout, bytes):
            raise Refusal("tensor table is not bytes", fatal=True)
        table = _read_table(layout)
    except Refusal as refusal:
        raise refusal.at(version=version) from None
    if not table.tensors or not table.nbytes:
        raise Refusal("manifest of no tensors", version=version)
    if h_kind == "descriptor" and table.nbytes > GIB:
        raise Refusal("descriptor is too large", version=version)
    header = Header(
        h_run, version, h_kind, base=base_version, base_digest=base_digest, codec=codec, segment_bytes=segment_bytes,
        chunk_bytes=chunk_bytes, created=created, expires=expires, layout=table,
    )  # fmt: skip
    return Manifest(mid_of(body), header, part)
