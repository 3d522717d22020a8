"""The in-memory twin of `learner.trainer.ranks.port.Ranks`: ranks are threads of one process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from p2p.errors import ShoalError

PATIENCE_S = 60.0
"""Seconds after which a rank that waits for another gives up."""

T = TypeVar("T")


class ThreadRanks:
    """Implements `learner.trainer.ranks.port.Ranks`."""

    def __init__(self, rank: int, count: int, common: _Common) -> None:
        self.rank, self.count, self._common = rank, count, common
        self.sent = 0

    def share(self, data: bytes) -> bytes:
        return self.all_told(data)[0]

    def all_told(self, data: bytes) -> list[bytes]:
        self._common.told[self.rank] = data
        self._common.barrier.wait(PATIENCE_S)
        told = list(self._common.told)
        self._common.barrier.wait(PATIENCE_S)
        return told

    def total(self, numbers: Sequence[float]) -> list[float]:
        told: Any = self.all_told(numbers)  # type: ignore[arg-type]
        return [sum(column) for column in zip(*told, strict=True)]

    def agree(self, error: ShoalError | ValueError | None) -> None:
        told: Any = self.all_told(error)  # type: ignore[arg-type]
        for found in told:
            if found is not None:
                raise found

    def send(self, data: bytes, to: int) -> None:
        self.sent += len(data)
        self._common.ways[self.rank, to].put(data)

    def receive(self, rank: int) -> bytes:
        return self._common.ways[rank, self.rank].get(timeout=PATIENCE_S)

    def settle(self) -> None:
        pass


class _Common:
    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count)
        self.told: list[bytes] = [b""] * count
        self.ways = {(a, b): queue.Queue[bytes]() for a in range(count) for b in range(count)}


def on_ranks(count: int, work: Callable[[ThreadRanks], T]) -> list[T]:
    """What each of `count` ranks gives."""
    common = _Common(count)

    def run(rank: int) -> T:
        try:
            return work(ThreadRanks(rank, count, common))
        except BaseException:
            common.barrier.abort()
            raise

    with ThreadPoolExecutor(count) as pool:
        return [future.result() for future in [pool.submit(run, rank) for rank in range(count)]]
