"""How fast one manifest's chunks arrive at one peer. Pure: the time is passed in (seconds of one clock).

Must not know whom they come from, nor what is asked of whom.
"""

from __future__ import annotations

from math import exp

from p2p.limits import LEASE_S

MAX_CHUNK_S = 2 * LEASE_S
"""Seconds. A longer time between two chunks is a pause, not the pace of a link."""


class ArrivalPace:
    """How fast chunks arrive, by those that came lately."""

    __slots__ = ("_count", "at", "chunk_s")

    def __init__(self) -> None:
        self._count, self.at = 0.0, -1e18  # `at`: when the last one came
        self.chunk_s = 0.0
        """seconds from one pushed chunk to the next, averaged over the last few; it does not change while nothing comes"""

    def add(self, now: float, *, pushed: bool) -> None:
        if self._count and pushed:
            self.chunk_s += (min(now - self.at, MAX_CHUNK_S) - self.chunk_s) / 4
        self._count, self.at = self.per_lease(now) + 1, now

    def per_lease(self, now: float) -> float:
        """Chunks that come in LEASE_S; fades while nothing comes."""
        return self._count * exp((self.at - now) / LEASE_S)
