"""The demo's child processes: started quietly, watched, never left behind. Must not know what they do."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from netem.demo.child_env import CHILD_ENV, die_with_parent
from netem.demo.fork_client import WarmParent, WarmProcess


@dataclass
class DemoProcess:
    """One `shoal` process. `out` holds what it printed last (its JSON), `log` everything it said."""

    name: str
    process: subprocess.Popen[bytes] | WarmProcess
    out: Path
    log: Path
    expected: set[int] = field(default_factory=lambda: {0})
    """the exit statuses that are no fault"""

    def send(self, number: signal.Signals) -> None:
        """A signal, and its consequence is no fault: it may come before the process has learned to end well (143)."""
        self.expected |= {-number, 128 + number}
        if self.process.poll() is None:
            self.process.send_signal(number)

    def failed(self) -> bool:
        """Whether it has ended as it should not."""
        return self.process.poll() is not None and self.process.returncode not in self.expected

    def last_line(self) -> str:
        """The last thing it said, for an error message."""
        for path in (self.log, self.out):
            lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
            if lines:
                return lines[-1]
        return "it said nothing"


@dataclass
class Children:
    """Every process of the demo. Leaving the block ends them all, politely first."""

    logs: Path
    all: list[DemoProcess] = field(default_factory=list)
    warm: WarmParent | None = None

    def warm_up(self) -> None:
        """From here on `start` can fork from a parent that has imported what nodes need."""
        self.logs.mkdir(parents=True, exist_ok=True)
        self.warm = WarmParent(self.logs / "warm.log")

    def start(self, name: str, arguments: Sequence[str], warm: bool = False) -> DemoProcess:
        """`python ARGUMENTS...` with one thread to each library pool, its output under logs/; as a fork if `warm`."""
        self.logs.mkdir(parents=True, exist_ok=True)
        out, log = self.logs / f"{name}.out", self.logs / f"{name}.log"
        process: subprocess.Popen[bytes] | WarmProcess
        if warm and self.warm is not None:
            process = self.warm.start(arguments, out, log)
        else:
            with open(out, "ab") as stdout, open(log, "ab") as stderr:
                process = subprocess.Popen(
                    [sys.executable, *arguments], stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=CHILD_ENV,
                    process_group=0, preexec_fn=die_with_parent,
                )  # fmt: skip
        child = DemoProcess(name, process, out, log)
        self.all.append(child)
        return child

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
        running = [c for c in self.all if c.process.poll() is None]
        for child in running:
            child.process.send_signal(signal.SIGTERM)
        for child in running:
            try:
                child.process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
        if self.warm is not None:
            self.warm.close()
