"""What docs/deploy ships for operators: linters pass it, and what it names is there.

Whether an image builds is not seen here: that takes a registry of base images.
"""

from __future__ import annotations

import fnmatch
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser

from node.folders import LEAVE_S

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "docs" / "deploy"
DOCKERFILE = DEPLOY / "Dockerfile"
UNIT = DEPLOY / "shoal-node@.service"

EXPOSURE = 20
"""Tenths of a point of `systemd-analyze security`, where 100 is a service that nothing confines: it gave the unit 14 when it was
written, and a newer systemd that asks for more may give it some more."""


def instructions() -> list[tuple[str, str]]:
    """(instruction, what follows) of each, continued lines joined."""
    parser = DockerfileParser(path=str(DOCKERFILE))
    return [(one["instruction"], one["value"]) for one in parser.structure if one["instruction"] != "COMMENT"]


def copied() -> list[str]:
    """Paths of the checkout that the images copy."""
    values = [value.split() for name, value in instructions() if name == "COPY" and "--from=" not in value]
    return [source for words in values for source in words[:-1]]


def packages(text: str) -> set[str]:
    """Names that follow `apt-get install` in a text, up to what ends a command."""
    found = re.findall(r"apt-get install((?: -[\w-]+)*)((?: [a-z][a-z0-9.+-]+)+)", text)
    return {name for _, names in found for name in names.split()}


def tool(name: str) -> str:
    """A program's path; skips the test where there is none."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"no {name} on this machine")
    return path


def settings() -> list[tuple[str, str]]:
    """(key, value) of each line of the unit that sets something."""
    lines = UNIT.read_text().splitlines()
    return [(key, value) for key, equals, value in (line.partition("=") for line in lines) if equals and not key.startswith("#")]


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit with its drop-in, where its program is one that this machine has."""
    path = tmp_path / UNIT.name
    path.write_text(UNIT.read_text().replace("/opt/shoal/bin/shoal", str(Path(sys.executable).resolve())))
    (tmp_path / f"{UNIT.name}.d").mkdir()
    shutil.copy(DEPLOY / "gpu.conf", tmp_path / f"{UNIT.name}.d")
    return path


def test_the_dockerfile_passes_hadolint() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([str(hadolint), "--no-color", str(DOCKERFILE)], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_what_the_images_copy_is_there_and_not_ignored() -> None:
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    kept = {rule[1:] for rule in rules if rule.startswith("!")}
    assert rules[0] == "*" and sorted(copied()) == sorted(kept)
    assert [name for name in copied() if not (ROOT / name).exists()] == []
    assert [name for name in kept if any(fnmatch.fnmatch(name, rule) for rule in rules[1:] if rule[0] != "!")] == []


def test_the_images_have_all_that_the_wheel_is_made_of() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found = {name.split(".")[0] for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    modules = {f"{name}.py" for name in project["tool"]["setuptools"]["py-modules"]}
    assert {*found, *modules, project["project"]["readme"], *project["project"]["license-files"]} <= set(copied())


def test_the_images_take_the_torch_that_was_tested() -> None:
    (version,) = [value.partition("=")[2] for name, value in instructions() if name == "ARG" and value.startswith("TORCH=")]
    assert f"torch=={version}" in (ROOT / "constraints.txt").read_text().splitlines()


def test_no_image_ends_as_root() -> None:
    users = [value for name, value in instructions() if name == "USER"]
    assert users and all(re.fullmatch(r"[1-9]\d*:[1-9]\d*", user) for user in users)


def test_every_package_that_is_named_exists() -> None:
    apt_cache = tool("apt-cache")
    pages = [DOCKERFILE, ROOT / "Makefile", ROOT / ".ci" / "run", ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    pages += [ROOT / "docs" / "quickstart.md", DEPLOY / "README.md"]
    named = set.union(*(packages(page.read_text()) for page in pages))
    assert {"gcc", "libgmp-dev", "libgmp10", "python3-venv"} <= named
    known = set(subprocess.run([apt_cache, "pkgnames"], capture_output=True, text=True).stdout.split())
    if "libgmp-dev" not in known:
        pytest.skip("this machine has no list of packages: apt-get update")
    assert named - known == set()


def test_the_unit_is_one_that_systemd_takes(unit: Path) -> None:
    done = subprocess.run([tool("systemd-analyze"), "verify", "--man=no", str(unit)], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_a_mistake_in_the_unit_would_be_seen(unit: Path) -> None:
    unit.write_text(unit.read_text().replace("RestrictRealtime=", "RestrictRealtme="))
    done = subprocess.run([tool("systemd-analyze"), "verify", "--man=no", str(unit)], capture_output=True, text=True)
    assert "RestrictRealtme" in done.stderr


def test_the_unit_confines_a_node(unit: Path) -> None:
    command = [tool("systemd-analyze"), "security", "--offline=true", f"--threshold={EXPOSURE}", "--no-pager"]
    shutil.rmtree(unit.with_name(f"{unit.name}.d"))
    done = subprocess.run([*command, str(unit)], capture_output=True, text=True)
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze judges only what runs")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_stopped_unit_hands_over() -> None:
    values = dict(settings())
    assert (values["KillSignal"], values["KillMode"]) == ("SIGTERM", "mixed")
    assert float(values["TimeoutStopSec"]) > LEAVE_S
    assert values["Restart"] == "on-failure" and values["RestartPreventExitStatus"] == "2"


def test_the_ticket_is_on_no_command_line() -> None:
    (command,) = [value for key, value in settings() if key == "ExecStart"]
    assert "${CREDENTIALS_DIRECTORY}/ticket" in command
    (default,) = [value for name, value in instructions() if name == "CMD" and "--join" in value]
    assert '"/run/secrets/ticket"' in default


def test_nothing_forbids_what_numba_does() -> None:
    assert "MemoryDenyWriteExecute" not in dict(settings())
