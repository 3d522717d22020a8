"""The hours of the day in which a host takes part. Pure: it is told what the host's clock shows.

A time of day is a minute of what the wall clock shows, from 0 (midnight) to 1439. Who asks reads the clock in the host's time
zone, so a change between summer and winter time needs no rule of its own: the hours begin and end when the clock shows it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from p2p.errors import UsageError

DAY_MINUTES = 24 * 60
"""Minutes of a day on a clock."""

_FORM = re.compile(r"(\d{1,2}):(\d\d)-(\d{1,2}):(\d\d)", re.ASCII)

ALWAYS = "always"
"""What stands for no hours at all."""


class LocalTime(NamedTuple):
    """What a host's clock shows."""

    day: str
    """the date, YYYY-MM-DD"""
    minute: int
    """minutes since midnight"""


@dataclass(frozen=True, slots=True)
class Hours:
    """From `start` up to and without `stop`, minutes of the day. `stop` below `start` is on the next day."""

    start: int
    stop: int

    @classmethod
    def parse(cls, text: str) -> Hours:
        """UsageError unless `text` is HH:MM-HH:MM with two different times of day."""
        found = _FORM.fullmatch(text.strip())
        if found is None:
            raise UsageError(f"--between: {text[:40]!r} is not HH:MM-HH:MM (such as 22:00-07:00), or {ALWAYS}")
        first, second, third, fourth = map(int, found.groups())
        for hour, minute in ((first, second), (third, fourth)):
            if hour > 23 or minute > 59:
                raise UsageError(f"--between: {text[:40]!r}: {hour}:{minute:02d} is no time of day, which go from 00:00 to 23:59")
        start, stop = 60 * first + second, 60 * third + fourth
        if start == stop:
            raise UsageError(f"--between: {text[:40]!r} begins when it ends; for the whole day give {ALWAYS}")
        return cls(start, stop)

    def holds(self, minute: int) -> bool:
        """Whether this minute of the day is within."""
        if self.start < self.stop:
            return self.start <= minute < self.stop
        return minute >= self.start or minute < self.stop

    @property
    def opens(self) -> str:
        """When they begin, as a clock shows it."""
        return clock_text(self.start)

    def __str__(self) -> str:
        return f"{clock_text(self.start)}-{clock_text(self.stop)}"


def clock_text(minute: int) -> str:
    """A minute of the day as HH:MM."""
    return f"{minute // 60:02d}:{minute % 60:02d}"
