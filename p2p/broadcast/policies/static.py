"""The plain policies that the default one is measured against: star, chain and binary tree. Pure.

Must not know how a session finds out what its peers lack.
"""

from __future__ import annotations

from collections.abc import Sequence

from p2p.broadcast.policies.port import Policy, Push, SessionView


class _Static(Policy):
    """Every peer has fixed children among the sorted peers, the source first, and sends each of them what it lacks, lowest
    chunk first. When a peer leaves, those behind it move up."""

    pulls = False

    def __init__(self, session: SessionView) -> None:
        self._session = session

    def children(self, order: list[str], mine: int) -> list[str]:
        """Whom this peer sends to. `order`: all peers, the source first; `mine`: this peer's place in it."""
        raise NotImplementedError

    def push(self, ready: Sequence[str], now: float) -> Push | None:
        session = self._session
        source = session.me if session.source is None else session.source
        order = [source, *sorted({*session.peers(), session.me} - {source})]
        children = set(self.children(order, order.index(session.me)))
        for peer in ready:
            if peer in children:
                chunk = session.lowest_lacking(peer)
                if chunk is not None:
                    return Push(peer, chunk, 0)
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
    """A binary tree: each peer sends everything to two."""

    def children(self, order: list[str], mine: int) -> list[str]:
        return order[2 * mine + 1 : 2 * mine + 3]
