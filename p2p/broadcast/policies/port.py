"""The port of a push policy: what it may read of a session, what it is told, and what it answers. Pure.

A session asks its policy for the next push, and tells it what happens. A policy reads the session through `SessionView` and
never changes it. Must not know any session class, any other policy, channels, or bytes on disk.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from p2p.broadcast.chunkset import ChunkSet
from p2p.broadcast.peer_groups import PeerPlaces


class Push(NamedTuple):
    """A chunk to hand to a peer."""

    peer: str
    chunk: int
    duty: int
    """what the peer is to do with it: nothing (0), bring it to everybody (`peer_groups.EVERYWHERE`), or bring it to a set of
    groups (`peer_groups.duty_of`)"""


class Relieved(NamedTuple):
    """A distributor that the source relieves of a chunk: it does not relay the chunk any further."""

    peer: str
    chunk: int


@dataclass(slots=True)
class Remembered:
    """What the source keeps of a receiver from one manifest to the next."""

    window: float
    """bytes of copies that it is given to bring to the others at once"""
    pace: float = 0.0
    """bytes/s of copies that it brought to them while it had work; 0 for unknown"""


class ReceiverView(Protocol):
    """What the source's policy reads of those it hands chunks to. A receiver is a peer, or a lane of peers (see `lanes`)."""

    @property
    def total(self) -> int | None:
        """Chunks of the manifest; None while more are being made."""

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a full chunk."""

    @property
    def pace(self) -> float:
        """Bytes/s that leave this peer at most; 0 for unknown."""

    @property
    def uplink(self) -> float:
        """Bytes/s that this peer's uplink was seen to carry; 0 for unknown."""

    @property
    def memory(self) -> MutableMapping[str, Remembered]:
        """Receiver -> what the policy remembers of it from one manifest to the next."""

    @property
    def lagging(self) -> AbstractSet[str]:
        """Receivers that fell behind the others."""

    @property
    def apart(self) -> AbstractSet[str]:
        """Receivers that have no link with most of the others."""

    def peer_holds(self, peer: str, chunk: int) -> bool:
        """Whether `peer` announced `chunk`. `peer` must take part."""

    def anyone_holds(self, chunk: int) -> bool:
        """Whether any peer announced `chunk`, strangers aside."""

    def lacks(self, peer: str, chunk: int) -> bool:
        """Whether `chunk` can be handed to `peer` and is neither there nor on its way from here."""

    def relays(self, peer: str) -> float:
        """Bytes/s that leave `peer` at most, as its owner bounds them; infinite where nobody does, 0: it relays nothing."""

    def lowest_of(self, chunks: ChunkSet, peer: str) -> int | None:
        """The lowest of `chunks` that `peer` does not hold."""


class SessionView(ReceiverView, Protocol):
    """What any policy may read of its session."""

    @property
    def me(self) -> str:
        """This peer's name."""

    @property
    def source(self) -> str | None:
        """The peer that made the manifest; None at that peer itself."""

    @property
    def places(self) -> PeerPlaces | None:
        """Which groups the peers are in; None while all are one group."""

    @property
    def complete(self) -> bool:
        """Whether every chunk of the sealed manifest is held here."""

    def peers(self) -> list[str]:
        """Those who take part, this peer aside."""

    def takes_part(self, peer: str) -> bool:
        """Whether `peer` takes part."""

    def holds_of(self, peer: str) -> int:
        """The chunks that `peer` announced, in one bit each."""

    def lowest_lacking(self, peer: str) -> int | None:
        """The lowest chunk held here that `peer` lacks and that is not on its way to it."""


class Policy:
    """The policy of one session. All methods but `push`, `grants`, `claim` and `relieved` are facts. The session's own state is
    up to date when they are called. `now` is in seconds, from any origin, and never falls."""

    pulls = True
    """whether the session asks for what does not come by itself; the plain policies are measured without"""

    def joined(self, peer: str, now: float) -> None:
        """`peer` takes part from now on."""

    def left(self, peer: str, now: float) -> None:
        """`peer` is gone, and the session has forgotten it."""

    def has(self, peer: str, chunk: int, now: float) -> None:
        """`peer` holds `chunk`, and was not known to."""

    def held(self, chunk: int, *, duty: int, now: float) -> None:
        """`chunk` is here and verified (or, at the source, made). `duty`: as in Push."""

    def entrusted(self, chunk: int, duty: int, now: float) -> None:
        """`chunk`, which was here already, came with a duty."""

    def grants(self, chunk: int, now: float) -> bool:
        """Whether a peer that asks for `chunk` gets it from here; not if it is to be on its way there by push."""
        return True

    def claim(self, peer: str, chunk: int, now: float) -> int:
        """`peer` asked for `chunk` and gets it: the duty it gets with it, as in Push."""
        return 0

    def relieve(self, chunks: Sequence[int]) -> None:
        """The source says that it hands these to the others itself; to those of this peer's own group where there are groups."""

    def relieved(self) -> list[Relieved]:
        """Whom to tell so since the last call."""
        return []

    def tick(self, now: float) -> None:
        """Called some 20 times a second."""

    def push(self, ready: Sequence[str], now: float) -> Push | None:
        """What to push now to one of `ready` (the one served longest ago first); None for nothing."""
        raise NotImplementedError
