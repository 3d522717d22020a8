"""What an environment's process gives up before any code of a user's runs in it, and what it says when that is met. Linux.

Must not know episodes or tokens.

The whole process is confined, not each call of a tool: tools are methods too, which keep their state in the environment, and a
process with threads cannot be forked safely (docs/design/rollouts.md).
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
import socket
import sys
import sysconfig
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from learner.environments.wire import ChildSetup
from learner.rewards import sandbox

SCRATCH_BYTES = 64 << 20
"""Of the folder in memory that an environment may write in, all its episodes together, and of one file there."""

MAX_FILES, MAX_TASKS = 1024, 1024
"""Descriptors of an environment's process, and threads of its user's: hundreds of episodes with a file each; far less than what
would hurt the machine."""

NEEDED = ("Landlock", "seccomp")
"""Layers without which nothing keeps a tool from the learner's files and the network. Without namespaces there is only no scratch
folder."""

_ODDS = ("/dev/null", "/dev/zero", "/dev/urandom", "/etc/localtime", "/etc/mime.types", "/usr/share/zoneinfo")
"""What Python's own modules open. None of it tells anything about the learner."""


THREAD_ROOM = 8 << 20
"""Bytes that a thread finds beside its stack. Python needs some tens of kB before it runs the first line of it."""


class _Paths(NamedTuple):
    readable: list[str]
    listed: list[str]


def confine_environment(setup: ChildSetup) -> list[str]:
    """Give everything up but what `setup` leaves. For a process of one thread. What could not be had, as words: layers of the
    sandbox."""
    missing = sandbox.leave_for_scratch(setup.scratch, SCRATCH_BYTES)
    changed = ["/dev/null"]
    if not missing:
        changed.append(setup.scratch)
    os.chdir(setup.scratch)  # into the folder in memory, where there is one: we stand in the one below it
    sandbox.limit_files(size=SCRATCH_BYTES, threads=MAX_TASKS, files=MAX_FILES)
    paths = _paths(setup)
    missing += sandbox.confine(paths.readable, listed=paths.listed, changed=changed)
    return missing + sandbox.seal(threads=True)


def leave_room_for_threads() -> None:
    """From now on a thread is not started (RuntimeError, as where there is no memory for its stack) where its stack fits and
    hardly more. Such a thread dies before it has said that it began, and CPython lets whoever starts it wait for that for good.
    For a process whose memory is bounded."""
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    room = THREAD_ROOM + (stack if stack != resource.RLIM_INFINITY else THREAD_ROOM)
    start = threading.Thread.start

    def start_with_room(self: threading.Thread) -> None:
        try:
            mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
        except (OSError, MemoryError):
            raise RuntimeError("can't start new thread") from None  # CPython's own words, which libraries know
        start(self)

    threading.Thread.start = start_with_room  # type: ignore[method-assign]


def _paths(setup: ChildSetup) -> _Paths:
    """Python's packages; beside the environment's file, and where else modules lie, only modules and packages: a run's folder may
    lie there too."""
    whole = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    homes = [path for path in sys.path if path]
    home = setup.name.rpartition(":")[0]
    if home.endswith(".py"):
        homes.append(os.path.dirname(home))
    listed = []
    for folder in dict.fromkeys(homes):
        if os.path.basename(folder) in ("site-packages", "dist-packages", "lib-dynload") or folder.endswith(".zip"):
            whole.append(folder)
        elif folder not in whole:
            listed.append(folder)
    return _Paths([*whole, *_ODDS, *setup.readable, *(one for folder in listed for one in _modules(Path(folder)))], listed)


def _modules(folder: Path) -> list[str]:
    try:
        entries = list(folder.iterdir())
    except OSError:
        return []
    return [str(e) for e in entries if e.suffix in (".py", ".so") or (e / "__init__.py").exists()]


def stopped_by(error: BaseException, setup: ChildSetup) -> str:
    """Which limit of the process made this error, for a person; "" when none did. Libraries wrap such errors in theirs."""
    seen: list[BaseException] = []
    waiting: list[object] = [error]
    while waiting and len(seen) < 32:
        one = waiting.pop(0)
        if not isinstance(one, BaseException) or any(one is before for before in seen):
            continue
        seen.append(one)
        why = _limit_of(one, setup)
        if why:
            return why
        waiting += [one.__cause__, one.__context__, *one.args]
    return ""


def _limit_of(error: BaseException, setup: ChildSetup) -> str:
    if isinstance(error, MemoryError) and setup.memory_bytes:
        return f"environment.memory_mb = {setup.memory_bytes >> 20}"
    if not setup.sandbox:
        return ""
    if isinstance(error, socket.gaierror):
        return "the sandbox: no network"
    if isinstance(error, OSError) and error.errno == errno.EPERM:
        return "the sandbox: no network, no processes, no signals"
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EROFS):
        return "the sandbox: it reads what environment.readable names, and writes in its current folder only"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EFBIG):
        return f"the sandbox: {SCRATCH_BYTES >> 20} MB of files"
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return "the sandbox: no more threads"
    return ""


def needs_consent(name: str, missing: Sequence[str]) -> str:
    """Why an environment is refused on a system that lacks these layers; "" where it is not."""
    lacking = [layer for layer in NEEDED if layer in missing]
    if not lacking:
        return ""
    return (
        f"environment {name} cannot be confined: this system has no {' and no '.join(lacking)} (Linux 5.13 or later on x86_64 or "
        'aarch64); environment.run = "process" runs it with your rights, environment.allow_unconfined = true in what is left'
    )
