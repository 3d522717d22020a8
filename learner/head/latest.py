"""What the head keeps for the status page, as much of it as its page may be long. Must not know what it says."""

from __future__ import annotations

import time
from typing import Any

from learner.journal.journal import Journal, JournalTally

MAX_GONE, MAX_ROWS = 256, 4096
"""Rows of nodes that went last, and of nodes that are here. At 700 bytes a row the page stays below 4 MB."""

MAX_REPORTS = 100
"""Reports that are kept; the page shows the last ten."""


class Latest(dict[str, dict[str, Any]]):
    """Rows by name, those that were put in last: at most `most`."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, name: str, row: dict[str, Any]) -> None:
        self.pop(name, None)
        while len(self) >= self._most:
            del self[next(iter(self))]
        super().__setitem__(name, row)


COUNT_SHARE = 20.0
"""A count of the journal is used for so many times as long as it took to make: 5 % of the time goes to counting."""


class KeptTally:
    """Trajectories by what became of them, counted afresh in the journal now and then: after 10^6 groups that takes half a second
    of the event loop."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.made = self.cost = 0.0
        """when it was counted, and how long that took, in seconds"""
        self.tally: JournalTally | None = None

    def count(self, now: float, *, anew: bool = False) -> JournalTally:
        """As it is, or as it was a short while ago."""
        if self.tally is None or anew or now - self.made >= COUNT_SHARE * self.cost:
            began = time.perf_counter()
            self.tally = self._journal.counts().trajectories
            self.made, self.cost = now, time.perf_counter() - began
        return self.tally
