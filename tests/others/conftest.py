"""Packages of other people's, as a user has them: installed by pip, found by name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parent / "packages"


OLD = Path(os.environ.get("SHOAL_VERIFIERS_V0") or Path(sys.prefix) / "v0")
"""Where a verifiers that still has v0 is installed, with what it pins otherwise (make test-others does it)."""


def install(package: str, folder: Path) -> Path:
    """The package, installed by pip into a folder of its own."""
    source, home = folder / "source", folder / "site"
    shutil.copytree(PACKAGES / package, source)
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-build-isolation", "--target", str(home),
         str(source)],
        check=True,
    )  # fmt: skip
    return home


@contextmanager
def on_path(*folders: Path) -> Iterator[None]:
    """Processes that are started meanwhile import from these folders before all others."""
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*map(str, folders), before]))
    try:
        yield
    finally:
        os.environ["PYTHONPATH"] = before


@pytest.fixture(scope="session")
def words_v1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the environment shoal_words_v1."""
    return install("shoal_words_v1", tmp_path_factory.mktemp("words_v1"))


@pytest.fixture
def installed_words(words_v1: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """It is found, here and in processes that are started."""
    monkeypatch.syspath_prepend(str(words_v1))
    with on_path(words_v1):
        yield words_v1


@pytest.fixture(scope="session")
def words_v0(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the environment shoal_words_v0."""
    return install("shoal_words_v0", tmp_path_factory.mktemp("words_v0"))


@pytest.fixture
def installed_old_words(words_v0: Path) -> Iterator[Path]:
    """It is found in processes that are started, with a verifiers that runs it. This process has the newer one."""
    if not (OLD / "verifiers").is_dir():
        pytest.skip(f"no verifiers with v0 in {OLD}")
    with on_path(words_v0, OLD):
        yield words_v0
