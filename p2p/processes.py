"""Child processes: how ours are started, what they find, and how they end. Standard library only; must not know what they do.

Python programs are started as `python -P -m MODULE`: with -P the current folder is not searched, so that a user's `node.py` or
`learner.py` there is not taken for ours. Where we run from a checkout, its folder goes along in PYTHONPATH.

Not trio.open_process: it forks from a worker thread, and the kernel's parent-death signal comes when that thread ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import MappingProxyType
from typing import IO, Protocol

ROOT = Path(__file__).resolve().parents[1]
"""The folder that holds our packages and `shoal.py`."""

INSTALLED = ROOT.name in ("site-packages", "dist-packages")
"""Whether ROOT is where Python looks anyway, among all other packages of its environment."""

_PR_SET_PDEATHSIG = 1
"""The number of the request of Linux's prctl that names the signal for a dead parent's child (linux/prctl.h)."""

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
"""Loaded here and not in the child: between fork and exec as little as possible may happen there."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""The numbers of two settings of glibc's mallopt: how much may lie free on top before it is given back, and from which size a
block is a mapping of its own (malloc.h)."""

MAPPED, FREE_ON_TOP = 2 << 20, 256 << 20
"""Bytes. Mappings of 256 KiB, as there once were, made a trainer of 135 million parameters a third slower, and with blocks of
4 MiB holes add up to an eighth of a step's memory. Chosen after looking at 256 KiB and 1, 2, 4, 16 and 32 MiB
(bench/trainer.md)."""

NOTHING_BEFORE: Mapping[Path, int] = MappingProxyType({})
"""No earlier process wrote to the files."""

Output = Path | IO[bytes] | int | None
"""Where a child's output goes: the end of a file, an open file or a constant of `subprocess`, or (None) where ours goes."""


class Process(Protocol):
    """What we use of `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, number: int) -> None: ...
    def kill(self) -> None: ...


def python_command(module: str, *arguments: str, python: str = sys.executable) -> list[str]:
    """What runs a module of ours as a program. A module may only start what it may import (tests/unit/test_imports.py)."""
    return [python, "-P", "-m", module, *arguments]


def child_environment(extra: Mapping[str, str] | None = None, root: Path | None = None) -> dict[str, str]:
    """Our environment with `extra`, in which a child finds our packages: in `root` (default: where we found them)."""
    if root is None and not INSTALLED:
        root = ROOT
    path = [str(root or ""), os.environ.get("PYTHONPATH", "")]
    found = {"PYTHONPATH": os.pathsep.join(filter(None, path))} if root is not None else {}
    return {**os.environ, **found, **(extra or {})}


def start(
    command: Sequence[str], *, stdin: IO[bytes] | int = subprocess.DEVNULL, stdout: Output = None, stderr: Output = None,
    environment: Mapping[str, str] | None = None, cwd: Path | None = None, pass_fds: Sequence[int] = (),
    own_session: bool = True, outlive: bool = False,
) -> subprocess.Popen[bytes]:  # fmt: skip
    """Start `command`. OSError when it cannot be run.

    `environment`: default `child_environment()`. `own_session`: its process id is also that of its group, see `signal_group`,
    and a terminal's ^C does not reach it. It is killed when the thread that started it ends, however that happens, unless it
    may `outlive` it: so the starter must be a thread that lasts.
    """
    with ExitStack() as files:
        out, err = (files.enter_context(open(o, "ab")) if isinstance(o, Path) else o for o in (stdout, stderr))
        return subprocess.Popen(
            command, stdin=stdin, stdout=out, stderr=err, cwd=cwd, pass_fds=pass_fds, start_new_session=own_session,
            env=child_environment() if environment is None else environment, preexec_fn=None if outlive else die_with_parent,
        )  # fmt: skip


def die_with_parent() -> None:
    """The calling process gets SIGKILL when the thread that forked it ends. Linux; nothing elsewhere."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def keep_blocks_apart() -> None:
    """The calling process gives freed blocks of MAPPED bytes and more back to the system at once; smaller ones stay until
    `give_back_what_is_freed`. glibc; nothing elsewhere.

    Left alone glibc raises that size to 32 MiB as such blocks are freed, and keeps what is below cut up: of a trainer on a CPU
    that was up to two thirds of what it held after a step (bench/trainer.md).
    """
    if _LIBC is not None and hasattr(_LIBC, "mallopt"):
        _LIBC.mallopt(_M_MMAP_THRESHOLD, MAPPED)
        _LIBC.mallopt(_M_TRIM_THRESHOLD, FREE_ON_TOP)


def give_back_what_is_freed() -> None:
    """The calling process gives all whole free pages back to the system, those between blocks that stay too. It takes some
    milliseconds, and the pages are made anew when they are next used. glibc; nothing elsewhere."""
    if _LIBC is not None and hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)


def signal_group(process: Process, number: int) -> None:
    """A signal to a process with its own session and to all that it started. Nothing happens when they are gone."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def end(processes: Iterable[Process], wait_s: float) -> None:
    """SIGTERM to those that still run; what is there `wait_s` seconds later (0: all of them) is killed. Nothing is left."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.send_signal(signal.SIGTERM if wait_s else signal.SIGKILL)
    deadline = time.monotonic() + wait_s
    for process in running:
        wait_or_kill(process, max(0.0, deadline - time.monotonic()))


def wait_or_kill(process: Process, wait_s: float) -> int:
    """Its exit status; killed when it still runs after `wait_s` seconds."""
    try:
        return process.wait(wait_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def last_line(*files: Path, nothing: str = "it said nothing", after: Mapping[Path, int] = NOTHING_BEFORE) -> str:
    """The last thing said in the first of `files` that says something, for an error message; `nothing` when none does. `after`:
    file -> its bytes that an earlier process wrote."""
    for file in files:
        said = file.read_bytes()[after.get(file, 0) :] if file.exists() else b""
        lines = said.decode(errors="replace").strip().splitlines()
        if lines:
            return lines[-1]
    return nothing
