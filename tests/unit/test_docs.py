"""What the pages say of the tree is there: links lead to files, code paths exist, the glossary's names are where it says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from learner.status.catalogue import entries

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path
    for pattern in ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "bench/*.md")
    for path in ROOT.glob(pattern)
)
GLOSSARY = ROOT / "docs" / "glossary.md"

LINK = re.compile(r"\[[^\]]*\]\(([^()\s]+)\)")
QUOTED = re.compile(r"`([^`\n]+)`")
CODE_PATH = re.compile(r"(?:p2p|node|learner|netem|tests)/[\w./-]*")
"""A path into the code, whole: file, folder, or module without its `.py`."""
METRIC_KEYS = {entry.key for entry in entries()}
"""Some begin as a folder's name does."""


def without_fences(text: str) -> str:
    """The page without its fenced blocks, in which brackets and paths are examples."""
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def links(text: str) -> Iterator[str]:
    """Targets of relative links, with their anchors."""
    for target in LINK.findall(without_fences(text)):
        if not re.match(r"[a-z][a-z0-9+.-]*:", target):
            yield target


def anchor_of(heading: str) -> str:
    """The anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {anchor_of(h) for h in re.findall(r"^#+ (.+)$", without_fences(page.read_text(encoding="utf-8")), re.MULTILINE)}


def code_paths(text: str) -> Iterator[str]:
    """Paths into the code that stand alone in backticks."""
    for quoted in QUOTED.findall(without_fences(text)):
        if CODE_PATH.fullmatch(quoted) and quoted not in METRIC_KEYS:
            yield quoted


def located(path: str) -> Path | None:
    """The file or folder that a code path names; None when there is none."""
    for candidate in (ROOT / path, ROOT / f"{path}.py"):
        if candidate.exists():
            return candidate
    return None


@cache
def names_in(path: Path) -> frozenset[str]:
    """What a file, or the files under a folder, define at the top level: classes, functions, constants."""
    names: set[str] = set()
    for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
        for node in ast.parse(file.read_text(encoding="utf-8"), str(file)).body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                names.add(node.name)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names.update(n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name))
    return frozenset(names)


def glossary_rows(text: str) -> Iterator[tuple[str, str]]:
    """(word, its "where" column) of every row."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and len(cells) == 4 and cells[0] != "word" and not set(cells[0]) <= {"-"}:
            yield cells[0], cells[2]


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def test_the_readers_see_what_they_should() -> None:
    text = "[a](b.md) [c](https://d.e) [f](g.md#h-i) `p2p/x.py` `shoal netem run p2p/y` `learner/z`\n"
    text += "```\n[n](no.md) `p2p/no.py`\n```\n"
    assert list(links(text)) == ["b.md", "g.md#h-i"]
    assert list(code_paths(text)) == ["p2p/x.py", "learner/z"]
    assert anchor_of("New weights, while a sequence runs") == "new-weights-while-a-sequence-runs"
    assert located("tests/unit/test_docs") == Path(__file__) and located("p2p/broadcast/") is not None
    assert located("p2p/no_such_file.py") is None
    assert {"ROOT", "names_in"} <= names_in(Path(__file__))
    table = "| word | meaning | where | in the papers |\n|---|---|---|---|\n| a | b | `c` | d |\n"
    assert list(glossary_rows(table)) == [("a", "`c`")]
    assert ROOT / "README.md" in PAGES and GLOSSARY in PAGES


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_relative_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in links(page.read_text(encoding="utf-8")):
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_code_paths_exist(page: Path) -> None:
    assert not [path for path in code_paths(page.read_text(encoding="utf-8")) if located(path) is None]


def test_the_glossary_names_what_is_there() -> None:
    wrong = []
    rows = list(glossary_rows(GLOSSARY.read_text(encoding="utf-8")))
    assert len(rows) > 80
    for word, where in rows:
        path: Path | None = None
        for quoted in QUOTED.findall(where):
            if CODE_PATH.fullmatch(quoted):
                path = located(quoted)
                if path is None:
                    wrong.append(f"{word}: no {quoted}")
            elif path is not None and quoted not in names_in(path):
                wrong.append(f"{word}: {path.relative_to(ROOT)} defines no {quoted}")
        if path is None and where != "reserved, not built":
            wrong.append(f"{word}: says nowhere")
    assert not wrong


def test_words_are_there_once() -> None:
    words = [word for word, _ in glossary_rows(GLOSSARY.read_text(encoding="utf-8"))]
    assert len(words) == len(set(words))
