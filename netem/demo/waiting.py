"""What is being done while a person waits: one line that changes in a terminal, else a plain line now and then.

Must not know what is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.markup import escape

TELL_S = 10.0
"""Seconds between two plain lines: often enough that nobody takes the program for dead."""


class Waiting:
    """`with Waiting("making tea") as waiting: waiting.say("making tea: the water boils")`. Says nothing unless `shown`."""

    def __init__(
        self, what: str, *, shown: bool = True, console: Console | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._console, self._shown, self._now = console or Console(), shown, now
        self._status = self._console.status(escape(what)) if shown and self._console.is_terminal else None
        self._what, self._told_at = what, now()

    def __enter__(self) -> Waiting:
        if self._status is not None:
            self._status.start()
        elif self._shown:
            self._print()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()
            self._print()  # what it came to stays above what follows

    def say(self, what: str) -> None:
        """What is being done now."""
        if what == self._what:
            return
        self._what = what
        if self._status is not None:
            self._status.update(escape(what))
        elif self._shown and self._now() - self._told_at >= TELL_S:
            self._print()

    def _print(self) -> None:
        self._told_at = self._now()
        self._console.print(self._what, markup=False, highlight=False, soft_wrap=True)
