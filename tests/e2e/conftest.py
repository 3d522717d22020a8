"""Real processes for the end-to-end tests: started, watched with deadlines, never left behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from netem.bench.shoal_commands import ENV, Verbs


@pytest.fixture
def shoal(tmp_path: Path) -> Iterator[Verbs]:
    runner = Verbs(tmp_path)
    yield runner
    runner.end()


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's small model, warmed up as the demo does it."""
    folder = tmp_path_factory.mktemp("model") / "model"
    subprocess.run(
        [sys.executable, "-m", "netem.demo.recipes", str(folder), "reverse", "0"],
        check=True, env=ENV, capture_output=True, timeout=120, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    return folder
