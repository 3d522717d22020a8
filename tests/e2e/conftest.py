"""Real processes for the end-to-end tests: started, never waited for without end, never left behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from netem.processes.children import Children, run_module
from tests.support.watchdog import PATIENCE_S


@pytest.fixture
def shoal(tmp_path: Path) -> Iterator[Children]:
    runner = Children(tmp_path)
    yield runner
    runner.end(0)


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's small model, warmed up as the demo does it."""
    folder = tmp_path_factory.mktemp("model") / "model"
    run_module("netem.demo.recipes", str(folder), "reverse", "0", timeout_s=PATIENCE_S)
    return folder
