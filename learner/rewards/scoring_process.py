"""A process that scores, and our end of its socket. Blocking; must not know what is scored there."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from learner.rewards.frames import receive_frame, send_frame
from p2p.processes import python_command, signal_group, start


class ProcessGone(Exception):
    """The process is not there, or not in order; says why."""


class ScoringProcess:
    """One scoring process. `module` is the program that it runs; `own_folder` is to run in an empty folder of its own."""

    def __init__(self, module: str, environment: Mapping[str, str], *, own_folder: bool) -> None:
        self._folder = tempfile.mkdtemp(prefix="shoal-score-") if own_folder else None
        self._said: IO[bytes] = tempfile.TemporaryFile()
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
        if self._said.closed:
            return "nothing"
        size = self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, size - LAST_BYTES))
        lines = self._said.read(LAST_BYTES).decode(errors="replace").strip().splitlines()
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
        self._said.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


LAST_BYTES = 1 << 16
"""Bytes at the end of what a process said in which its last line is looked for."""
