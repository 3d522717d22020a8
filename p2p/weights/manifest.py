"""Signed manifests: the list of a version's chunks, provable piece by piece while the version is still being encoded.

Pure. Must not know channels, stores or how segments are coded. A manifest is a set of **parts**, each signed by the head
by itself: one header, one record per segment (its chunk digests), one seal (totals and the digest of the installed state). A
chunk may be relayed as soon as its segment's record is known; a version is installed only under its seal.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeVar, cast

import blake3
import msgspec
import zstandard

from p2p.errors import Refusal
from p2p.identity import Identity, verify
from p2p.layout import Layout, Segment
from p2p.limits import GIB, MAX_CHUNK, MAX_CHUNKS, MAX_SEGMENT, MAX_SEGMENT_CHUNKS, MAX_SEGMENTS, MAX_TABLE
from p2p.protocol.wire import MALFORMED, Blob, Count, Digest, Signed, Text, encode_struct, unpack
from p2p.version import Version

B = TypeVar("B", "SegmentRecord", "Seal")

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


class Header(NamedTuple):
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
    layout: Layout


_HeaderBody = tuple[Text, Version, Text, Version | None, Digest, Text, int, int, int, int, Any]
"""What is signed of a header: its fields in order, the layout as its wire form, compressed."""


class SegmentRecord(Signed, frozen=True):
    """One encoded segment: `size` payload bytes, cut into chunks of header.chunk_bytes, numbered from `first`."""

    mid: Digest
    segment: Count
    first: Count
    size: Count
    joined: Blob
    """the digests of its chunks (BLAKE3, 32 bytes each), end to end"""

    @property
    def chunks(self) -> range:
        return range(self.first, self.first + len(self.joined) // 32)

    @property
    def digests(self) -> tuple[bytes, ...]:
        return _cut(self.joined, 32)


class Seal(Signed, frozen=True):
    """The end of a manifest: totals, and the digests that the installed state must have."""

    mid: Digest
    segments: Count
    chunks: Count
    size: Count
    joined: Blob
    """the digests of the state's tensors (16 bytes each), end to end"""
    state_digest: Digest
    records_digest: Digest

    @property
    def tensor_digests(self) -> tuple[bytes, ...]:
        return _cut(self.joined, 16)


class SignedPart(Signed, frozen=True):
    """One part of a manifest."""

    kind: Literal["header", "record", "seal"]
    body: Blob
    """the msgpack bytes that were signed"""
    signature: Blob


def _cut(joined: bytes, size: int) -> tuple[bytes, ...]:
    return tuple(joined[at : at + size] for at in range(0, len(joined), size))


def _sign(identity: Identity, kind: Literal["header", "record", "seal"], body: bytes) -> bytes:
    return encode_struct(SignedPart(kind, body, identity.sign(DOMAIN[kind], body)))


def _pack_table(layout: Layout) -> bytes:
    table = encode_struct(layout.to_wire())
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
    return Layout.from_wire(unpack(table, list))


def _read(part: SignedPart, kind: Any, version: Version | None = None) -> Any:
    """The body of a part. Refusal when it is not of this kind; `version` is only for the refusal's message."""
    try:
        return msgspec.msgpack.decode(part.body, type=kind)
    except MALFORMED as error:
        raise Refusal(f"malformed manifest {part.kind}: {error}", version=version or _claimed(part.body), fatal=True) from None


def mid_of(header_body: bytes) -> bytes:
    """Manifest id: first 16 bytes of the BLAKE3 of the signed header bytes."""
    return blake3.blake3(header_body).digest()[:16]


