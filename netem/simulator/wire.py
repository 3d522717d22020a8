"""What travels in a simulated broadcast: versions with real manifests and chunks of zeros, and what they take on a link.

Values only. Must not know peers, links or time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from p2p.channel.stream import PIECE
from p2p.identity import Identity
from p2p.layout import Layout
from p2p.limits import DEFAULT_SEGMENT
from p2p.version import Version
from p2p.weights.manifest import CODEC, MAX_LIFETIME_S, Header, ManifestSigner

RUN = "simulated"
"""Name of the run that simulated manifests belong to."""

HEAD = Identity.from_seed(bytes(32))
"""Who signs them. The same in every simulation, so that manifest ids are too."""

PACKET_HEAD = 52
"""Bytes of IP and TCP in a packet: 20 + 20, and 12 of timestamps."""

RECORD_HEAD = 30
"""Bytes of yamux (12) and Noise (18) in a record that holds PIECE bytes."""

CHUNK_HEAD = 55
"""Bytes of a chunk's message beside its data."""


def wire_bytes(payload: int, mtu: int) -> int:
    """What `payload` bytes of a chunk take on a link of that MTU."""
    size = payload + CHUNK_HEAD
    size += RECORD_HEAD * ceil(size / PIECE)
    return size + PACKET_HEAD * ceil(size / (mtu - PACKET_HEAD))


@lru_cache(maxsize=64)
def zeros(size: int) -> bytes:
    """The data of a chunk of so many bytes: nothing reads it, and all chunks of one size share it."""
    return bytes(size)


def count_chunks(payload: int, chunk_bytes: int) -> int:
    """Chunks of a version of `payload` bytes, which is cut into segments of DEFAULT_SEGMENT first."""
    whole, rest = divmod(payload, DEFAULT_SEGMENT)
    return whole * -(-DEFAULT_SEGMENT // chunk_bytes) - (-rest // chunk_bytes)


@dataclass(frozen=True, slots=True)
class SimVersion:
    """One version as its source publishes it."""

    number: int
    payload: int
    mid: bytes
    parts: tuple[bytes, ...]
    """signed manifest parts: the header, the record of each segment, the seal"""


def make_version(number: int, payload: int, chunk_bytes: int) -> SimVersion:
    """The version of round `number`, from 1, of `payload` bytes: a delta to the one before."""
    layout = Layout.build([("payload", "uint8", (payload,))])
    header = Header(
        run=RUN, version=Version(1, number), kind="delta", base=Version(1, number - 1), base_digest=bytes(32), codec=CODEC,
        segment_bytes=DEFAULT_SEGMENT, chunk_bytes=chunk_bytes, created=0, expires=MAX_LIFETIME_S, layout=layout,
    )  # fmt: skip
    signer = ManifestSigner(HEAD, header)
    parts = [signer.header_part]
    for segment in layout.segments(DEFAULT_SEGMENT):
        size = min(segment.stop, payload) - segment.start
        digests = tuple((segment.start + at).to_bytes(32, "big") for at in range(0, size, chunk_bytes))
        parts.append(signer.record(segment.index, size, digests))
    parts.append(signer.seal([bytes(16)], bytes(32)))
    return SimVersion(number, payload, signer.mid, tuple(parts))
