"""Processes that score, shared by all groups. A thin shell around `FairQueue`; must not know rewards or prompts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any, Generic, Protocol, TypeVar

import trio

from learner.rewards.fair_queue import FairQueue
from p2p.errors import ShoalError


class PoolWorker(Protocol):
    """A process of ours with a blocking interface."""

    def start(self) -> None:
        """Have it ready to work."""
        ...

    def close(self) -> None:
        """End it; also in the middle of its work, from another thread."""
        ...


AnyWorker = TypeVar("AnyWorker", bound=PoolWorker)
Result = TypeVar("Result")


class WorkerKind(Generic[AnyWorker]):
    """Workers that are alike: how one is made, and those that have nothing to do."""

    def __init__(self, make: Callable[[], AnyWorker]) -> None:
        self.make = make
        self.idle: list[AnyWorker] = []
        self.first: AnyWorker | None = None
        """the one that was started first, for what it says of itself; it may be closed by now"""


class ScoringPool:
    """At most so many jobs at once as `FairQueue` allows; each has a worker of its kind to itself, which is closed when the job
    is cancelled. Processes are started as they are needed, and kept."""

    def __init__(self, workers: int) -> None:
        self.queue = FairQueue(workers)
        self._ids = count()
        self._turns: dict[int, trio.Event] = {}
        self._all: set[Any] = set()
        self._threads = trio.CapacityLimiter(self.queue.most + 1)
        self._closed = False
        self._starting: list[threading.Thread] = []

    def close(self) -> None:
        """End every process. Idempotent."""
        self._closed = True
        for worker in self._all:
            worker.close()

    def first(self, kind: WorkerKind[AnyWorker]) -> AnyWorker:
        """The first worker of this kind, started: to see that it can be, and what it says of itself. Blocks."""
        worker = self._made(kind)
        worker.start()
        kind.idle.append(worker)
        kind.first = worker
        return worker

    def spare(self, kind: WorkerKind[AnyWorker]) -> None:
        """Start as many more as may work at once, in threads: for workers whose first job should not wait until they have
        imported what they need. One that is asked before it is ready waits by itself; one that fails is started again then."""
        for _ in range(self.queue.most - 1):
            worker = self._made(kind)
            kind.idle.insert(0, worker)  # those that are ready are taken first
            thread = threading.Thread(target=_start_quietly, args=(worker,), daemon=True)
            self._starting.append(thread)
            thread.start()

    def await_spares(self) -> None:
        """Until they are ready, or have failed. Blocks."""
        for thread in self._starting:
            thread.join()

    async def run(
        self, kind: WorkerKind[AnyWorker], work: Callable[[AnyWorker], Result], node: str, *, wanted: Callable[[], bool]
    ) -> Result | None:
        """Have a worker do `work`, which blocks, in the turn of this node's answers; None when it is not `wanted` any more by
        then. What `work` raises is raised."""
        job_id, turn = next(self._ids), trio.Event()
        self._turns[job_id] = turn
        self.queue.add(job_id, node)
        self._start_next()
        try:
            await turn.wait()
            if not wanted():
                return None
            worker = kind.idle.pop() if kind.idle else await self._started(kind)
            try:
                result = await self._in_thread(lambda: work(worker))
            except Exception:
                kind.idle.append(worker)  # it makes itself anew where it must
                raise
            except BaseException:  # cancelled: it may work for long yet
                self._discard(worker)
                raise
            kind.idle.append(worker)
            return result
        finally:
            del self._turns[job_id]
            self.queue.done(job_id)
            self._start_next()

    def _start_next(self) -> None:
        while (job_id := self.queue.next()) is not None:
            self._turns[job_id].set()

    async def _started(self, kind: WorkerKind[AnyWorker]) -> AnyWorker:
        worker = self._made(kind)
        try:
            await self._in_thread(worker.start)
        except BaseException:
            self._discard(worker)
            raise
        return worker

    def _made(self, kind: WorkerKind[AnyWorker]) -> AnyWorker:
        if self._closed:
            raise ShoalError("the scorer is closed")
        worker = kind.make()
        self._all.add(worker)
        return worker

    def _discard(self, worker: Any) -> None:
        self._all.discard(worker)
        worker.close()

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        # Abandoned when cancelled: the worker is closed then, which ends the call. (mypy sees trio-typing's stubs.)
        return await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._threads)  # type: ignore


def _start_quietly(worker: PoolWorker) -> None:
    with suppress(ShoalError, OSError):  # whoever asks it hears why
        worker.start()
