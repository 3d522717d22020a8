"""The demo's child processes: started quietly, watched, never left behind. Must not know what they do."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil


@dataclass
class Child:
    """One `shoal` process. `out` holds what it printed last (its JSON), `log` everything it said."""

    name: str
    process: subprocess.Popen[bytes]
    out: Path
    log: Path

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
    all: list[Child] = field(default_factory=list)

    def start(self, name: str, arguments: Sequence[str]) -> Child:
        """`python ARGUMENTS...` with one thread to each library pool, its output under logs/."""
        self.logs.mkdir(parents=True, exist_ok=True)
        out, log = self.logs / f"{name}.out", self.logs / f"{name}.log"
        env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        with open(out, "ab") as stdout, open(log, "ab") as stderr:
            process = subprocess.Popen(
                [sys.executable, *arguments], stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=env,
                process_group=0, preexec_fn=_die_with_parent,
            )  # fmt: skip
        child = Child(name, process, out, log)
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


def _die_with_parent() -> None:
    """PR_SET_PDEATHSIG: a killed demo leaves nothing running."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)
