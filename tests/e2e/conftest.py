"""Real processes for the end-to-end tests: started, watched with deadlines, never left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

ENV = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def wait_for(what: str, condition: Callable[[], Any], timeout: float = 60.0) -> Any:
    """The first true value of `condition`; fails, naming `what`, after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout:.0f} s: {what}")
        time.sleep(0.1)


class Shoal:
    """Starts `shoal` verbs in a folder of their own and keeps what they say."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, *arguments: str, module: Sequence[str] = ("shoal",)) -> subprocess.Popen[bytes]:
        with open(self.root / f"{name}.out", "ab") as out, open(self.root / f"{name}.err", "ab") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", *module, *arguments],
                stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=ENV, cwd=Path(__file__).parents[2],
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
        for process in self.running:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()


@pytest.fixture
def shoal(tmp_path: Path) -> Iterator[Shoal]:
    runner = Shoal(tmp_path)
    yield runner
    runner.end()


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's small model, warmed up as the demo does it."""
    folder = tmp_path_factory.mktemp("model") / "model"
    subprocess.run(
        [sys.executable, "-m", "learner.demo.recipes", str(folder), "reverse", "0"],
        check=True, env=ENV, capture_output=True, timeout=120, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    return folder
