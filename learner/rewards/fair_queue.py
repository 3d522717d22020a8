"""Which answer is scored next, and until when: a pure core, told the time. Must not know processes, prompts or rewards.

Answers wait in a queue of their node's. A node's answers hold at most as many workers as there are; one more worker is for nodes
that hold none, so answers that never end hold up those of their own node and nobody else's. With one worker there is none to
spare: nodes take turns.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import NamedTuple

REMEMBERED = 4096
"""Nodes of which the last turn is known: many more than have answers waiting at once. The number bounds what strangers who come
and go make us keep."""


class StartedJob(NamedTuple):
    """A job that has a worker from now on."""

    job_id: int
    deadline: float
    """when its worker is taken from it, on the clock of `next`"""


class _Waiting(NamedTuple):
    job_id: int
    limit_s: float


class FairQueue:
    """Jobs by node. Each is added, started by `next`, and is done; or it is withdrawn at any time."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._waiting: dict[str, deque[_Waiting]] = {}
        self._node_of: dict[int, str] = {}
        self._running: dict[int, float] = {}
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

    def add(self, job_id: int, node: str, limit_s: float) -> None:
        """A job of this node's, which may hold a worker for `limit_s` seconds."""
        if job_id in self._node_of:
            raise ValueError(f"job {job_id} is known already")
        self._node_of[job_id] = node
        self._waiting.setdefault(node, deque()).append(_Waiting(job_id, limit_s))

    def next(self, now: float) -> StartedJob | None:
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
        job = queue.popleft()
        if not queue:
            del self._waiting[node]
        self._turn += 1
        self._last_turn.pop(node, None)  # so that the order is that of the turns
        self._last_turn[node] = self._turn
        if len(self._last_turn) > REMEMBERED:
            del self._last_turn[next(iter(self._last_turn))]
        self._held[node] += 1
        self._running[job.job_id] = now + job.limit_s
        return StartedJob(job.job_id, now + job.limit_s)

    def done(self, job_id: int) -> None:
        """The job needs no worker any more, or no longer wants one. Nothing happens when it is not known."""
        node = self._node_of.pop(job_id, None)
        if node is None:
            return
        if self._running.pop(job_id, None) is not None:
            self._held[node] -= 1
        else:
            queue = deque(job for job in self._waiting[node] if job.job_id != job_id)
            if queue:
                self._waiting[node] = queue
            else:
                del self._waiting[node]
        if not self._held[node]:
            del self._held[node]

    def overdue(self, now: float) -> list[int]:
        """Jobs whose deadline has come."""
        return [job_id for job_id, deadline in self._running.items() if deadline <= now]
