"""Chunks that wait to be pushed, by peer: what the policies at the source and at a relay share. Pure.

Must not know why a chunk waits, nor what its receiver is to do with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from p2p.broadcast.policies.port import Push, ReceiverView


class Queues:
    """Chunks that wait to be pushed, by peer. A peer that lags is served when no other can be: it must not hold up a
    version for the rest."""

    def __init__(self, session: ReceiverView) -> None:
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

    def waiting(self) -> int:
        """Copies that wait, over all peers."""
        return sum(map(len, self._queues.values()))

    def longest(self) -> int:
        """Chunks that wait for the peer for which most do, those that lag aside."""
        return max((len(q) for peer, q in self._queues.items() if peer not in self._session.lagging), default=0)

    def next(self, ready: Sequence[str]) -> Push | None:
        """To whom most waits, and the oldest of it that is still lacking there; without a duty."""
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
                return Push(peer, chunk, 0)
            if not queue:
                del queues[peer]
                waiting.remove((peer, queue))
        return None


def _length(waiting: tuple[str, deque[int]]) -> int:
    return len(waiting[1])
