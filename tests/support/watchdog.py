"""How long tests wait for what must come. A bound against hanging, never a measure of speed: whoever wants to know whether
something is fast compares within one run, or counts work."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, TypeVar

import pytest
import trio

from netem.processes.children import Children

PATIENCE_S = 600.0 * float(os.environ.get("SHOAL_PATIENCE", "1"))
"""Seconds after which what did not come is taken never to come: ten times and more of what any wait takes on two quiet cores, so
that other busy processes on the machine fail nothing. SHOAL_PATIENCE multiplies it, for machines that are slower still."""

LOOK_S = 0.1
"""Seconds between two looks at what is waited for."""

TAIL_LINES = 60
"""Lines of each log that are shown when patience ends: enough for a traceback and what led to it."""

T = TypeVar("T")


class Waitable(Protocol):
    """A process: `subprocess.Popen` or `LoggedProcess`."""

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status; subprocess.TimeoutExpired after `timeout` seconds."""


def patience() -> AbstractContextManager[trio.CancelScope]:
    """Fails what runs inside once patience ends: `with patience():`."""
    return trio.fail_after(PATIENCE_S)


def until(what: str, condition: Callable[[], T], logs: Children | Path | None = None) -> T:
    """The first true value of `condition`, which is polled. Fails, naming `what`, with the ends of the `logs` when patience ends,
    or when all of their processes have ended without it."""
    give_up_at = time.monotonic() + PATIENCE_S
    while True:
        ended = isinstance(logs, Children) and bool(logs.all) and all(child.poll() is not None for child in logs.all)
        value = condition()
        if value:
            return value
        if ended or time.monotonic() > give_up_at:
            why = "every process has ended" if ended else f"not within {PATIENCE_S:.0f} s"
            pytest.fail(f"{why}: {what}\n{tails(logs)}")
        time.sleep(LOOK_S)


def status_of(process: Waitable, logs: Children | Path | None = None) -> int:
    """The exit status of `process`, once it has ended. Fails with the ends of the `logs` when patience ends."""
    try:
        return process.wait(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        pytest.fail(f"a process has not ended within {PATIENCE_S:.0f} s: {process}\n{tails(logs)}")


def tails(logs: Children | Path | None) -> str:
    """The last lines of every `*.log` and `*.out` in a folder."""
    folder = logs.folder if isinstance(logs, Children) else logs
    if folder is None:
        return ""
    parts = []
    for path in sorted([*folder.rglob("*.log"), *folder.rglob("*.out")]):
        lines = path.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        parts.append("\n".join((f"--- {path.relative_to(folder)}", *lines)))
    return "\n".join(parts)
