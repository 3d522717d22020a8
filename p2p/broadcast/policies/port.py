"""Who pushes which chunk to whom: the pluggable half of a session. Pure, as the session that owns it.

A policy is told what happens (`joined`, `has`, `held`, ...) and asked for the next push. Must not know channels or bytes on
disk. Here: the port, and the plain ones that the default is measured against. The default: seeding (at the source) and
relaying (everywhere else).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from p2p.broadcast.session import Session

Push = tuple[str, int, int]
"""Peer, chunk, and what the peer is to do with it: nothing (0), bring it to everybody (`groups.EVERYWHERE`), or to some groups
of peers (see `groups`)."""


class Policy:
    """One session's. Methods but `push` are facts; the session's own state is up to date when they are called."""

    pulls = True
    """whether what does not come by itself is asked for; the plain policies are measured without"""

    def __init__(self, session: Session) -> None:
        self.session = session

    def joined(self, peer: str, now: float) -> None:
        """`peer` takes part from now on."""

    def left(self, peer: str, now: float) -> None:
        """`peer` is gone, its record too."""

    def has(self, peer: str, chunk: int, now: float) -> None:
        """`peer` holds `chunk`, and was not known to."""

    def held(self, chunk: int, *, duty: int, now: float) -> None:
        """`chunk` is here, verified (or, at the source, made). `duty`: what the sender asks to be done with it."""

    def entrusted(self, chunk: int, duty: int, now: float) -> None:
        """`chunk`, which was here already, came with a duty."""

    def claim(self, peer: str, chunk: int, now: float) -> int:
        """`peer` asked for `chunk` and gets it: what it is to do with it, as in Push."""
        return 0

    def relieve(self, chunks: Sequence[int]) -> None:
        """The source says that it hands these to the others itself; to those of this peer's own group where there are groups."""

    def relieved(self) -> list[tuple[str, int]]:
        """Whom to tell so, and the chunks, since the last call."""
        return []

    def tick(self, now: float) -> None:
        """Some 20 times a second."""

    def push(self, ready: Sequence[str], now: float) -> Push | None:
        """What to push now to one of `ready` (the one served longest ago first); None for nothing."""
        raise NotImplementedError


class _Static(Policy):
    """Every peer has fixed children among the sorted peers, the source first, and sends each of them what it lacks, lowest
    chunk first. When a peer leaves, those behind it move up."""

    pulls = False

    def children(self, order: list[str], mine: int) -> list[str]:
        raise NotImplementedError

    def push(self, ready: Sequence[str], now: float) -> Push | None:
        session = self.session
        nodes = sorted({*session.peers(), session.me} - {session.source_name})
        order = [session.source_name, *nodes]
        children = set(self.children(order, order.index(session.me)))
        for peer in ready:
            if peer in children:
                chunk = session.lowest_lacking(peer)
                if chunk is not None:
                    return peer, chunk, 0
        return None


class Star(_Static):
    """The source sends everything to everyone."""

    def children(self, order: list[str], mine: int) -> list[str]:
        return order[1:] if mine == 0 else []


class Chain(_Static):
    """Each peer sends everything to the next."""

    def children(self, order: list[str], mine: int) -> list[str]:
        return order[mine + 1 : mine + 2]


class Tree(_Static):
    """A binary tree."""

    def children(self, order: list[str], mine: int) -> list[str]:
        return order[2 * mine + 1 : 2 * mine + 3]


def make_policy(name: str, session: Session) -> Policy:
    """ValueError for a name that is none of POLICIES."""
    from p2p.broadcast.policies.lanes import Lanes
    from p2p.broadcast.policies.relaying import Relaying
    from p2p.broadcast.policies.seeding import Seeding

    plain = {"star": Star, "chain": Chain, "tree": Tree}
    if name in plain:
        return plain[name](session)
    if name == DEFAULT:
        if not session.is_source:
            return Relaying(session)
        return Seeding(session) if session.places is None else Lanes(session)
    raise ValueError(f"unknown policy {name!r}; known: {', '.join(POLICIES)}")


DEFAULT = "shoal"
POLICIES = (DEFAULT, "star", "chain", "tree")
