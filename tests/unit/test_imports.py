"""The import rule, checked over every file: imports go one way, and the heavy libraries stay where they belong."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("p2p", "node", "learner", "netem")
MAY_IMPORT = {"p2p": {"p2p"}, "node": {"node", "p2p"}, "learner": {"learner", "p2p"}, "netem": set(PACKAGES)}
OURS = {*PACKAGES, "shoal", "tests"}
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def imports(tree: ast.AST, *, top_level_only: bool = False) -> Iterator[tuple[str, int]]:
    """(dotted module, line) of every import; of those that run when the module is imported, if asked."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or ""), node.lineno
        elif top_level_only and (isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or _type_checking(node)):
            continue
        else:
            yield from imports(node, top_level_only=top_level_only)


def _type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def found(path: Path, **options: bool) -> list[tuple[str, int]]:
    return list(imports(ast.parse(path.read_text(encoding="utf-8"), str(path)), **options))


def offenders(paths: list[Path], bad: set[str], **options: bool) -> list[str]:
    """"file:line imports module" for each import of a top-level package in `bad`."""
    return [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in paths
        for module, line in found(path, **options)
        if module.split(".")[0] in bad
    ]


def test_the_walk_sees_what_it_should() -> None:
    source = "import a.b\nif TYPE_CHECKING:\n    import c\ntry:\n    from d import e\nexcept X: pass\n"
    tree = ast.parse(source + "def f():\n    import g\nclass K:\n    import h\nfrom . import i\n")
    assert [m for m, _ in imports(tree)] == ["a.b", "c", "d", "g", "h", "."]
    assert [m for m, _ in imports(tree, top_level_only=True)] == ["a.b", "d", "h", "."]
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(PACKAGES)
    assert len(FILES) > 60


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_one_way(package: str) -> None:
    files = [path for path in FILES if path.is_relative_to(ROOT / package)]
    assert offenders(files, OURS - MAY_IMPORT[package]) == []


def test_no_relative_imports() -> None:
    """They would slip past the rule above."""
    relative = [f"{path}:{line}" for path in FILES for module, line in found(path) if module.startswith(".")]
    assert relative == []


def test_p2p_knows_no_machine_learning() -> None:
    files = [path for path in FILES if path.is_relative_to(ROOT / "p2p")]
    assert offenders(files, {"torch", "transformers", "safetensors", "tokenizers"}) == []


def test_libp2p_is_imported_in_the_channel_only_and_late() -> None:
    outside = [path for path in FILES if not path.is_relative_to(ROOT / "p2p" / "channel")]
    assert offenders(outside, {"libp2p", "multiaddr"}) == []
    eager = [path for path in FILES if path.name not in ("_stack.py", "_hot.py", "_muxer.py")]
    assert offenders(eager, {"libp2p", "multiaddr"}, top_level_only=True) == []
    stack = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in [*FILES, ROOT / "shoal.py"]
        for module, line in found(path, top_level_only=True)
        if module.endswith(("channel._stack", "channel._hot", "channel._muxer")) and path.name not in ("_stack.py", "_muxer.py")
    ]
    assert stack == []


def test_nothing_unpickles_and_nothing_mixes_event_loops() -> None:
    """But for programs in a process of their own that are asyncio and nothing else: vLLM's own client, the one that calls a
    person's reward function, which may be written for asyncio, as TRL has them, and those that run environments."""
    own_process = {
        "netem/bench/engine/vllm_alone.py", "learner/rewards/function_worker.py", "learner/rewards/judge.py",
        "learner/environments/host_child.py", "learner/environments/verifiers.py", "learner/environments/verifiers_door.py",
        "learner/environments/verifiers_rows.py", "learner/environments/verifiers_stage.py",
    }  # fmt: skip
    paths = [path for path in [*FILES, ROOT / "shoal.py"] if str(path.relative_to(ROOT)) not in own_process]
    assert offenders(paths, {"asyncio"}) == []
    assert offenders([*FILES, ROOT / "shoal.py"], {"pickle", "cloudpickle", "dill", "marshal"}) == []


def test_the_command_line_imports_its_verbs_late() -> None:
    verbs = [ROOT / "learner" / "cli.py", ROOT / "node" / "cli.py", *(ROOT / "netem" / "cli").glob("*.py")]
    found = offenders([ROOT / "shoal.py", *verbs], {*PACKAGES, "trio"}, top_level_only=True)
    assert [line for line in found if not line.endswith("imports netem.cli.flags")] == []  # which imports nothing of ours itself
    assert offenders([ROOT / "netem" / "cli" / "flags.py"], {*PACKAGES, "trio"}) == []


def module_file(name: str) -> Path | None:
    """The file of a module of ours; None when there is none of that name."""
    path = ROOT.joinpath(*name.split("."))
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if file.is_file()), None)


def strings(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(text, line) of every string constant that is no docstring (an expression that stands alone)."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value, node.lineno
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            yield from strings(node)


def named(text: str) -> set[str]:
    """Top-level packages of ours that a string names as a module: the whole string is a dotted name that has a file, or it is
    code that imports one."""
    whole = {text.split(".")[0]} if re.fullmatch(r"\w+(\.\w+)+", text) and module_file(text) else set()
    return (whole | set(re.findall(r"\b(?:import|from)\s+(\w+)", text))) & OURS


def started(path: Path) -> list[tuple[str, int]]:
    """(package, line) of what a file may start as a child process, by the strings in it."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return [(package, line) for text, line in strings(tree) for package in sorted(named(text))]


def test_the_walk_over_strings_sees_what_it_should() -> None:
    source = '"""import netem"""\nA = "netem.demo.run"\nB = ["-c", "import sys; from netem.demo import run"]\n'
    source += 'C = "no.module", "shoal.learner"\n'
    found = [(text, named(text)) for text, _ in strings(ast.parse(source))]
    assert found == [
        ("netem.demo.run", {"netem"}), ("-c", set()), ("import sys; from netem.demo import run", {"netem"}),
        ("no.module", set()), ("shoal.learner", set()),
    ]  # fmt: skip
    assert "learner" in [p for p, _ in started(ROOT / "learner" / "head" / "children.py")], "its trainer"


@pytest.mark.parametrize("package", PACKAGES)
def test_what_may_not_be_imported_may_not_be_started_either(package: str) -> None:
    """But for the command line itself: `shoal` with a verb is what a user could start as well. The learner starts `shoal node`
    so, for its local engine."""
    files = [path for path in FILES if path.is_relative_to(ROOT / package)]
    bad = [f"{path.relative_to(ROOT)}:{line} starts {name}" for path in files for name, line in started(path)
           if name not in MAY_IMPORT[package]]  # fmt: skip
    assert bad == []


def test_our_programs_are_started_by_the_one_helper() -> None:
    """`python -m` stands in p2p/processes.py only: there it is safe from what lies in the current folder."""
    users = {
        path.relative_to(ROOT).as_posix()
        for path in [*FILES, ROOT / "shoal.py"]
        for text, _ in strings(ast.parse(path.read_text(encoding="utf-8")))
        if text == "-m"
    }
    assert users == {"p2p/processes.py"}


def test_folders_of_tests_are_packages() -> None:
    """Else two files of one name, in two folders, are one module to pytest, and one of them is not collected."""
    folders = {path.parent for path in (ROOT / "tests").rglob("test_*.py")}
    assert len(folders) > 5
    assert [str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").exists()] == []
