"""Which answer is scored next: a pure core. Must not know processes, time, prompts or rewards.

Answers wait in a queue of their node's. A node's answers hold at most as many workers as there are; one more worker is for nodes
that hold none, so answers that never end hold up those of their own node and nobody else's. With one worker there is none to
spare: nodes take turns.
"""

from __future__ import annotations

from collections import Counter, deque

REMEMBERED = 4096
"""Nodes of which the last turn is known: many more than have answers waiting at once. The number bounds what strangers who come
and go make us keep."""


class FairQueue:
    """Jobs by node. Each is added, started by `next`, and is done; or it is withdrawn at any time."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._waiting: dict[str, deque[int]] = {}
        self._node_of: dict[int, str] = {}
        self._running: set[int] = set()
        self._held: Counter[str] = Counter()
        self._turn = 0
        self._last_turn: dict[str, int] = {}

    @property
    def most(self) -> int:
        """Workers that can be held at once: one more than a node may hold, where there are several."""
        return self.workers + 1 if self.workers > 1 else 1

    @property
    def running(self) -> int:
        """Jobs that hold a worker."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Jobs that hold none yet."""
        return len(self._node_of) - len(self._running)

    def held_by(self, node: str) -> int:
        """Workers that this node's jobs hold."""
        return self._held[node]

    def add(self, job_id: int, node: str) -> None:
        """A job of this node's."""
        if job_id in self._node_of:
            raise ValueError(f"job {job_id} is known already")
        self._node_of[job_id] = node
        self._waiting.setdefault(node, deque()).append(job_id)

    def next(self) -> int | None:
        """The next job that gets a worker; None when none may have one. Of the nodes that may go on, the one that holds the
        fewest, then the one whose last turn was longest ago."""
        if self.running >= self.most:
            return None
        spare = self.workers > 1 and self.running >= self.workers  # only the worker that is kept for others is left
        may = [n for n in self._waiting if self._held[n] < self.workers and not (spare and self._held[n])]
        if not may:
            return None
        node = min(may, key=lambda n: (self._held[n], self._last_turn.get(n, 0)))
        queue = self._waiting[node]
        job_id = queue.popleft()
        if not queue:
            del self._waiting[node]
        self._turn += 1
        self._last_turn.pop(node, None)  # so that the order is that of the turns
        self._last_turn[node] = self._turn
        if len(self._last_turn) > REMEMBERED:
            del self._last_turn[next(iter(self._last_turn))]
        self._held[node] += 1
        self._running.add(job_id)
        return job_id

    def done(self, job_id: int) -> None:
        """The job needs no worker any more, or no longer wants one. Nothing happens when it is not known."""
        node = self._node_of.pop(job_id, None)
        if node is None:
            return
        if job_id in self._running:
            self._running.remove(job_id)
            self._held[node] -= 1
        else:
            queue = deque(job for job in self._waiting[node] if job != job_id)
            if queue:
                self._waiting[node] = queue
            else:
                del self._waiting[node]
        if not self._held[node]:
            del self._held[node]
