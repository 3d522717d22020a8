"""When accepted tokens go to the journal: in batches. A crash costs little, and not each message costs a transaction.

Thin shell. Must not know what else the journal keeps, or whose tokens these are.
"""

from __future__ import annotations

import trio

from learner.journal.journal import Journal
from learner.journal.records import Unwritten

JOURNAL_S = 0.5
JOURNAL_TOKENS = 50_000
JOURNAL_SEQUENCE = 16
"""Accepted tokens go to the journal after so long; at once when there are so many, or more than so many of one trajectory; as
soon as JOURNAL_LEAST_S allows when there are as many of one. With as many that its node holds back, a crash costs it 32."""

JOURNAL_LEAST_S = 0.01
"""Seconds between two transactions of tokens at the least: a hundred a second is what a slow disk takes."""


class TokenJournal:
    """`unwritten`: what was accepted and is not written yet, the collector's."""

    def __init__(self, journal: Journal, unwritten: Unwritten) -> None:
        self._journal, self._unwritten = journal, unwritten
        self._due = trio.Event()

    def grown(self) -> None:
        """More was accepted: write it if it is much."""
        waiting = self._unwritten
        if waiting.tokens >= JOURNAL_TOKENS or waiting.longest > JOURNAL_SEQUENCE:
            self.write()
        elif waiting.longest == JOURNAL_SEQUENCE:  # nodes that are fast send no less: not a transaction for each message
            self._due.set()

    def write(self) -> None:
        """Everything accepted so far is in the journal when this returns (and a kill of this process does not cost it)."""
        self._journal.record_tokens(self._unwritten.take())

    async def run(self) -> None:
        """Writes what was accepted, JOURNAL_S later at the most, for ever; a last time in an orderly end."""
        try:
            while True:
                with trio.move_on_after(JOURNAL_S):
                    await self._due.wait()
                self._due = trio.Event()
                self.write()
                await trio.sleep(JOURNAL_LEAST_S)
        except trio.Cancelled:
            self.write()
            raise
