"""The processes that feed services, as the learner keeps them. Thin shell; must not know the services.

They have metrics.jsonl to read and a pipe whose end says that the run is over: nothing here waits for them while it goes on.
"""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import trio

from learner.tracking.settings import TrackerName
from p2p.printable import printable
from p2p.processes import last_line, python_command, start

log = logging.getLogger("shoal.tracking")

CHILD = "learner.tracking.child"
"""The module that such a process runs."""

FINISH_S = 30.0
"""Seconds that the run's end waits for services to be told the last of it; later ones go on by themselves for a while."""


class TrackerProcess:
    """One service's process."""

    def __init__(self, name: TrackerName, run_dir: Path) -> None:
        self.name = name
        self._log_file = run_dir / "logs" / f"tracking-{name}.log"
        self._process = start(
            python_command(CHILD, name, str(run_dir)), stdin=subprocess.PIPE, stdout=self._log_file, stderr=subprocess.STDOUT,
            outlive=True,
        )  # fmt: skip
        self.ended = trio.Event()

    async def watch(self) -> None:
        """Until it ends; says so in one line where that is before the run does, or goes wrong."""
        status = await trio.to_thread.run_sync(self._process.wait, abandon_on_cancel=True)  # type: ignore[call-arg]
        assert self._process.stdin is not None
        if status or not self._process.stdin.closed:
            log.warning(
                "%s is not fed any more: %s (more in %s). The run goes on, metrics.jsonl has every line, and a --resume tells it "
                "the rest", self.name, printable(last_line(self._log_file)), self._log_file,
            )  # fmt: skip
        self.ended.set()

    def end(self, *, good: bool) -> None:
        """Say that the run is over, whether or not that is heard; once."""
        assert self._process.stdin is not None
        if self._process.stdin.closed:
            return
        with suppress(OSError):
            self._process.stdin.write(b"finished" if good else b"")
            self._process.stdin.flush()
        with suppress(OSError):
            self._process.stdin.close()


class Trackers:
    """The services of one life of a run. A context manager, which ends their input, whatever ended the run."""

    def __init__(self, names: Sequence[TrackerName], run_dir: Path) -> None:
        self._names, self._run_dir = names, run_dir
        self._all: list[TrackerProcess] = []

    def __enter__(self) -> Trackers:
        for name in self._names:
            try:
                self._all.append(TrackerProcess(name, self._run_dir))
            except OSError as error:
                log.warning("%s is not fed: %s; the run goes on", name, error)
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._all:
            one.end(good=False)

    async def run(self) -> None:
        """Until they have ended."""
        async with trio.open_nursery() as nursery:
            for one in self._all:
                nursery.start_soon(one.watch)

    async def finish(self) -> None:
        """The run came to its end: until they were told all of it, or FINISH_S have passed."""
        for one in self._all:
            one.end(good=True)
        with trio.move_on_after(FINISH_S) as scope:
            for one in self._all:
                await one.ended.wait()
        if scope.cancelled_caught:
            late = ", ".join(one.name for one in self._all if not one.ended.is_set())
            log.warning("%s is still being told the end of the run; that goes on by itself for a while", late)
