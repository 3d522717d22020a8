"""One distributor, as the source sees it: what is out there, and how fast it brings that to the others. Pure.

Two accounts of how fast, both of what its receivers announce. `rate` is what is delivered, the way to it and back included:
what it still has will take so long. `pace` counts from the first copy on, the best of late: so much it could do, which a version
of a few chunks tells as well as a long one. Must not know how many chunks it is given, nor why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from p2p.broadcast.policies.port import Remembered

RATE_S = 0.5
"""Seconds over which rate and pace are measured; the pace over less where the work ends sooner."""

LEAST_COPIES, LEAST_S = 8, 0.08
"""Copies and seconds that a measurement of the pace needs: announcements come in twos and threes, and several in one message."""

SLOWER = 8
"""A pace below the one that is known moves it by one part in so many: it may have had too little to do."""


@dataclass(slots=True)
class Out:
    """A chunk at its distributor."""

    to: str
    at: float
    ahead: int
    """chunks out there when it was handed over, itself included"""
    lacking: int
    """peers that count and do not have it"""
    spread: bool = False
    """nearly all have it: its distributor is through with it, as far as can be told"""


@dataclass(slots=True)
class Distributor:
    """What the source knows of one. `chunk_bytes`: of a full chunk."""

    chunk_bytes: int
    since: float
    """when the rate was measured last"""
    remembered: Remembered | None = None
    """of an earlier version"""
    window: float = 0.0
    """chunks that may be out there at once; 0 until it is first looked at"""
    out: dict[int, None] = field(default_factory=dict)
    """chunks, in the order in which they were handed over"""
    busy: int = 0
    """those of them that are not yet spread"""
    transit_s: float = 0.0
    """from handing over a chunk to its answer, averaged over the last few"""
    took_s: float = 0.0
    """from handing over a chunk until it is spread, averaged over the last few"""
    pace: float = 0.0
    """copies a second that it was seen to deliver once the first was there; 0 for unknown"""
    rate: float = 0.0
    """copies a second that it delivers, measured while it has work; 0 for unknown"""
    spared_until: float = float("-inf")
    strikes: int = 0
    _first: float | None = None
    _last: float = 0.0
    _copies: int = 0
    """copies announced since `_first`, that one aside; the last of them at `_last`"""
    _all: int = 0
    """copies announced"""
    _before: int = 0
    """copies announced by `since`"""

    def __post_init__(self) -> None:
        if self.remembered is not None:
            self.pace = self.remembered.pace / self.chunk_bytes

    def copied(self, now: float) -> bool:
        """Somebody has a copy from it. Whether its pace was measured anew."""
        if self._first is None:
            self._first, self._copies = now, 0
        else:
            self._copies += 1
        self._last = now
        self._all += 1
        return now - self._first >= RATE_S and self._copies >= LEAST_COPIES and self.measure_pace()

    def look(self, now: float) -> None:
        """Measure the rate; called some 20 times a second."""
        if not self.out:
            self.since, self._before = now, self._all
        elif now - self.since >= RATE_S:
            rate = (self._all - self._before) / (now - self.since)
            self.rate = rate if not self.rate else (self.rate + rate) / 2
            self.since, self._before = now, self._all

    def measure_pace(self) -> bool:
        """To be called when nothing is out there any more. Whether its pace was measured anew."""
        first, self._first = self._first, None
        if first is None or self._copies < LEAST_COPIES or self._last < first + LEAST_S:
            return False
        pace = self._copies / (self._last - first)
        self.pace = pace if pace > self.pace else self.pace + (pace - self.pace) / SLOWER
        return True


def slow_receivers(out: Mapping[int, Out], peers: Mapping[str, Distributor], lacks: Callable[[str, int], bool]) -> frozenset[str]:
    """Peers that lack what most distributors brought nearly everywhere: their own links are behind, whoever sends. Who lacks the
    chunks of some alone is withheld from, perhaps: all that brought anything count, also those whose chunks are everywhere by
    now. `out`: chunks at their distributors, in the order in which they were handed over; `lacks(peer, chunk)`."""
    last = {one.to: chunk for chunk, one in out.items() if one.spread}
    brought = max(len(last), sum(d.took_s > 0 for d in peers.values()))
    if len(last) < 2:
        return frozenset()
    return frozenset(peer for peer in peers if 2 * sum(lacks(peer, chunk) for chunk in last.values()) > brought)
