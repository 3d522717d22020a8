"""A process that scores, and our end of its socket. Blocking; must not know what is scored there."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from learner.rewards.frames import receive_frame, send_frame
from p2p.errors import ShoalError
from p2p.processes import python_command, signal_group, start


class ProcessGone(Exception):
    """The process is not there, or not in order; says why."""


class ScoringProcess:
    """One scoring process. `module` is the program that it runs; `own_folder` is to run in an empty folder of its own."""

    def __init__(self, module: str, environment: Mapping[str, str], *, own_folder: bool) -> None:
        self._folder = tempfile.mkdtemp(prefix="shoal-score-") if own_folder else None
        self._said: IO[bytes] = tempfile.TemporaryFile()
        self._closing = threading.Lock()
        ours, theirs = socket.socketpair()
        self._sock = ours
        with theirs:
            # It may outlive the thread that starts it, which may be a worker's; it ends when our socket does.
            self.process = start(
                python_command(module), environment=environment, cwd=Path(self._folder) if self._folder else None,
                stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=self._said, outlive=True,
            )  # fmt: skip

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """ProcessGone when there is no answer; ValueError, and nothing was sent, when the request cannot be sent."""
        try:
            self._sock.settimeout(timeout_s)
            send_frame(self._sock, request)
        except OSError as error:
            raise ProcessGone(f"{error} (status {self.process.poll()})") from None
        try:
            return receive_frame(self._sock)
        except TimeoutError:
            raise ProcessGone(f"it did not answer within {timeout_s:g} s") from None
        except (OSError, EOFError, ValueError) as error:
            raise ProcessGone(f"{error} (status {self._status()})") from None

    def _status(self) -> int | None:
        try:
            return self.process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return None

    def last_line(self) -> str:
        """The last thing that it said on its standard error."""
        try:
            size = self._said.seek(0, os.SEEK_END)
            self._said.seek(max(0, size - LAST_BYTES))
            lines = self._said.read(LAST_BYTES).decode(errors="replace").strip().splitlines()
        except ValueError:  # another thread ended it
            return "nothing"
        return lines[-1] if lines else "nothing"

    def end(self) -> None:
        """Killed with all that it started, reaped, its folder gone. Idempotent; from any thread."""
        if self.process.poll() is None:
            signal_group(self.process, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        try:
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes who waits for an answer
        except OSError:
            pass  # gone already
        self._sock.close()
        with self._closing:  # a file that two threads close at once says that it is closed
            self._said.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


LAST_BYTES = 1 << 16
"""Bytes at the end of what a process said in which its last line is looked for."""


class KeptProcess:
    """A scoring process that is started anew when it had to be ended. One call at a time; `close` may come from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: ScoringProcess | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The process's id; None without one."""
        return self._process.process.pid if self._process is not None else None

    def start(self) -> None:
        """Have a process, ready. UsageError when what it is to score with cannot be had."""
        with self._lock:
            if self._process is None:
                self._start()

    def close(self) -> None:
        """Ends the process; a call in another thread then raises ShoalError. Idempotent."""
        self._closed = True
        process = self._process
        if process is not None:
            process.end()

    def _start(self) -> None:
        """Make a process with `_make` and have it ready, under the lock. UsageError as `start`, ShoalError where it fails."""
        raise NotImplementedError

    def _make(self, module: str, environment: Mapping[str, str], *, own_folder: bool) -> ScoringProcess:
        if self._closed:
            raise ShoalError("the scorer is closed")
        process = self._process = ScoringProcess(module, environment, own_folder=own_folder)
        if self._closed:  # `close` came while the process was being made and did not see it
            process.end()
        return process

    def _drop(self) -> None:
        if self._process is not None:
            self._process.end()
        self._process = None
        if self._closed:
            raise ShoalError("the scorer is closed")
