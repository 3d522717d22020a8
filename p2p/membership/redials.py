"""Attempts to reach one peer that fail: the first is told at once, the rest are counted. Pure: the time is passed in; must not
know who is dialled or how.

A peer may be away for a night, and is dialled every few seconds all the time: a line for each attempt would bury everything else.
"""

from __future__ import annotations

from p2p.quantities import human_seconds

TELL_S = (60.0, 3600.0)
"""Seconds from the first line to the second, and the most between two of the later ones; in between each wait is twice the one
before. A person who looks on sees within a minute that it goes on, and a night costs a log a dozen lines."""


class Redials:
    """The attempts since the peer was last reached. Times are seconds of any one clock."""

    def __init__(self) -> None:
        self.failures = 0
        """failed attempts in a row"""
        self._since, self._tell_at, self._wait = 0.0, 0.0, 0.0

    def failed(self, now: float, why: str) -> str:
        """Count an attempt that failed at `now`. What to tell of it: of the first one `why`, later the count; mostly ""."""
        self.failures += 1
        if self.failures == 1:
            self._since, self._wait = now, TELL_S[0]
            self._tell_at = now + self._wait
            return f"{why}; trying again until it works"
        if now < self._tell_at:
            return ""
        self._wait = min(2 * self._wait, TELL_S[1])
        self._tell_at = now + self._wait
        return f"{self.failures} attempts in {human_seconds(now - self._since)}; the last one: {why}"

    def reached(self, now: float) -> str:
        """The peer was reached: count anew. How many attempts and how long it took, as the end of a sentence; "" when it was the
        first."""
        if not self.failures:
            return ""
        said = f" after {self.failures} failed attempts in {human_seconds(now - self._since)}"
        self.failures = 0
        return said
