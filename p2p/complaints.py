"""Log lines about what peers do: the first few at once, then a count every so often. One limiter of warnings, one of the rest,
for the whole process.

What strangers send must not fill a disk: each line is asked for here before it is written. Must not know what is wrong with a
peer.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

FIRST, EVERY_S = 8, 10.0
"""Lines about one peer that are written at once, and seconds from one line to the next after those. Each earns one of the first
ones back."""

FIRST_OF_ALL, ALL_PER_S = 256, 4.0
"""The same for all peers together: lines at once, and lines a second. Identities are free. At 700 bytes a line it is at most
0.24 GB a day, of warnings and of the rest each."""

MAX_PEERS_COUNTED = 4096
"""Peers whose lines are counted; beyond it those are forgotten that came first."""

MAX_LINE = 700
"""Characters of a line: a refusal's reason of 500, and who, which and where."""


@dataclass(slots=True)
class _Allowance:
    """Lines that may be written, up to `most`, and those that were not since the last one."""

    most: float
    left: float
    at: float
    dropped: int = 0

    def take(self, now: float, per_s: float) -> bool:
        self.left, self.at = min(self.most, self.left + max(0.0, now - self.at) * per_s), now
        if self.left < 1.0:
            self.dropped += 1
            return False
        self.left -= 1.0
        return True


@dataclass
class LineLimiter:
    """Pure: told the time, in seconds."""

    _peers: dict[str, _Allowance] = field(default_factory=dict)
    _all: _Allowance = field(default_factory=lambda: _Allowance(FIRST_OF_ALL, FIRST_OF_ALL, 0.0))

    def __len__(self) -> int:
        return len(self._peers)

    def ask(self, peer: str, now: float) -> int | None:
        """Whether a line about `peer` is written: None when not, else how many about it were not written since the last."""
        mine = self._peers.get(peer)
        if mine is None:
            if len(self._peers) >= MAX_PEERS_COUNTED:
                del self._peers[next(iter(self._peers))]
            mine = self._peers[peer] = _Allowance(FIRST, FIRST, now)
        if not mine.take(now, 1.0 / EVERY_S):
            return None
        if not self._all.take(now, ALL_PER_S):
            mine.dropped += 1
            return None
        dropped, mine.dropped = mine.dropped, 0
        return dropped


_complaints, _remarks = LineLimiter(), LineLimiter()


def complain(log: logging.Logger, peer: str, text: object) -> None:
    """Write a warning about `peer` to `log`, unless there were too many."""
    _write(log, logging.WARNING, _complaints.ask(peer, time.monotonic()), text)


def remark(log: logging.Logger, peer: str, text: object) -> None:
    """Write to `log` that `peer` came, went or changed, unless there were too many. Such lines take none of a warning's."""
    _write(log, logging.INFO, _remarks.ask(peer, time.monotonic()), text)


def _write(log: logging.Logger, level: int, dropped: int | None, text: object) -> None:
    if dropped is None:
        return
    line = str(text)
    line = line if len(line) <= MAX_LINE else line[:MAX_LINE] + "..."
    log.log(level, "%s%s", line, f" (and {dropped} lines about it that were left out)" if dropped else "")


def forget() -> None:
    """Begin anew, as a test does."""
    global _complaints, _remarks
    _complaints, _remarks = LineLimiter(), LineLimiter()
