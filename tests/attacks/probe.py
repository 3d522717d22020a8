"""How long an event loop is held: seconds of a core, for other programs may share the machine."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from time import thread_time
from typing import Any

import trio


class LoopProbe(trio.abc.Instrument):
    """The longest turn of the loop (all tasks that could run, one after the other) and the longest step of one task, with the
    task's name. Between two turns the loop looks at its sockets: for so long nobody is heard."""

    def __init__(self) -> None:
        self._turn_at = self._step_at = thread_time()
        self.reset()

    def reset(self) -> None:
        """Forget what was; what is in progress does not count."""
        self.turn_s = self.step_s = 0.0
        self.step_of = ""
        self._counts = False

    def after_io_wait(self, timeout: float) -> None:
        self._turn_at, self._counts = thread_time(), True

    def before_io_wait(self, timeout: float) -> None:
        if self._counts:
            self.turn_s = max(self.turn_s, thread_time() - self._turn_at)

    def before_task_step(self, task: Any) -> None:
        self._step_at = thread_time()

    def after_task_step(self, task: Any) -> None:
        took = thread_time() - self._step_at
        if took > self.step_s and self._counts:
            self.step_s, self.step_of = took, task.name


@contextmanager
def probing() -> Iterator[LoopProbe]:
    """What the loop does meanwhile. What is in the process by now is not looked through for garbage, as in a learner's
    (`calm_gc`): in one that has run four thousand tests that is a second of a core, in the middle of whoever's step."""
    gc.collect()
    gc.freeze()
    probe = LoopProbe()
    trio.lowlevel.add_instrument(probe)
    try:
        yield probe
    finally:
        trio.lowlevel.remove_instrument(probe)
        gc.unfreeze()
