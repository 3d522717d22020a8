"""The live view of a run: a page in a terminal, one plain line a step otherwise; and the log lines beside it.

Fed with states; must not know where they come from. `shoal learner`, `shoal status --watch` and the demo all show this one.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from learner.status.facts import eval_point, step_line
from learner.status.run_state import RunState
from learner.status.terminal import live_page
from learner.status.words import number, plain_text
from p2p.printable import CleanFormatter

KEPT_EVENTS = 100
"""Log lines that the status page has, and the summary keeps: more than a person looks back, and a bounded answer."""

OUR_LOGS = "shoal"
"""The logger above all of ours."""

STEP_LOG = f"{OUR_LOGS}.step"
"""The logger of the lines that a run tells a step: they are no events beside the steps."""


class EventLog(logging.Handler):
    """Keeps the newest log lines as events of the run: joins, leaves, refusals, decisions, warnings of libraries."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.addFilter(lambda record: record.name != STEP_LOG)
        self._events: deque[dict[str, Any]] = deque(maxlen=KEPT_EVENTS)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the record as an event, whatever its arguments are."""
        level = "error" if record.levelno >= logging.ERROR else "warning" if record.levelno >= logging.WARNING else "info"
        try:
            self._events.append({"time": record.created, "level": level, "text": plain_text(record.getMessage())})
        except Exception:  # format arguments that do not fit: whoever logs goes on
            self.handleError(record)

    def events(self) -> list[dict[str, Any]]:
        """Plain values, oldest first."""
        while True:
            try:
                return list(self._events)
            except RuntimeError:  # another thread logged meanwhile
                continue


@contextmanager
def collected_events() -> Iterator[EventLog]:
    """Events of what is logged inside the block. INFO lines of ours are logged even where nobody prints them."""
    log, ours = EventLog(), logging.getLogger(OUR_LOGS)
    before = ours.level
    ours.setLevel(min(ours.getEffectiveLevel(), logging.INFO))
    logging.getLogger().addHandler(log)
    try:
        yield log
    finally:
        logging.getLogger().removeHandler(log)
        ours.setLevel(before)


LOG_BYTES = 32 << 20
"""Bytes of a log file until it becomes `.1`, in place of the one before: days of lines, and a bounded share of the disk."""


class LogFile(RotatingFileHandler):
    """Log lines in a file, and in one before it. Opened with the first line; what cannot be written is lost: a full disk must not
    fill the terminal too, and ends no run."""

    def __init__(self, path: Path, most: int = LOG_BYTES) -> None:
        super().__init__(path, maxBytes=most, backupCount=1, encoding="utf-8", delay=True)
        self.setFormatter(CleanFormatter())

    def handleError(self, record: logging.LogRecord) -> None:
        pass


@contextmanager
def logging_to_file(path: Path) -> Iterator[None]:
    """Log lines go to a file inside the block, instead of where they went: the live page shows the newest of them as events."""
    root = logging.getLogger()
    before = [h for h in root.handlers if isinstance(h, logging.StreamHandler) and not isinstance(h, EventLog)]
    file = LogFile(path)
    for handler in before:
        root.removeHandler(handler)
    root.addHandler(file)
    try:
        yield
    finally:
        root.removeHandler(file)
        file.close()
        for handler in before:
            root.addHandler(handler)


class LiveView:
    """`with LiveView(say, ...) as view: view.update(state)`, once a second. Where the console is no terminal, or `page` is False,
    `say` hears one line a step; with `tell_events`, it also hears the run's events."""

    def __init__(
        self, say: Callable[[str], None], *, console: Console | None = None, page: bool = True, join: str = "",
        tell_events: bool = False,
    ) -> None:  # fmt: skip
        self._say, self._join, self._tell_events = say, join, tell_events
        self._console = console or Console()
        self._live: Live | None = None
        if page and self._console.is_terminal:
            # No alternate screen: the last state stays above the result when the run is over.
            self._live = Live(Text("waiting for the learner ..."), console=self._console, auto_refresh=False, transient=False)
        self._said: int | None = None
        self._evals: set[int] = set()
        self._named: set[tuple[str, int]] | None = None
        """results of evaluations with a name that were told, by name and step"""
        self._heard = 0.0
        self._over = False
        self._lock = threading.Lock()

    @property
    def is_page(self) -> bool:
        """Whether it draws a page, so that nothing else may write to the terminal."""
        return self._live is not None

    def __enter__(self) -> LiveView:
        if self._live is not None:
            self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, state: RunState) -> None:
        """Show what is new. Nothing is, once the run has ended: a state from before may come late, from another thread."""
        with self._lock:  # a thread that was given up may still be at the state before
            if self._over:
                return
            self._over = state.finished
            if self._live is not None:
                size = self._console.size
                self._live.update(live_page(state, size.width, size.height, self._join), refresh=True)
            else:
                self._tell(state)

    def _tell(self, state: RunState) -> None:
        if self._tell_events:
            for event in state.events:
                if event.time > self._heard:
                    self._say(event.text)
                    self._heard = event.time
        self._tell_evals(state)
        steps = [row.step for row in state.recent if row.step >= 1 or row.held_out is not None]
        if not steps:
            self._said = 0  # whoever looks this early sees all that comes
            return
        # Whoever begins to look sees where the run stands; a run that went back to its last commit goes on from there.
        said = steps[-1] - 1 if self._said is None else min(self._said, steps[-1])
        for step in steps:
            if step > said:
                self._say(step_line(state, step))
        self._said = steps[-1]

    def _tell_evals(self, state: RunState) -> None:
        """Evaluations of steps that were told already: they end later."""
        for row in state.evals:
            if self._said is not None and row.step <= self._said and row.step not in self._evals:
                self._say(f"step {row.step}: held out {number(row.held_out, '.2f')}")
        self._evals = {row.step for row in state.evals}
        found = {(one.name, point.step): point for one in state.named_evals for point in one.points}
        for (name, step), point in sorted(found.items(), key=lambda item: item[0][1]):
            if self._named is not None and (name, step) not in self._named:
                self._say(f"step {step}: evaluation {name}: {eval_point(point)}")
        self._named = set(found)
