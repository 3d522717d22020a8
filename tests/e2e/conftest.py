"""Real processes for the end-to-end tests: started, never waited for without end, never left behind."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from pathlib import Path

import pytest

from netem.processes.children import Children, run_module
from tests.support.warm_parts import WithWarmParts
from tests.support.watchdog import PATIENCE_S


@pytest.fixture
def shoal(tmp_path: Path) -> Iterator[Children]:
    runner = WithWarmParts(tmp_path)
    yield runner
    runner.end(0)


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The demo's small model, warmed up as the demo does it: once, also where several workers need it."""
    shared = tmp_path_factory.getbasetemp() if worker_id == "master" else tmp_path_factory.getbasetemp().parent
    folder = shared / "model"
    with (shared / "model.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            run_module("netem.demo.recipes", str(folder), "reverse", "0", timeout_s=PATIENCE_S)
    return folder
