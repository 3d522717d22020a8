"""`shoal` verbs as processes of a folder of their own: started, heard, never left behind. Must not know what they do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from p2p.errors import ShoalError

ENV = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

ROOT = Path(__file__).resolve().parents[2]
"""Where `python -m` finds the packages, wherever this was started."""


def wait_for(what: str, condition: Callable[[], Any], timeout: float = 60.0) -> Any:
    """The first true value of `condition`. ShoalError, naming `what`, after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise ShoalError(f"not within {timeout:.0f} s: {what}")
        time.sleep(0.1)


class Verbs:
    """Starts `shoal` verbs in a folder and keeps what they say."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, *arguments: str, module: Sequence[str] = ("shoal",)) -> subprocess.Popen[bytes]:
        """`python -m MODULE ARGUMENTS`, its output in NAME.out and NAME.err."""
        with open(self.root / f"{name}.out", "ab") as out, open(self.root / f"{name}.err", "ab") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", *module, *arguments],
                stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=ENV, cwd=ROOT,
            )  # fmt: skip
        self.running.append(process)
        return process

    def said(self, name: str) -> str:
        return (self.root / f"{name}.err").read_text()

    def result(self, name: str) -> dict[str, Any]:
        """The JSON object in the last line of its standard output."""
        value: dict[str, Any] = json.loads((self.root / f"{name}.out").read_text().splitlines()[-1])
        return value

    def end(self) -> None:
        """SIGKILL for whatever still runs."""
        for process in self.running:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()
