"""The processes that train together, as each of them sees the others: the Ranks port. Must not know torch, models or the head.

Rank 0 alone talks to the head. All of these calls but `send`, `receive` and `settle` are made by every rank, in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from p2p.errors import ShoalError


class RankFailed(ShoalError):
    """Another rank is gone, or has not answered in time: this one cannot go on."""


class Ranks(Protocol):
    """This process among those that train together."""

    rank: int
    """0 to `count` - 1"""
    count: int

    def share(self, data: bytes) -> bytes:
        """What rank 0 gave; the others' `data` does not count. Waits for rank 0 as long as it takes."""

    def all_told(self, data: bytes) -> list[bytes]:
        """What each rank gave, in their order."""

    def total(self, numbers: Sequence[float]) -> list[float]:
        """The sums over all ranks, the same bits on each."""

    def agree(self, error: ShoalError | ValueError | None) -> None:
        """Raise the first rank's error on every rank; nothing where none has one."""

    def send(self, data: bytes, to: int) -> None:
        """To another rank, which calls `receive`."""

    def receive(self, rank: int) -> bytes:
        """What `rank` sends to this one next."""

    def settle(self) -> None:
        """Wait until everything that was sent has arrived."""


class OneProcess:
    """The trainer is one process: there is nobody to tell."""

    rank, count = 0, 1

    def share(self, data: bytes) -> bytes:
        return data

    def all_told(self, data: bytes) -> list[bytes]:
        return [data]

    def total(self, numbers: Sequence[float]) -> list[float]:
        return list(numbers)

    def agree(self, error: ShoalError | ValueError | None) -> None:
        if error is not None:
            raise error

    def send(self, data: bytes, to: int) -> None:
        raise ValueError("there is one process")

    def receive(self, rank: int) -> bytes:
        raise ValueError("there is one process")

    def settle(self) -> None:
        pass


def shared_norm(ranks: Ranks, own: float) -> float:
    """The norm of what lies on all ranks together, from each one's norm of its part."""
    if ranks.count == 1:
        return own
    return math.sqrt(ranks.total([own * own])[0]) if math.isfinite(own) else ranks.total([own])[0]
