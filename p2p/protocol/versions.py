"""Messages that bring a version to the nodes: what can be fetched, signed manifests, chunks, and who holds or wants which.

Must not know sessions, nor which chunk goes to whom.
"""

from __future__ import annotations

from dataclasses import dataclass

from p2p.protocol.wire import message
from p2p.version import Version


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A retained manifest that a node may fetch. `size` is payload bytes (0 while it is being made)."""

    mid: bytes
    kind: str
    version: Version
    base: Version | None
    base_digest: bytes
    state_digest: bytes
    size: int


@message("catalog")
@dataclass(frozen=True, slots=True)
class Catalog:
    """Head to a joiner: what can be fetched, and which version is current."""

    current: Version
    entries: tuple[CatalogEntry, ...]


@message("get_catalog")
@dataclass(frozen=True, slots=True)
class GetCatalog:
    """Node to head: send me the catalog again."""


@message("parts")
@dataclass(frozen=True, slots=True)
class Parts:
    """Signed manifest parts (header, segment records, seal), each verifiable by itself against the head's key."""

    mid: bytes
    parts: tuple[bytes, ...]


@message("get_parts")
@dataclass(frozen=True, slots=True)
class GetParts:
    """Send me the manifest parts you have of `mid`."""

    mid: bytes


@message("follow")
@dataclass(frozen=True, slots=True)
class Follow:
    """Sender wants every new delta pushed as it is made (True), or no longer (False)."""

    on: bool


@message("subscribe")
@dataclass(frozen=True, slots=True)
class Subscribe:
    """Sender takes part in the spreading of `mid` and holds these chunks already (bitmap, bit i of byte i//8)."""

    mid: bytes
    have: bytes


@message("have")
@dataclass(frozen=True, slots=True)
class Have:
    """Sender verified and holds these chunks of `mid`."""

    mid: bytes
    chunks: tuple[int, ...]


@message("want")
@dataclass(frozen=True, slots=True)
class Want:
    """Sender asks for these chunks, under a lease that it keeps itself."""

    mid: bytes
    chunks: tuple[int, ...]


@message("relieve")
@dataclass(frozen=True, slots=True)
class Relieve:
    """Source to whoever relays these chunks: they go to the others from here, do not relay them. Where peers are in groups, to
    those of the receiver's own group: what it is to bring to other groups stays with it."""

    mid: bytes
    chunks: tuple[int, ...]


@message("chunk")
@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk. `duty` is what the receiver is to do with it: 0 nothing; 1, from the source only, it is the chunk's distributor:
    relay it to everyone who lacks it; else bring it to these groups of peers (see `broadcast.groups`)."""

    mid: bytes
    index: int
    duty: int
    data: bytes


@message("report")
@dataclass(frozen=True, slots=True)
class Report:
    """Node to head: what a peer sent was refused and the peer dropped. The head weighs it and never evicts on one."""

    peer: str
    version: Version
    chunk: int
    reason: str


@message("installed")
@dataclass(frozen=True, slots=True)
class Installed:
    """Node to head: this version is in place and its state digest was checked. Times in seconds."""

    version: Version
    state_digest: bytes
    pause_s: float
    apply_s: float
    transfer_s: float
    bytes_from_head: int
    bytes_from_peers: int
