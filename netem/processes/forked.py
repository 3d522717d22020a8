"""Processes forked from a warm parent, which has imported what nodes and their engines need. Must not know what they do.

Starting Python with torch and transformers takes some four seconds of CPU. Where many short-lived nodes share a machine, as in
`shoal demo --spot`, that is all the machine would do. What is forked is `shoal node` as ever: a process of its own, with its own
key, directory, libp2p host, and with its engine in another process, a fork of the node.

The warm parent is the forkserver of `multiprocessing`. It has no say in three things, which are here: that children die with
their parent (its own go on without it), that output goes to files, and that a fork of a fork, the engine, keeps nothing of its
node's. CPU engines only: CUDA does not survive a fork.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import pairwise
from multiprocessing.process import BaseProcess
from pathlib import Path

from netem.processes.children import MODEST
from p2p.errors import ShoalError
from p2p.processes import Process, child_environment, die_with_parent

WARM = "netem.processes.warm"
"""The module that the warm parent imports."""

MOST_FDS = 65536
"""Descriptors up to this number are closed in a fork of a running program: more than a node or a learner may have open."""

LOOK_S = 0.005
"""Between two looks at a process that is waited for: a twentieth of what a fork takes."""


class ForkedProcess:
    """A process of `multiprocessing`, used as those of `subprocess` are. The constructor starts it."""

    def __init__(self, process: BaseProcess) -> None:
        process.start()
        assert process.pid is not None
        self._process, self.pid = process, process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Polled: `join` waits for a pipe that an engine's fork closes at once, and then without regard to `timeout`."""
        began = time.monotonic()
        while (code := self.poll()) is None:
            if timeout is not None and time.monotonic() - began > timeout:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(LOOK_S)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def warm_up() -> None:
    """Start the warm parent, and return when it has imported everything. ShoalError when it cannot."""
    if _fork(_is_warm).wait():
        raise ShoalError(f"the warm parent cannot import {WARM}")


def fork_module(module: str, arguments: Sequence[str], out: Path, log: Path) -> ForkedProcess:
    """`python -m MODULE ARGUMENTS` in a fork of the warm parent, with its own session; its output at the end of `out` and `log`.
    To be called by a thread that lasts: all forks die with the one that called first. ShoalError when the warm parent is gone."""
    for file in (out, log):  # whoever reads what it says may do so at once
        file.touch()
    return _fork(_run_module, module, tuple(arguments), str(out), str(log))


def _fork(target: object, *arguments: object) -> ForkedProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([WARM])
    with _environment():
        try:
            return ForkedProcess(context.Process(target=target, args=arguments))  # type: ignore[arg-type]
        except (EOFError, OSError) as error:
            raise ShoalError(f"the warm parent ended: {error!r}") from None


@contextmanager
def _environment() -> Iterator[None]:
    """Within it our environment is the one that the warm parent, if it is started now, and its forks get."""
    before = dict(os.environ)
    os.environ.update(child_environment({**MODEST, "PYTHONSAFEPATH": "1"}))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _is_warm() -> None:
    sys.exit(WARM not in sys.modules)


def _run_module(module: str, arguments: tuple[str, ...], out: str, log: str) -> None:
    """In the fork: `python -m MODULE ARGUMENTS`."""
    from node.engine.process import register_starter

    die_with_parent()
    os.setsid()
    for fd, path in ((0, os.devnull), (1, out), (2, log)):
        opened = os.open(path, os.O_RDONLY if not fd else os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(opened, fd)
        os.close(opened)
    register_starter(_fork_engine)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__")


def _fork_engine(command: list[str], fd: int, environment: dict[str, str]) -> Process:
    """A node's `EngineStarter`. To be called by the node's main thread: what other threads held then stays held in the fork.
    An engine that is to run in another Python is no fork of this one, and is started as ever."""
    from node.engine.process import start_program

    python, _, _, module, *arguments = command  # as `python_command` makes it
    if python != sys.executable:
        return start_program(command, fd, environment)
    fork = multiprocessing.get_context("fork")
    return ForkedProcess(fork.Process(target=_run_engine, args=(module, arguments, fd), daemon=True))


def _run_engine(module: str, arguments: list[str], fd: int) -> None:
    """In the fork of a node: the `main` of `node.engine.child`, or of what stands for it. The node's own module, and not one that
    is loaded anew: what a node has set in it holds in its engine."""
    leave([fd])
    sys.exit(import_module(module).main(arguments))


def leave(kept: Sequence[int]) -> None:
    """In the fork of a running program: only descriptors 0 to 2 and those `kept` stay open, its handlers of signals are gone, and
    the fork dies with it. While a fork has a program's sockets, nobody sees that it is dead."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    die_with_parent()
    bounds = [2, *sorted(kept), MOST_FDS]
    for before, after in pairwise(bounds):
        os.closerange(before + 1, after)
