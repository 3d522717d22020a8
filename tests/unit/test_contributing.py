"""CONTRIBUTING.md and the users' pages point at what is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

TABLE = "## If you want to change X, look at Y"

OURS = ("p2p/", "node/", "learner/", "netem/", "tests/", "docs/", "bench/", "examples/")
"""What begins so between backticks is a path of this repository."""

PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("bench/*.md")})


def rows() -> list[list[str]]:
    """The cells of each row of the table "to change, look at, tested by", without its head."""
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split(TABLE, 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def code_words(text: str) -> Iterator[str]:
    yield from re.findall(r"`([^`\n]+)`", text)


def links(page: Path) -> Iterator[str]:
    """Targets of a page's links that are files of this repository."""
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://", "mailto:")):
            yield target


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_each_row_names_a_place_and_a_test_that_exist(row: list[str]) -> None:
    _, places, tests = row
    for cell in (places, tests):
        paths = [word for word in code_words(cell) if "/" in word]
        assert paths and not [path for path in paths if not (ROOT / path).exists()]


def test_the_table_is_read_whole() -> None:
    named = {row[0] for row in rows()}
    assert len(named) >= 30
    assert {"the staleness bound", "the losses", "the ticket", "a message between peers", "a config setting"} <= named


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in sorted(ROOT.glob("docs/*.md")))])
def test_paths_in_the_text_exist(name: str) -> None:
    words = code_words((ROOT / name).read_text(encoding="utf-8"))
    paths = [word for word in words if word.startswith(OURS) and not re.search(r"[\s*<>{}$]", word)]
    assert not [path for path in paths if not (ROOT / path).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert not [target for target in links(page) if not (page.parent / target).exists()]
