"""Messages that bring a version to the nodes: what can be fetched, signed manifests, chunks, and who holds or wants which.

Must not know sessions, nor which chunk goes to whom.
"""

from __future__ import annotations

from p2p.protocol.wire import Blob, Count, Digest, Few, Line, Many, Message, Name, Rate, Real, Record
from p2p.version import Version


class CatalogEntry(Record, frozen=True):
    """A retained manifest that a node may fetch. `size` is payload bytes (0 while it is being made)."""

    mid: Digest
    kind: Name
    version: Version
    base: Version | None
    base_digest: Digest
    state_digest: Digest
    size: Count


class Catalog(Message, frozen=True, tag="catalog"):
    """Head to a joiner: what can be fetched, and which version is current."""

    current: Version
    entries: Many[CatalogEntry]


class GetCatalog(Message, frozen=True, tag="get_catalog"):
    """Node to head: send me the catalog again."""


class Parts(Message, frozen=True, tag="parts"):
    """Signed manifest parts (header, segment records, seal), each verifiable by itself against the head's key."""

    mid: Digest
    parts: Few[Blob]


class GetParts(Message, frozen=True, tag="get_parts"):
    """Send me the manifest parts you have of `mid`."""

    mid: Digest


class Follow(Message, frozen=True, tag="follow"):
    """Sender wants every new delta pushed as it is made (True), or no longer (False)."""

    on: bool


class Allowance(Message, frozen=True, tag="allowance"):
    """What the owner of the sender allows, to each neighbour for itself. Sent when it changes, and first once a link is up if
    anything is limited. None: no bound. Who ignores `takes` is held up by TCP; who ignores `relays` makes versions late."""

    takes: Rate | None
    """bytes/s of chunks that the receiver of this message may send it"""
    relays: Rate | None
    """bytes/s that leave the sender at most, to all peers together; 0: it relays nothing"""


class Subscribe(Message, frozen=True, tag="subscribe"):
    """Sender takes part in the spreading of `mid` and holds these chunks already (bitmap, bit i of byte i//8)."""

    mid: Digest
    have: Blob


class Have(Message, frozen=True, tag="have"):
    """Sender verified and holds these chunks of `mid`, none of them named twice."""

    mid: Digest
    chunks: Many[Count]


class Want(Message, frozen=True, tag="want"):
    """Sender asks for these chunks, none of them named twice, under a lease that it keeps itself."""

    mid: Digest
    chunks: Few[Count]


class Relieve(Message, frozen=True, tag="relieve"):
    """Source to whoever relays these chunks: they go to the others from here, do not relay them. Where peers are in groups, to
    those of the receiver's own group: what it is to bring to other groups stays with it."""

    mid: Digest
    chunks: Many[Count]


class Chunk(Message, frozen=True, tag="chunk"):
    """One chunk of the version `mid`."""

    mid: Digest
    index: Count
    duty: Count
    """What the receiver is to do with it. 0: nothing. 1, from the source only: relay it to everyone who lacks it, as the chunk's
    distributor. Any other: a set of groups of peers to bring it to (see `broadcast.peer_groups`)."""
    data: Blob
    """refused when its digest is not the one that the signed manifest has at `index`"""


class Report(Message, frozen=True, tag="report"):
    """Node to head: what a peer sent was refused and the peer dropped. The head weighs it and never evicts on one."""

    peer: Name
    version: Version
    chunk: Count
    reason: Line


class Installed(Message, frozen=True, tag="installed"):
    """Node to head: this version is in place and its state digest was checked. Times in seconds. The digest names the version; it
    is public, so it proves nothing about what the node holds."""

    version: Version
    state_digest: Digest
    pause_s: Real
    apply_s: Real
    transfer_s: Real
    bytes_from_head: Count
    bytes_from_peers: Count
