"""Bytes of a day, counted across restarts of the process. Pure; it is told what the clock shows."""

from __future__ import annotations

import json
from dataclasses import dataclass

SAVES_FROM = 0.9
"""Share of the day's bytes from which a host relays nothing: the rest is for versions, and for tokens, which are worth more to
the run than a copy for somebody else."""


@dataclass
class DayCount:
    """What went over the wire on a day, both directions."""

    day: str = ""
    """YYYY-MM-DD as the host's clock shows it"""
    used: int = 0

    def add(self, day: str, nbytes: int) -> None:
        """`nbytes` more. A day that is not the one that was counted begins anew. A clock that is set back begins anew, too: it
        costs at most one day's bytes."""
        if day != self.day:
            self.day, self.used = day, 0
        self.used += max(0, nbytes)

    def saves(self, daily: int) -> bool:
        """Whether so much of `daily` bytes is used that nothing is relayed any more; of 0 never."""
        return bool(daily) and self.used >= SAVES_FROM * daily

    def spent(self, daily: int) -> bool:
        """Whether `daily` bytes are used; of 0 never."""
        return bool(daily) and self.used >= daily

    def written(self) -> str:
        return json.dumps({"day": self.day, "used": self.used}) + "\n"

    @classmethod
    def read(cls, text: str) -> DayCount:
        """What `written` made; a new count for anything else, which is a file that was damaged."""
        try:
            said = json.loads(text)
            return cls(str(said["day"]), max(0, int(said["used"])))
        except (ValueError, KeyError, TypeError, OverflowError):
            return cls()
