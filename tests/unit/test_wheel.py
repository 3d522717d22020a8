"""The wheel that `pip install .` makes has all of the four packages, and runs where no checkout is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.support.watchdog import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("p2p", "node", "learner", "netem")
BUILD = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"


def files_of(package: str) -> set[str]:
    """Every file of a package but what Python leaves there."""
    found = (path for path in (ROOT / package).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in found}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools writes beside what it builds, and takes over what an older build left there."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("shoal.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-P", "-c", BUILD, str(out)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel installs."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder)
    return folder


def test_the_wheel_has_every_file_of_the_packages(installed: Path) -> None:
    there = {path.relative_to(installed).as_posix() for path in installed.rglob("*") if path.is_file()}
    code = {name for name in there if ".dist-info/" not in name}
    assert code == {"shoal.py"}.union(*map(files_of, PACKAGES))


def test_every_package_says_that_it_is_typed(installed: Path) -> None:
    assert [name for name in PACKAGES if not (installed / name / "py.typed").exists()] == []


def test_the_wheel_brings_the_command_and_the_licence(installed: Path) -> None:
    (info,) = installed.glob("*.dist-info")
    assert "shoal = shoal:main" in (info / "entry_points.txt").read_text()
    assert (info / "licenses" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "data"),
    [
        (("netem", "run", "no-such-scenario"), "netem/contest/scenarios"),
        (("simulate", "--preset", "-"), "netem/planning/presets"),
    ],
    ids=["scenarios", "presets"],
)
def test_an_installed_command_names_its_data_from_another_folder(
    installed: Path, tmp_path: Path, arguments: tuple[str, ...], data: str
) -> None:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "-P", "-m", "shoal", *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    names = [path.stem for path in (ROOT / data).glob("*.toml")]
    assert len(names) >= 3 and not [name for name in names if name not in done.stdout + done.stderr], done.stderr


def test_a_node_needs_no_package_of_the_learners_tasks() -> None:
    """reasoning-gym brings an extension in C that has no wheel, and nodes score nothing."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert not [one for one in project["dependencies"] if "reasoning" in one]
    assert extras["reasoning-gym"] and "shoal[reasoning-gym]" in extras["dev"]
