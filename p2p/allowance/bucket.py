"""A rate that is kept: a token bucket (Turner, IEEE Communications Magazine 24(10), 1986). Pure; it is told the time.

The bucket fills with `rate` bytes a second up to BURST_S of it. What waits for its turn leaves when the bucket holds it; what
cannot wait is charged, and what waits pays for it. In any time T, what was let through by turns is at most rate * T and one
burst, plus what was charged meanwhile and not yet paid (see `most_debt`).
"""

from __future__ import annotations

BURST_S = 0.15
"""Seconds of the rate that may leave at once after a pause. With DEBT_S it is 0.45 s, which of ten seconds are 4.5 %."""

DEBT_S = 0.3
"""Seconds of the rate that may be owed by what does not wait (control messages); beyond that it waits, too."""

PIECE_S = 0.05
"""Seconds of the rate that one piece takes at most, so that turns change often and no piece is longer than a burst."""

LEAST_PIECE = 1400
"""Bytes that a piece may have at the least, whatever the rate: below a packet nothing is gained."""

SHORTEST_S = 1e-6
"""Seconds. A shorter wait is a rounding error: a clock may not move by so little."""


def _worth(seconds: float) -> float:
    return seconds if seconds > SHORTEST_S else 0.0


class TokenBucket:
    """`rate` in bytes a second; 0 lets everything through."""

    def __init__(self, rate: float = 0.0) -> None:
        self._rate = rate
        self._level = rate * BURST_S
        self._at = float("-inf")

    @property
    def rate(self) -> float:
        return self._rate

    def set_rate(self, now: float, rate: float) -> None:
        """From now on this rate. What is owed in bytes stays owed; what was saved beyond the new burst is gone."""
        self._fill(now)
        self._rate = rate
        self._level = min(self._level, rate * BURST_S)

    def piece(self, most: int) -> int:
        """Bytes that one piece may have, at most `most`."""
        return most if not self._rate else max(min(most, int(self._rate * PIECE_S)), min(LEAST_PIECE, most))

    def wait(self, now: float, nbytes: int) -> float:
        """Seconds until a piece of `nbytes` may leave in its turn."""
        self._fill(now)
        if not self._rate:
            return 0.0
        return _worth((min(nbytes, self._rate * BURST_S) - self._level) / self._rate)

    def wait_urgent(self, now: float) -> float:
        """Seconds until something may leave that does not wait for its turn: until no more than DEBT_S are owed."""
        self._fill(now)
        return _worth(-self._level / self._rate - DEBT_S) if self._rate else 0.0

    def charge(self, now: float, nbytes: float) -> None:
        """`nbytes` leave, or left. Negative: so much of what was charged did not leave."""
        self._fill(now)
        if self._rate:
            self._level = min(self._level - nbytes, self._rate * BURST_S)

    def _fill(self, now: float) -> None:
        if self._rate and now > self._at > float("-inf"):
            self._level = min(self._level + (now - self._at) * self._rate, self._rate * BURST_S)
        self._at = max(self._at, now)
