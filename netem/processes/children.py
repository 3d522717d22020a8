"""Child processes that write into one folder: started, heard, never left behind. Must not know what they do."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from p2p.errors import ShoalError
from p2p.processes import Process, child_environment, end, last_line, python_command, start

MODEST = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Variables of every child here: many share a machine, so each gets one thread a library pool, and nobody asks a hub."""

POLITE_S = 5.0
"""How long children may take to end by themselves when a `with` block of `Children` is left: a learner closes its journal
in less."""


ModuleStarter = Callable[[str, Sequence[str], Path, Path], Process]
"""Starts (module, arguments, file for what it prints, file for what it says)."""


def start_module(module: str, arguments: Sequence[str], out: Path, log: Path, prefix: Sequence[str] = ()) -> Process:
    """`PREFIX... python -m MODULE ARGUMENTS`. `prefix`: what makes it run elsewhere, as `ip netns exec` does."""
    command = [*prefix, *python_command(module, *arguments)]
    return start(command, stdout=out, stderr=log, environment=child_environment(MODEST))


@dataclass(eq=False)
class LoggedProcess:
    """A process, and the files with what it printed (`out`, its JSON) and said (`log`)."""

    name: str
    process: Process
    out: Path
    log: Path
    expected: set[int] = field(default_factory=lambda: {0})
    """the exit statuses that are no fault"""
    before: Mapping[Path, int] = field(default_factory=dict)
    """file -> its bytes that an earlier process of the same name wrote"""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.returncode

    def poll(self) -> int | None:
        return self.process.poll()

    def wait(self, timeout: float | None = None) -> int:
        return self.process.wait(timeout)

    def kill(self) -> None:
        self.process.kill()

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)

    def send(self, number: int) -> None:
        """A signal whose consequence is no fault: it may come before the process has learned to end well (143)."""
        self.expected |= {-number, 128 + number}
        if self.poll() is None:
            self.send_signal(number)

    def failed(self) -> bool:
        """Whether it has ended as it should not."""
        return self.poll() is not None and self.returncode not in self.expected

    def last_line(self) -> str:
        """The last thing it said, for an error message."""
        return last_line(self.log, self.out, after=self.before)


class Children:
    """Processes whose output goes to `folder`. Leaving a `with` block ends them all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.all: list[LoggedProcess] = []

    def start(
        self, name: str, *arguments: str, module: str = "shoal", starter: ModuleStarter = start_module
    ) -> LoggedProcess:
        """`python -m MODULE ARGUMENTS`, its output at the end of NAME.out and NAME.log."""
        self.folder.mkdir(parents=True, exist_ok=True)
        out, log = self.folder / f"{name}.out", self.folder / f"{name}.log"
        before = {file: file.stat().st_size for file in (out, log) if file.exists()}
        child = LoggedProcess(name, starter(module, arguments, out, log), out, log, before=before)
        self.all.append(child)
        return child

    def said(self, name: str) -> str:
        """All that `name` wrote to its standard error."""
        return (self.folder / f"{name}.log").read_text()

    def result(self, name: str) -> dict[str, Any]:
        """The JSON object in the last line of `name`'s standard output."""
        value: dict[str, Any] = json.loads((self.folder / f"{name}.out").read_text().splitlines()[-1])
        return value

    def pss_bytes(self) -> int:
        """Proportional set size of this process and everything under it."""
        total = 0
        me = psutil.Process()
        for process in [me, *me.children(recursive=True)]:
            try:
                total += process.memory_full_info().pss
            except psutil.Error:
                continue  # it ended between the two looks
        return total

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *_: object) -> None:
        self.end(POLITE_S)

    def end(self, wait_s: float) -> None:
        """SIGTERM to those that still run, and SIGKILL when they have not ended `wait_s` seconds later (0: SIGKILL for all)."""
        end(self.all, wait_s)


def run_module(module: str, *arguments: str, timeout_s: float = 300.0) -> None:
    """`python -m MODULE ARGUMENTS` to its end. ShoalError, with the last thing that it said, when that is a failure."""
    command = python_command(module, *arguments)
    done = subprocess.run(command, env=child_environment(MODEST), capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ShoalError(f"{module} ended with status {done.returncode}: {said}")


def wait_for(
    what: str, condition: Callable[[], Any], timeout: float = 60.0, alive: Sequence[LoggedProcess] = ()
) -> Any:
    """The first true value of `condition`. ShoalError, naming `what`, after `timeout` seconds, or when one of `alive` has ended
    before."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        for child in alive:
            if child.poll() is not None:
                said = child.log.read_text()[-2000:]
                raise ShoalError(f"{child.name} ended with status {child.returncode} before {what}:\n{said}")
        if time.monotonic() > deadline:
            raise ShoalError(f"not within {timeout:.0f} s: {what}")
        time.sleep(0.1)
