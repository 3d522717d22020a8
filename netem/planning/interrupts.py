"""Ctrl-C and SIGTERM in a long simulation: it stops between two events, and what is there by then is told. A thin shell."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from netem.timeline import Timeline
from p2p.errors import Terminated

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""What a person, or a service manager, ends a program with."""


class CutShort(Exception):
    """Somebody ended the work. `result`: what there is, as the whole would have been, with "interrupted" set; `cause`: how it was
    ended, for whoever says the exit status."""

    def __init__(self, result: dict[str, Any], cause: KeyboardInterrupt) -> None:
        super().__init__(result, cause)
        self.result, self.cause = result, cause


@contextmanager
def between_events(simulation: Timeline) -> Iterator[None]:
    """Within it the first signal ends the simulation after the event at hand; a second one ends it at once. Without effect
    outside the main thread, where signals cannot be handled."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def hold(number: int, frame: FrameType | None) -> None:
        restore()
        simulation.stopped_by = Terminated() if number == signal.SIGTERM else KeyboardInterrupt()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in SIGNALS:
        signal.signal(number, hold)
    try:
        yield
    finally:
        restore()


@contextmanager
def held_back() -> Iterator[None]:
    """While worker processes are started: a Ctrl-C, which a terminal sends to all, waits until the block ends, and these never
    hear of it, not even while they import. Else each would print a traceback of its own."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_to_the_parent() -> None:
    """For a worker process: a Ctrl-C is its parent's business, who ends it with SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