class ManifestSigner:
    """The head's side: turns header, records and seal into signed parts, in order."""

    def __init__(self, identity: Identity, header: Header) -> None:
        self._identity, self.header = identity, header
        *fields, layout = header
        body = encode_struct([*fields, _pack_table(layout)])
        self.mid = mid_of(body)
        self.header_part = _sign(identity, "header", body)
        self._records = blake3.blake3()
        self._chunks = self._size = self._segments = 0

    def record(self, segment: int, size: int, digests: tuple[bytes, ...]) -> bytes:
        """Sign the next segment: its `size` payload bytes and its chunks' digests (32 bytes each). Returns the part. ValueError
        when it is not the next one."""
        if segment != self._segments:
            raise ValueError(f"segment {segment} out of order, expected {self._segments}")
        body = encode_struct(SegmentRecord(self.mid, segment, self._chunks, size, b"".join(digests)))
        self._records.update(body)
        self._segments, self._chunks, self._size = segment + 1, self._chunks + len(digests), self._size + size
        return _sign(self._identity, "record", body)

    def seal(self, tensor_digests: list[bytes], state_digest: bytes) -> bytes:
        """Sign the totals and the digests of the state (16 bytes for each tensor in layout order, 32 for the whole). Returns the
        part. ValueError before the last segment's record."""
        if self._segments != len(self.header.layout.segments(self.header.segment_bytes)):
            raise ValueError("seal before the last segment")
        seal = Seal(
            self.mid, self._segments, self._chunks, self._size, b"".join(tensor_digests), state_digest=state_digest,
            records_digest=self._records.digest(),
        )  # fmt: skip
        return _sign(self._identity, "seal", encode_struct(seal))


def most_chunks(state_bytes: int, segments: int, chunk_bytes: int) -> int:
    """The most chunks that a state may have, cut so: a segment's payload is at most twice its bytes and 4 KiB."""
    return (2 * state_bytes + 4096 * segments) // chunk_bytes + segments


