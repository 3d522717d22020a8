"""Programs of ours start whatever lies in the current folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from learner.config import build_config, dump_toml
from netem.demo.recipes import RECIPES
from netem.processes.children import MODEST
from p2p.processes import child_environment, end, python_command, start
from tests.support.watchdog import status_of

pytestmark = pytest.mark.e2e

SCRIPT = "import sys\nfrom shoal import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
"""What an installation makes as the console script `shoal`."""


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder with modules of our packages' names that must never be imported."""
    folder = tmp_path / "work"
    folder.mkdir()
    for name in ("p2p", "node", "learner", "netem", "shoal", "trio"):
        (folder / f"{name}.py").write_text(f"raise SystemExit('imported {name}.py of the current folder')\n")
    return folder


def test_modules_in_the_current_folder_are_not_taken_for_ours(hostile: Path, tmp_path: Path, demo_model: Path) -> None:
    """A learner, its trainer, its local engine's node and that node's engine: all start."""
    script = tmp_path / "bin" / "shoal"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    settings = RECIPES["reverse"].config(Path("run"), demo_model, 1, 0)
    settings["local_engine"] = {"engine": "transformers", "capacity": 96, "floor_s": 0.1}
    (hostile / "learner.toml").write_text(dump_toml(build_config(settings, "test").model_dump()))
    shoal = [sys.executable, str(script)]
    log = tmp_path / "log"
    environment = child_environment(MODEST)
    learner = start(
        [*shoal, "learner", "learner.toml", "--json"], cwd=hostile, stdout=log, stderr=subprocess.STDOUT, environment=environment
    )
    try:
        assert status_of(learner) == 0, log.read_text()
    finally:
        end([learner], 0)
    logs = [*(hostile / "run" / "logs").iterdir(), hostile / "run" / "local-engine" / "engine.log"]
    assert not any("of the current folder" in file.read_text() for file in logs)


def test_the_module_does_not_take_them_either(hostile: Path, demo_model: Path) -> None:
    """`python -P -m shoal`, which starts all its children as the script does."""
    settings = RECIPES["reverse"].config(Path("run"), demo_model, 1, 0)
    (hostile / "learner.toml").write_text(dump_toml(build_config(settings, "test").model_dump()))
    for verb in (["learner", "learner.toml", "--dry-run"], ["doctor"], ["demo", "--help"]):
        done = subprocess.run([*python_command("shoal"), *verb], cwd=hostile, env=child_environment(MODEST), capture_output=True)
        assert done.returncode == 0, done
