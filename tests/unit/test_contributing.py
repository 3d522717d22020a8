"""CONTRIBUTING's map of the code: each row names a place, and a test of it, that are there. `test_docs` has the other pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

TABLE = "## If you want to change X, look at Y"


def rows() -> list[list[str]]:
    """The cells of each row of the table "to change, look at, tested by", without its head."""
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split(TABLE, 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_each_row_names_a_place_and_a_test_that_exist(row: list[str]) -> None:
    _, places, tests = row
    for cell in (places, tests):
        paths = re.findall(r"`([^`]+)`", cell)
        assert paths and not [path for path in paths if not (ROOT / path).exists()]


def test_the_table_is_read_whole() -> None:
    named = {row[0] for row in rows()}
    assert len(named) >= 30
    some = {"the staleness bound", "an objective", "the ticket", "a message between peers", "a config setting"}
    assert some <= named