class Manifest:
    """A peer's verified view of one manifest, growing as parts arrive in any order."""

    def __init__(self, mid: bytes, header: Header, header_part: bytes) -> None:
        self.mid, self.header = mid, header
        self.segments: tuple[Segment, ...] = header.layout.segments(header.segment_bytes)
        self.records: dict[int, SegmentRecord] = {}
        self.seal: Seal | None = None
        self._parts: dict[int, bytes] = {-1: header_part}
        self._owner: dict[int, SegmentRecord] = {}
        self._seen: set[bytes] = {header_part}
        self._size = 0

    @property
    def version(self) -> Version:
        return self.header.version

    @property
    def max_chunks(self) -> int:
        """The number of chunks: exact once sealed, before that the most that the bound on a segment's payload allows."""
        if self.seal is not None:
            return self.seal.chunks
        return most_chunks(self.header.layout.nbytes, len(self.segments), self.header.chunk_bytes)

    @property
    def whole(self) -> bool:
        """Whether the seal and every record have arrived."""
        return self.seal is not None and len(self.records) == len(self.segments)

    @property
    def size(self) -> int:
        """Payload bytes: of the whole once sealed, before that of the segments whose records have arrived."""
        return self.seal.size if self.seal else self._size

    def parts(self) -> list[bytes]:
        return [self._parts[i] for i in sorted(self._parts)]

    def part(self, segment: int) -> bytes:
        """The signed record of a segment, to send ahead of its chunks; of -1, the header. KeyError while it has not arrived."""
        return self._parts[segment]

    def segment_of(self, chunk: int) -> int | None:
        record = self._owner.get(chunk)
        return None if record is None else record.segment

    def chunk_digest(self, chunk: int) -> bytes | None:
        """BLAKE3 of this chunk, or None while no record covers it."""
        record = self._owner.get(chunk)
        if record is None:
            return None
        at = 32 * (chunk - record.first)
        return record.joined[at : at + 32]

    def chunk_size(self, chunk: int) -> int:
        """Bytes of this chunk; the most it can be while no record covers it."""
        record = self._owner.get(chunk)
        if record is None:
            return self.header.chunk_bytes
        return min(self.header.chunk_bytes, record.size - (chunk - record.first) * self.header.chunk_bytes)

    def chunks_of(self, segment: int) -> range | None:
        record = self.records.get(segment)
        return None if record is None else record.chunks

    def add(self, part: bytes, head_key: bytes) -> list[int]:
        """Take a record or the seal. Returns the chunks that became provable ([] for a seal or a part that came before).
        Refusal when the head did not sign it, when it is of another manifest, or when it contradicts an earlier part."""
        if part in self._seen:
            return []  # every neighbour brings every record once: the signature is checked the first time
        signed = open_part(part, head_key, self.version)
        match signed.kind:
            case "record":
                return self._add_record(part, self._mine(_read(signed, SegmentRecord, self.version)))
            case "seal":
                self._add_seal(part, self._mine(_read(signed, Seal, self.version)))
            case "header":
                if mid_of(signed.body) != self.mid:
                    raise Refusal("header of another manifest", version=self.version, fatal=True)
        return []

    def _add_record(self, part: bytes, record: SegmentRecord) -> list[int]:
        segment, size, chunks = record.segment, record.size, record.chunks
        if segment in self.records:
            if self.records[segment] != record:
                raise Refusal(f"two signed records for segment {segment}: the head equivocates", version=self.version)
            return []
        if segment >= len(self.segments) or len(record.joined) % 32 or not chunks:
            raise Refusal(f"record of segment {segment} is out of range", version=self.version, fatal=True)
        if len(chunks) != -(-size // self.header.chunk_bytes) or size > 2 * self.segments[segment].nbytes + 4096:
            raise Refusal(f"segment {segment}: {size} bytes in {len(chunks)} chunks", version=self.version, fatal=True)
        if record.first < segment or any(c in self._owner for c in chunks):
            raise Refusal(f"segment {segment}: chunk numbers overlap", version=self.version)
        if chunks.stop > self.max_chunks:
            raise Refusal(f"segment {segment}: chunks beyond {'the seal' if self.seal else 'policy'}", version=self.version)
        # Checked before anything is kept: a manifest that does not add up must never look whole.
        if len(self.records) + 1 == len(self.segments):
            self._check_whole({**self.records, segment: record}, self.seal)
        self.records[segment], self._parts[segment] = record, part
        self._size += size
        self._owner.update(dict.fromkeys(chunks, record))
        self._seen.add(part)
        return list(chunks)

    def _add_seal(self, part: bytes, seal: Seal) -> None:
        if self.seal is not None:
            if self.seal != seal:
                raise Refusal("two signed seals: the head equivocates", version=self.version)
            return
        tensors, rest = divmod(len(seal.joined), 16)
        fits = seal.segments == len(self.segments) and tensors == len(self.header.layout.tensors) and not rest
        if not fits or len(seal.state_digest) != 32:
            raise Refusal("seal does not fit the header", version=self.version, fatal=True)
        if seal.chunks > self.max_chunks:
            raise Refusal(f"a seal of {seal.chunks} chunks: over policy", version=self.version)
        if any(chunk >= seal.chunks for chunk in self._owner):
            raise Refusal("seal leaves out chunks of a signed record", version=self.version)
        self._check_whole(self.records, seal)
        self.seal, self._parts[len(self.segments)] = seal, part
        self._seen.add(part)

    def _check_whole(self, records: Mapping[int, SegmentRecord], seal: Seal | None) -> None:
        """Refusal when there are all records and a seal, and they do not add up."""
        if seal is None or len(records) < len(self.segments):
            return
        first, size, joined = 0, 0, blake3.blake3()
        for record in (records[i] for i in range(len(self.segments))):
            if record.first != first:
                raise Refusal(f"segment {record.segment}: chunks do not follow on", version=self.version)
            first, size = record.chunks.stop, size + record.size
            joined.update(encode_struct(record))
        if (first, size, joined.digest()) != (seal.chunks, seal.size, seal.records_digest):
            raise Refusal("records do not add up to the seal", version=self.version)

    def _mine(self, body: B) -> B:
        if body.mid != self.mid:
            raise Refusal("part of another manifest", version=self.version, fatal=True)
        return body


def open_part(part: bytes, head_key: bytes, version: Version | None = None) -> SignedPart:
    """Read a part and check its signature. Refusal unless `head_key` signed it as a part of its kind; `version` is only for the
    refusal's message."""
    try:
        signed = unpack(part, SignedPart)
    except Refusal:
        raise Refusal("malformed manifest part", version=version, fatal=True) from None
    if not verify(head_key, DOMAIN[signed.kind], signed.body, signed.signature):
        why = f"manifest {signed.kind} is not signed by the head"
        raise Refusal(why, version=version or _claimed(signed.body), fatal=True)
    return signed


def _claimed(body: bytes) -> Version | None:
    """The version that a bad header claims; only for the refusal's message."""
    try:
        return unpack(unpack(body, list[msgspec.Raw])[1], Version)
    except (Refusal, IndexError):
        return None


def open_header(part: bytes, *, head_key: bytes, run: str, min_epoch: int, now: float) -> Manifest:
    """Verify a header part and start a Manifest. Refusal: not the head's, another run, an older epoch, an unknown kind or
    codec, sizes over policy, expired or from the future."""
    signed = open_part(part, head_key)
    if signed.kind != "header":
        raise Refusal(f"expected a manifest header, got a {signed.kind}", fatal=True)
    h = Header(*_read(signed, _HeaderBody))
    version, base, packed = h.version, h.base, cast(object, h.layout)
    if h.run != run:
        raise Refusal(f"manifest is for run {h.run}, this is run {run}", version=version, fatal=True)
    if version.epoch < min_epoch:
        raise Refusal(f"manifest of older epoch {version.epoch}, the run is at epoch {min_epoch}", version=version)
    if h.kind not in KINDS:
        raise Refusal(f"unknown manifest kind {h.kind!r}", version=version)
    if h.codec != CODEC:
        raise Refusal(f"unknown codec {h.codec!r}, this node knows {CODEC}", version=version)
    if (h.kind in DELTAS) != (base is not None) or (base is not None and base >= version):
        raise Refusal(f"{h.kind} with base {base}", version=version, fatal=True)
    if not 1024 <= h.chunk_bytes <= MAX_CHUNK or not 1024 <= h.segment_bytes <= MAX_SEGMENT:
        why = f"chunks of {h.chunk_bytes} and segments of {h.segment_bytes} bytes: over policy"
        raise Refusal(why, version=version, fatal=True)
    if h.segment_bytes > h.chunk_bytes * MAX_SEGMENT_CHUNKS:
        why = f"segments of {h.segment_bytes} bytes in chunks of {h.chunk_bytes}: over policy"
        raise Refusal(why, version=version, fatal=True)
    if not h.created <= now + MAX_CLOCK_SKEW_S or h.expires - h.created > MAX_LIFETIME_S:
        raise Refusal("manifest is dated in the future or lives too long", version=version)
    if h.expires <= now:
        raise Refusal(f"manifest expired {now - h.expires:.0f} s ago", version=version)
    try:
        if not isinstance(packed, bytes):
            raise Refusal("tensor table is not bytes", fatal=True)
        table = _read_table(packed)
    except Refusal as refusal:
        raise refusal.at(version=version) from None
    if not table.tensors or not table.nbytes:
        raise Refusal("manifest of no tensors", version=version)
    if h.kind == "descriptor" and table.nbytes > GIB:
        raise Refusal("descriptor is too large", version=version)
    segments = table.count_segments(h.segment_bytes)
    chunks = most_chunks(table.nbytes, segments, h.chunk_bytes)
    if segments > MAX_SEGMENTS or chunks > MAX_CHUNKS:
        raise Refusal(f"a state of {segments} segments and up to {chunks} chunks: over policy", version=version, fatal=True)
    return Manifest(mid_of(signed.body), h._replace(layout=table), part)
