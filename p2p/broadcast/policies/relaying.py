"""The default policy at a peer that is not the source: relay what it distributes, to everyone who lacks it.

Pure; see `port`. Where peers are in groups, it brings the chunk to the others of its own group, and to those groups that it
was handed with it (`tree`). All peers get the chunks that this peer distributes in the order in which the chunks came. So the
others can tell from what was announced how far this peer has got.
"""

from __future__ import annotations

from collections.abc import Sequence

from p2p.broadcast.peer_groups import duty_of, groups_of
from p2p.broadcast.policies.port import Policy, Push, SessionView
from p2p.broadcast.policies.queues import Queues
from p2p.broadcast.policies.tree import SpanningTree


class Relaying(Policy):
    def __init__(self, session: SessionView) -> None:
        self._session = session
        self._distributes: list[int] = []
        """chunks that this peer brings to its own group (to everybody where there are no groups), in the order they came"""
        self._queues = Queues(session)
        self._tree = SpanningTree(session)
        self._done: dict[int, int] = {}
        """chunk -> groups that this peer took on, as a duty"""

    def joined(self, peer: str, now: float) -> None:
        if not self._session.complete and self._mine(peer):
            # A late joiner pulls, from everybody: pushing as well would send much twice.
            for chunk in self._distributes:
                self._queues.add(peer, chunk)

    def _mine(self, peer: str) -> bool:
        """Whether `peer` gets what this peer relays to its own group."""
        places = self._session.places
        return peer != self._session.source and (places is None or places.groups.get(peer) == places.group)

    def left(self, peer: str, now: float) -> None:
        self._queues.drop(peer)
        if self._session.places is not None:
            self._tree.left(peer, now, self._session.places)

    def held(self, chunk: int, *, duty: int, now: float) -> None:
        if duty:
            self.entrusted(chunk, duty, now)

    def entrusted(self, chunk: int, duty: int, now: float) -> None:
        """Queue the chunk for this peer's own group, and for those groups of its duty that it was not given before."""
        places = self._session.places
        if places is not None:
            groups = [g for g in groups_of(duty, len(places.sites)) if not self._done.get(chunk, 0) >> g + 1 & 1]
            self._done[chunk] = self._done.get(chunk, 0) | duty_of(groups)
            self._tree.bring(chunk, groups, places)
            if places.group not in groups:
                return
        self._distributes.append(chunk)
        for peer in self._session.peers():
            if self._mine(peer):
                self._queues.add(peer, chunk)

    def relieve(self, chunks: Sequence[int]) -> None:
        self._queues.spare(chunks)  # not `_tree`: other groups count on this peer

    def push(self, ready: Sequence[str], now: float) -> Push | None:
        """Copies for other groups leave first, since more follows from them."""
        places = self._session.places
        if places is not None:
            errand = self._tree.next(ready, now, places)
            if errand is not None:
                return errand
        return self._queues.next(ready)
