"""What an exchange keeps of one manifest (`Transfer`) and of one peer next to it (`Neighbour`). Pure.

Must not know who decides: the session does, the exchange carries it out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple, Protocol

from p2p.allowance.bucket import TokenBucket
from p2p.broadcast.chunkset import bits_of, chunks_of
from p2p.broadcast.draws import PeerDraws
from p2p.broadcast.gossip import Gossip
from p2p.broadcast.session import Session
from p2p.channel.port import Channel
from p2p.errors import Refusal
from p2p.limits import KIB, MAX_CHUNK, MIB
from p2p.protocol.versions import Have
from p2p.protocol.wire import FEW, MANY
from p2p.weights.manifest import Manifest

PARTS_PER_MESSAGE = 512 * KIB
"""Bytes of manifest parts per message, below MAX_FRAME with room for the envelope. A longer part travels alone."""

HAVE_BATCH = MANY
"""Chunk numbers in one Have, as many as may be; an anchor of a large model has more chunks than that."""

ASK_PARTS_S, ASK_PARTS_MAX_S = 1.0, 8.0
"""Seconds from one request for missing records to the next: the first, doubled each time up to the second while nothing comes."""


class Chunks(Protocol):
    """Where verified chunks are kept: `weights.store.ChunkStore` in nodes and the head, and nowhere at all in the simulator."""

    def put(self, digest: bytes, data: bytes) -> object:
        """Keep `data`. Refusal when it is not what `digest` says, ShoalError when there is no room."""

    def pin(self, digests: Iterable[bytes]) -> None:
        """Do not drop these to make room."""

    def unpin(self, digests: Iterable[bytes]) -> None:
        """These may be dropped again."""


@dataclass
class Traffic:
    """Chunk payload bytes of one manifest, counted at this peer."""

    sent: int = 0
    from_head: int = 0
    from_peers: int = 0
    duplicates: int = 0
    first_at: float = 0.0
    done_at: float = 0.0


@dataclass
class Transfer:
    """One manifest here: its proof, its session, its traffic, and who waits for it to change."""

    manifest: Manifest
    session: Session
    traffic: Traffic
    wanted: bool
    """this peer takes part (a header alone is only remembered)"""
    waiting: list[tuple[Callable[[], bool], Callable[[], object]]] = field(default_factory=list)
    """what somebody waits for, and what is called once it is so"""
    news: Gossip = field(default_factory=Gossip)
    draws: PeerDraws = field(default_factory=PeerDraws)
    """what each peer was handed of it; it outlives their links"""
    asked_parts_at: float = -1e9
    ask_parts_after: float = ASK_PARTS_S

    def wake(self) -> None:
        """A chunk or a part came, or the manifest was dropped."""
        if self.waiting:
            waiting, self.waiting = self.waiting, []
            for is_so, call in waiting:
                if is_so():
                    call()
                else:
                    self.waiting.append((is_so, call))


MEASURED_S = 10.0
"""Seconds for which a neighbour's path is looked at after the last chunk that went there, and while anything is under way to it.
Control messages alone say nothing of the uplink, and a look at a thousand neighbours is a thousand system calls."""


class Job(NamedTuple):
    """A chunk that is being handed to a neighbour."""

    transfer: Transfer
    chunk: int
    duty: int
    """as in `policies.port.Push`"""


class Neighbour:
    """A neighbour: `post` queues control messages without waiting, `bulk` carries chunks."""

    __slots__ = (
        "answered", "bulk", "following", "gone", "greeted", "job", "listed", "measured_until", "name", "parts_sent", "post",
        "received", "served_at", "smoothed", "takes",
    )  # fmt: skip

    def __init__(self, name: str, post: Callable[[object], None], bulk: Channel, now: float) -> None:
        self.name, self.post, self.bulk = name, post, bulk
        self.following = False
        self.parts_sent: set[tuple[bytes, int]] = set()
        self.answered: dict[bytes, float] = {}
        """manifest id -> from when on this neighbour is sent all parts of it again"""
        self.greeted: set[bytes] = set()
        """manifests this neighbour was told our chunks of, in answer to its own Subscribe"""
        self.job: Job | None = None
        """chunk that is being handed to the bulk channel, which has room for another one when this is done"""
        self.served_at = -inf
        """when it last got a job"""
        self.measured_until = now + MEASURED_S
        """its path is looked at until then"""
        self.smoothed = 1.0
        """bytes/s that its connection was last told to keep to"""
        self.takes = TokenBucket()
        """chunk bytes/s that its owner lets it be sent from here"""
        self.received = 0
        """chunk bytes that came from it"""
        self.listed = True
        """the head has told of it: who is in no roster is given nothing"""
        self.gone = False
        """removed: it is served no more, even if its task is only about to begin"""

    def may_take(self, now: float) -> bool:
        """Whether it may be sent a chunk now: it is listed, and its owner's limit lets it."""
        return self.listed and (not self.takes.rate or not self.takes.wait(now, MAX_CHUNK))

    def post_have(self, mid: bytes, chunks: Sequence[int]) -> None:
        """Tell it that these chunks are held here; of none, that this peer takes part."""
        for message in haves(mid, chunks):
            self.post(message)

    def forget_sent(self, mid: bytes) -> None:
        """It may not have the parts of this manifest any more: the next chunk is proven anew."""
        self.parts_sent = {(m, s) for m, s in self.parts_sent if m != mid}

    def forget(self, mid: bytes) -> None:
        """The manifest is dropped here."""
        self.forget_sent(mid)
        self.answered.pop(mid, None)
        self.greeted.discard(mid)


def haves(mid: bytes, chunks: Sequence[int]) -> list[Have]:
    """The messages that say that these chunks are held here; one of none that this peer takes part."""
    chunks = list(dict.fromkeys(chunks))  # one that the disk lost and that came again is news twice
    return [Have(mid, tuple(chunks[at : at + HAVE_BATCH])) for at in range(0, max(len(chunks), 1), HAVE_BATCH)]


def batches(parts: Iterable[bytes]) -> Iterator[tuple[bytes, ...]]:
    """The parts in order, as many at a time as go into one message."""
    batch: list[bytes] = []
    size = 0
    for part in parts:
        if batch and (size + len(part) > PARTS_PER_MESSAGE or len(batch) >= FEW):
            yield tuple(batch)
            batch, size = [], 0
        batch.append(part)
        size += len(part)
    if batch:
        yield tuple(batch)


def bitmap(chunks: set[int]) -> bytes:
    """Bit i of byte i//8 is set for every chunk i."""
    bits = bits_of(chunks)
    return bits.to_bytes((bits.bit_length() + 7) >> 3, "little")


def members(bits: bytes) -> Iterator[int]:
    """Inverse of `bitmap`, ascending. Refusal over one MiB (it is bounded by the frame already)."""
    if len(bits) > MIB:
        raise Refusal("bitmap too long", fatal=True)
    return chunks_of(int.from_bytes(bits, "little"))
