"""The auditor's process as the head sees it: started, asked one thing at a time, ended. A thin shell.

Must not know plans or nodes.
"""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path
from typing import Any

import trio

from learner.audit.wire import Frames
from p2p.processes import Process, last_line, python_command, start

AUDITOR = "learner.audit.auditor"
"""The module of the auditor: a process of its own, for it imports torch and computes."""

START_S = 300.0
"""Seconds in which it must be ready: it imports torch, which takes a minute of a busy disk."""

ANSWER_S = 600.0
"""Seconds in which it must answer: a few thousand tokens of a model of half a billion parameters take minutes of one core."""

RECEIVE_BYTES = 1 << 18
"""Bytes that are taken from its socket at a time."""


class AuditorGone(Exception):
    """The process is not there, or not in order; says why."""


class AuditorRefused(Exception):
    """It says that it cannot do its work, and why: to start it again would not help."""


class AuditorProcess:
    """`settings` as `AuditorSettings.text` gives them, `log_file` takes what it says. Use `open`."""

    def __init__(self, settings: str, log_file: Path) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process: Process = start(
                python_command(AUDITOR, str(theirs.fileno()), settings), stdout=log_file, stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
            )  # fmt: skip
        ours.setblocking(False)
        self._stream, self._log = trio.SocketStream(trio.socket.from_stdlib_socket(ours)), log_file
        self._frames, self._read = Frames(), list[dict[str, Any]]()

    async def ready(self) -> dict[str, Any]:
        """Wait until it is. AuditorRefused or AuditorGone when it will not be."""
        return await self._answer(START_S)

    async def ask(self, request: bytes) -> dict[str, Any]:
        """Its answer. AuditorRefused or AuditorGone."""
        try:
            with trio.fail_after(ANSWER_S):
                await self._stream.send_all(request)
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
            pass  # what it said before, if anything, is read now
        return await self._answer(ANSWER_S)

    async def _answer(self, limit_s: float) -> dict[str, Any]:
        try:
            with trio.fail_after(limit_s):
                while not self._read:
                    data = await self._stream.receive_some(RECEIVE_BYTES)
                    if not data:
                        raise AuditorGone(self._said())
                    self._read += self._frames.feed(data)
        except trio.TooSlowError:
            raise AuditorGone(f"it gave no answer for {limit_s:.0f} s") from None
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise AuditorGone(self._said()) from None
        except ValueError as error:
            raise AuditorGone(f"it says what is no answer: {error}") from None
        message = self._read.pop(0)
        if "refused" in message:
            raise AuditorRefused(str(message["refused"]))
        return message

    def _said(self) -> str:
        self.process.kill()
        status = self.process.wait()
        return f"it ended with status {status}: {last_line(self._log)}"

    def end(self) -> None:
        """Killed and reaped. Idempotent."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._stream.socket.close()
