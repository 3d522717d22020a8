"""How far a long simulation has come, on stderr: a bar where that is a terminal, a line every now and then otherwise."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

EVERY_S = 15.0
"""Seconds between two lines where there is no terminal: often enough to see that it lives, rare enough for a log."""


class Watch:
    """What is being done, and how much of it is done. `tell` and `ran` are what the runner calls."""

    def __init__(self, what: str, of: int, unit: str, bar: Progress | None) -> None:
        self.what, self.done, self.of, self.unit = what, 0, of, unit
        self._began = time.monotonic()
        self._bar = bar
        self._task = bar.add_task(what, total=of, unit=unit) if bar is not None else None

    def tell(self, step: int) -> None:
        """So many steps of the first run are done."""
        self._show(step, self.of)

    def ran(self, done: int, of: int) -> None:
        """So many runs of a series are done."""
        if self.unit != "runs":
            self.what, self.unit = "what would change the answer", "runs"
        self._show(done, of)

    def say(self, line: str) -> None:
        """A line for people, above the bar."""
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            print(line, file=sys.stderr, flush=True)

    @property
    def sentence(self) -> str:
        return f"{self.what}: {self.done} of {self.of} {self.unit} after {time.monotonic() - self._began:.0f} s"

    def _show(self, done: int, of: int) -> None:
        self.done, self.of = done, of
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=self.what, completed=done, total=of, unit=self.unit)


@contextmanager
def watching(what: str, of: int, unit: str = "steps") -> Iterator[Watch]:
    """Shows what its `Watch` hears until the block ends; nothing of a bar stays."""
    if not sys.stderr.isatty():
        watch, over = Watch(what, of, unit, None), threading.Event()

        def now_and_then() -> None:
            while not over.wait(EVERY_S):
                watch.say(watch.sentence)

        thread = threading.Thread(target=now_and_then, name="progress", daemon=True)
        thread.start()
        try:
            yield watch
        finally:
            over.set()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[unit]}"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield Watch(what, of, unit, bar)
