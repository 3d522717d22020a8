"""Where an environment's process runs: with our rights as we are, or in the sandbox with a folder of its own and nothing of ours.

A thin shell. What the process then gives up is its own business (`confining.py`). Must not know episodes.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from subprocess import Popen

import trio

from learner.environments.settings import EnvironmentSection
from learner.environments.wire import ChildReady, ChildSetup
from learner.rewards.confined import clean_environment
from learner.tasks.port import EnvironmentSource
from p2p.printable import printable
from p2p.processes import start

log = logging.getLogger("shoal.environments")

RELAYED_LINES = 1000
"""Lines of one sandboxed process that are shown: what a person's code prints, and not what a tool prints for ever."""

TELL_S = 10.0
"""Seconds between two log lines about tools that met a limit: a model may learn to call one again and again."""

READ_BYTES = 1 << 16
"""Bytes of its output that are read at once."""


class EnvironmentHome:
    """Of one process. Without the sandbox all of this is empty."""

    def __init__(self, settings: EnvironmentSection) -> None:
        self.scratch = tempfile.mkdtemp(prefix="shoal-environment-") if settings.run == "sandbox" else ""
        self._settings, self._output = settings, -1

    def setup(self, source: EnvironmentSource) -> ChildSetup:
        """What the process is told first."""
        s = self._settings
        return ChildSetup(
            source.name, dict(source.options), s.turn_s, s.episode_s, memory_bytes=s.memory_mb << 20, sandbox=bool(self.scratch),
            scratch=self.scratch, readable=[os.path.abspath(os.path.expanduser(path)) for path in s.readable],
            allow_unconfined=s.allow_unconfined,
        )  # fmt: skip

    def start(self, command: Sequence[str], stdin: int) -> Popen[bytes]:
        """The process. It may outlive the thread that starts it; it ends when the other end of its standard input does."""
        if not self.scratch:
            return start(command, stdin=stdin, outlive=True)
        # Not our standard error: that may be a terminal, or a file that the disk's limit does not bound.
        self._output, writing = os.pipe()
        try:
            own = {"HOME": self.scratch, "TMPDIR": self.scratch, "HF_HUB_OFFLINE": "1"}
            return start(
                command, stdin=stdin, stdout=writing, stderr=writing, outlive=True, cwd=Path(self.scratch),
                environment=clean_environment() | own,
            )  # fmt: skip
        finally:
            os.close(writing)

    async def relay(self, name: str) -> None:
        """What the process prints, to our log, up to a bound; then it is read and dropped, so that nothing waits."""
        if self._output < 0:
            return
        stream, self._output = trio.lowlevel.FdStream(self._output), -1
        lines, rest = 0, b""
        async with stream:
            while data := await stream.receive_some(READ_BYTES):
                *whole, rest = (rest + data).split(b"\n")
                rest = rest[-READ_BYTES:]
                for line in whole[: max(0, RELAYED_LINES - lines)]:
                    log.info("environment %s: %s", name, printable(line.decode(errors="replace")))
                if lines < RELAYED_LINES <= lines + len(whole):
                    log.warning("environment %s printed %d lines; no more of it is shown", name, RELAYED_LINES)
                lines += len(whole)

    def close(self) -> None:
        """The process has ended. Idempotent."""
        if self._output >= 0:
            os.close(self._output)
            self._output = -1
        if self.scratch:
            shutil.rmtree(self.scratch, ignore_errors=True)


_said: set[str] = set()
"""What this process has said of environments: once, however many processes run them, evaluations' own among them."""


class EnvironmentTold:
    """Log lines about an environment: what is odd about it, once, and tools that met a limit, now and then."""

    def __init__(self, name: str) -> None:
        self._name, self._last, self._unsaid = name, -math.inf, 0

    def ready(self, ready: ChildReady) -> None:
        """What a process says of it."""
        for line in ready.warnings:
            self.odd(line)
        if ready.missing:
            self.odd(f"it runs in a sandbox without {', '.join(ready.missing)}: not to be had on this system")

    def odd(self, what: str) -> None:
        """Something that a person may not have meant."""
        line = f"environment {self._name}: {printable(what)}"
        if line not in _said:
            _said.add(line)
            log.warning("%s", line)

    def stopped(self, place: str, why: str) -> None:
        """A tool met a limit of its process."""
        now = trio.current_time()
        if now - self._last < TELL_S:
            self._unsaid += 1
            return
        more = f" ({self._unsaid} more since the last such line)" if self._unsaid else ""
        log.warning("%s: %s%s", place, printable(why), more)
        self._last, self._unsaid = now, 0
