"""Files that hold secrets are their owner's alone, whatever the umask is and was."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from learner.journal.journal import Journal
from p2p.files import make_private, write_whole


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_private_file_replaces_an_open_one(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    write_whole(path, "old")
    (tmp_path / "config.toml.tmp").write_text("what a crash left")
    assert mode(path) == 0o666
    write_whole(path, "new", private=True)
    assert mode(path) == 0o600 and path.read_text() == "new"
    make_private(tmp_path / "empty")
    assert mode(tmp_path / "empty") == 0o600


def test_a_journal_is_private_and_so_is_one_from_before(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    for _ in range(2):
        with Journal.open(path, "run") as journal:
            journal.new_epoch()
            files = [file for file in tmp_path.iterdir() if file.name.startswith("journal.sqlite")]
            assert len(files) == 4 and {mode(file) for file in files} == {0o600}, {file.name: oct(mode(file)) for file in files}
        path.chmod(0o644)
