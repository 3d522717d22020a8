"""The default policy at a peer that is not the source: relay what it distributes, to everyone who lacks it.

Pure; see `policy`. Where peers are in groups, it brings the chunk to the others of its own group, and to those groups that it
was handed with it (`spanning`). All peers get a chunk that is seeded here in the order in which the chunks came, so the
others can tell from what was announced how far this peer has got.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from p2p.broadcast.peer_groups import duty_of, groups_of
from p2p.broadcast.policies.port import Policy, Push
from p2p.broadcast.policies.tree import SpanningTree

if TYPE_CHECKING:
    from p2p.broadcast.session import Session


class Queues:
    """Chunks that wait to be pushed, by peer. A peer that lags is served when no other can be: it must not hold up a
    version for the rest."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._queues: dict[str, deque[int]] = {}
        self._spared: set[int] = set()

    def spare(self, chunks: Iterable[int]) -> None:
        """Push these to nobody."""
        self._spared.update(chunks)

    def add(self, peer: str, chunk: int) -> None:
        self._queues.setdefault(peer, deque()).append(chunk)

    def drop(self, peer: str) -> None:
        self._queues.pop(peer, None)

    def settle(self, peer: str, chunk: int) -> None:
        """`peer` has it: else it would count in `longest` until its turn comes."""
        queue = self._queues.get(peer)
        if queue and chunk in queue:
            queue.remove(chunk)
            if not queue:
                del self._queues[peer]

    def longest(self) -> int:
        """Chunks that wait for the peer for which most do, those that lag aside."""
        return max((len(q) for peer, q in self._queues.items() if peer not in self._session.lagging), default=0)

    def next(self, ready: Sequence[str]) -> tuple[str, int] | None:
        """To whom most waits, and the oldest of it that is still lacking there."""
        session, queues, lagging = self._session, self._queues, self._session.lagging
        if not queues:
            return None
        waiting = [(peer, queue) for peer in ready if (queue := queues.get(peer))]
        while waiting:
            # What is stale is taken off only where it matters: a queue that is longest as it is, is so when it is cleaned.
            if lagging:
                peer, queue = max(waiting, key=lambda w: (w[0] not in lagging, len(w[1])))
            else:
                peer, queue = max(waiting, key=_length)
            fresh = True
            while queue and (queue[0] in self._spared or not session.lacks(peer, queue[0])):
                queue.popleft()
                fresh = False
            if fresh:
                chunk = queue.popleft()
                if not queue:
                    del queues[peer]
                return peer, chunk
            if not queue:
                del queues[peer]
                waiting.remove((peer, queue))
        return None


def _length(waiting: tuple[str, deque[int]]) -> int:
    return len(waiting[1])


class Relaying(Policy):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._duty: list[int] = []
        self._queues = Queues(session)
        self._spanning = SpanningTree(session)
        self._done: dict[int, int] = {}
        """chunk -> groups that this peer took on, as a duty"""

    def joined(self, peer: str, now: float) -> None:
        if not self.session.complete and self._mine(peer):
            # A late joiner pulls, from everybody: pushing as well would send much twice.
            for chunk in self._duty:
                self._queues.add(peer, chunk)

    def _mine(self, peer: str) -> bool:
        """Whether `peer` gets what this peer relays to its own group."""
        places = self.session.places
        return peer != self.session.source and (places is None or places.groups.get(peer) == places.group)

    def left(self, peer: str, now: float) -> None:
        self._queues.drop(peer)
        if self.session.places is not None:
            self._spanning.left(peer, now, self.session.places)

    def held(self, chunk: int, *, duty: int, now: float) -> None:
        if duty:
            self.entrusted(chunk, duty, now)

    def entrusted(self, chunk: int, duty: int, now: float) -> None:
        places = self.session.places
        if places is not None:
            groups = [g for g in groups_of(duty, len(places.sites)) if not self._done.get(chunk, 0) >> g + 1 & 1]
            self._done[chunk] = self._done.get(chunk, 0) | duty_of(groups)
            self._spanning.bring(chunk, groups, places)
            if places.group not in groups:
                return
        self._duty.append(chunk)
        for peer in self.session.peers():
            if self._mine(peer):
                self._queues.add(peer, chunk)

    def relieve(self, chunks: Sequence[int]) -> None:
        self._queues.spare(chunks)  # not `_spanning`: other groups count on this peer

    def push(self, ready: Sequence[str], now: float) -> Push | None:
        places = self.session.places
        if places is not None:
            errand = self._spanning.next(ready, now, places)
            if errand is not None:
                return errand
        found = self._queues.next(ready)
        return None if found is None else (*found, 0)
