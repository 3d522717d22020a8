"""What the layout rules find in the tree: `python -m tests.support.layout` prints it, tests/unit/test_layout.py asserts it.

The rules: no circle of imports, in any of the four packages or across them; no arrow up, which is: for each folder, the graph
whose vertices are its direct children (files and folders) has no cycle; no public class name twice; no module above MAX_LINES
without a sentence why; every constant has a sentence; no call with more than MAX_POSITIONAL positional arguments; tests reach for
public names. Imports that are late, or for type checkers only, count as imports: a circle that is hidden is a circle.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("p2p", "node", "learner", "netem")
MAX_LINES = 400
"""Lines of a module that a reader can hold. A longer one says why it is one room, in a paragraph of its docstring that begins
with WHY_LONG."""
WHY_LONG = "One room:"
MAX_POSITIONAL = 5
"""Positional arguments of a call that a reader can tell apart."""

T = TypeVar("T", bound=Hashable)
Graph = Mapping[T, set[T]]


@dataclass(frozen=True)
class Module:
    name: str
    path: Path
    source: str
    tree: ast.Module = field(repr=False)

    @property
    def where(self) -> str:
        return str(self.path.relative_to(ROOT))


def read_modules(root: Path = ROOT) -> dict[str, Module]:
    """Every module of the four packages, by dotted name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            source = path.read_text(encoding="utf-8")
            found[name] = Module(name, path, source, ast.parse(source, str(path)))
    return found


def import_graph(modules: Mapping[str, Module]) -> dict[str, set[str]]:
    """Module -> the modules of ours that it imports, anywhere in its text."""
    graph: dict[str, set[str]] = {}
    for name, module in modules.items():
        targets = set()
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names if alias.name in modules}
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    targets |= {inner} if inner in modules else {node.module} & modules.keys()
        graph[name] = targets - {name}
    return graph


def circles(graph: Graph[T]) -> list[list[T]]:
    """The strongly connected components of more than one vertex (Tarjan 1972)."""
    index: dict[T, int] = {}
    low: dict[T, int] = {}
    stack: list[T] = []
    found: list[list[T]] = []

    def visit(vertex: T) -> None:
        index[vertex] = low[vertex] = len(index)
        stack.append(vertex)
        for other in graph.get(vertex, ()):
            if other not in index:
                visit(other)
                low[vertex] = min(low[vertex], low[other])
            elif other in stack:
                low[vertex] = min(low[vertex], index[other])
        if low[vertex] == index[vertex]:
            component = []
            while not component or component[-1] != vertex:
                component.append(stack.pop())
            if len(component) > 1:
                found.append(component)

    for vertex in graph:
        if vertex not in index:
            visit(vertex)
    return found


def arrows_up(graph: Graph[str]) -> list[str]:
    """Folders whose children import each other in a cycle, and those children."""
    inside: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for source, targets in graph.items():
        for target in targets:
            a, b = source.split("."), target.split(".")
            shared = 0
            while shared < min(len(a), len(b)) and a[shared] == b[shared]:
                shared += 1
            if shared < len(a) and shared < len(b):  # a folder's own __init__ is no child of it
                inside[".".join(a[:shared])][a[shared]].add(b[shared])
    return [
        f"{folder or 'the top'}: {', '.join(sorted(found))}"
        for folder, children in inside.items()
        for found in circles(children)
    ]


def duplicate_classes(modules: Mapping[str, Module]) -> list[str]:
    """Public top-level classes whose name stands in more than one module."""
    places: dict[str, list[str]] = defaultdict(list)
    for module in modules.values():
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module.where)
    return [f"{name}: {', '.join(where)}" for name, where in sorted(places.items()) if len(where) > 1]


def long_modules(modules: Mapping[str, Module]) -> list[str]:
    """Modules above MAX_LINES that do not say why."""
    return [
        f"{module.where}: {lines} lines"
        for module in modules.values()
        if (lines := module.source.count("\n")) > MAX_LINES
        and not any(line.startswith(WHY_LONG) for line in (ast.get_docstring(module.tree) or "").splitlines())
    ]


def bare_constants(modules: Mapping[str, Module]) -> list[str]:
    """Numbers under a name in capitals, at the top of a module, without a sentence: a docstring right below (it may serve several
    in a row) or a comment above or beside."""
    found = []
    for module in modules.values():
        lines = module.source.splitlines()
        body = module.tree.body
        for i, node in enumerate(body):
            names = _constant_names(node)
            if not names or _explained(body, i) or "  # " in lines[node.lineno - 1] or lines[node.lineno - 2].startswith("#"):
                continue
            found.append(f"{module.where}:{node.lineno} {', '.join(names)}")
    return found


def _constant_names(node: ast.stmt) -> list[str]:
    if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None or not _is_number(node.value):
        return []
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    names = [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]
    return [name for name in names if name.lstrip("_").isupper()]


def _is_number(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, (int, float)) and not isinstance(node.value, bool)
    if isinstance(node, ast.BinOp):
        return _is_number(node.left) or _is_number(node.right)
    if isinstance(node, ast.Tuple):
        return any(map(_is_number, node.elts))
    return isinstance(node, ast.UnaryOp) and _is_number(node.operand)


def _explained(body: list[ast.stmt], i: int) -> bool:
    """A string right after this statement, or after the run of constants that it belongs to."""
    while i + 1 < len(body) and _constant_names(body[i + 1]) and body[i + 1].lineno == (body[i].end_lineno or 0) + 1:
        i += 1
    after = body[i + 1] if i + 1 < len(body) else None
    return isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)


def crowded_calls(modules: Mapping[str, Module]) -> list[str]:
    """Calls with more than MAX_POSITIONAL positional arguments. Functions that take any number of equals do not count."""
    return [
        f"{module.where}:{node.lineno} {ast.unparse(node.func)}: {len(node.args)}"
        for module in modules.values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        and len(node.args) > MAX_POSITIONAL
        and not any(isinstance(a, ast.Starred) for a in node.args)
        and not _is_variadic(node.func)
    ]


VARIADIC = {
    "join", "joinpath", "max", "min", "print", "debug", "info", "warning", "error", "pack", "zip", "chain", "add_row", "mix",
    "_ip", "_tc", "call", "start",
}  # fmt: skip
"""Last names of functions that take any number of equals: a row, a path, fields of a log line, a seed's numbers, the words of a
command line (`_ip`, `_tc` and `call` of netem/emulation, `start` of a child process)."""


def _is_variadic(func: ast.expr) -> bool:
    name = func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""
    return name in VARIADIC


def public_functions(modules: Mapping[str, Module]) -> Iterator[tuple[Module, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Public functions and methods of public classes."""
    for module in modules.values():
        for node in module.tree.body:
            inner: Iterable[ast.stmt] = [node]
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                inner = node.body
            for function in inner:
                if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) and not function.name.startswith("_"):
                    yield module, function


def bare_tuples(modules: Mapping[str, Module]) -> list[str]:
    """Public functions that return a tuple of several things without a name."""
    found = []
    for module, function in public_functions(modules):
        text = ast.unparse(function.returns) if function.returns is not None else ""
        if text.startswith("tuple[") and not text.endswith("...]"):
            found.append(f"{module.where}:{function.lineno} {function.name} -> {text}")
    return found


def undocumented(modules: Mapping[str, Module]) -> list[str]:
    """Public functions of more than SHORT statements without a docstring. Shorter ones may speak for themselves."""
    return [
        f"{module.where}:{function.lineno} {function.name}"
        for module, function in public_functions(modules)
        if not ast.get_docstring(function) and sum(isinstance(n, ast.stmt) for n in ast.walk(function)) - 1 > SHORT
    ]


SHORT = 3
"""Statements of a function whose name and types may say all there is to say."""


def private_access(root: Path = ROOT) -> list[str]:
    """Places in the tests that reach for a private name of production (`thing._name`, or a text that names one to be replaced)
    without a reason beside it: a comment on the line, or on the line above."""
    found = []
    for path in sorted((root / "tests").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source, str(path))):
            if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.startswith("__"):
                continue
            if node.attr in STANDARD_PRIVATE or (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                continue
            line, above = lines[node.lineno - 1], lines[node.lineno - 2].strip()
            if "  # " not in line and not above.startswith("#"):
                found.append(f"{path.relative_to(root)}:{node.lineno} {ast.unparse(node)[:60]}")
    return sorted(set(found))


STANDARD_PRIVATE = {"_exit", "_replace", "_asdict", "_fields"}
"""Names of the standard library that begin with an underscore and are public all the same."""


def code_lines(modules: Mapping[str, Module]) -> int:
    """Lines that hold code: no blank ones, comments or docstrings."""
    total = 0
    for module in modules.values():
        prose: set[int] = set()
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                prose |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
        held: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(module.source).readline):
            if token.type not in skipped:
                held |= set(range(token.start[0], token.end[0] + 1))
        total += len(held - prose)
    return total


def findings(modules: Mapping[str, Module]) -> dict[str, list[str]]:
    """Rule -> what breaks it."""
    graph = import_graph(modules)
    return {
        "circles of imports": [" ".join(sorted(found)) for found in circles(graph)],
        "arrows up": arrows_up(graph),
        "public class names that stand twice": duplicate_classes(modules),
        f"modules above {MAX_LINES} lines without a sentence why": long_modules(modules),
        "constants without a sentence": bare_constants(modules),
        f"calls with more than {MAX_POSITIONAL} positional arguments": crowded_calls(modules),
        "public functions that return a tuple without a name": bare_tuples(modules),
        f"public functions of more than {SHORT} statements without a docstring": undocumented(modules),
        "private names that tests reach for without a reason": private_access(),
    }


def main() -> int:
    """Print what is found; 0 when that is nothing."""
    sys.setrecursionlimit(10_000)
    modules = read_modules()
    found = findings(modules)
    lines = sum(module.source.count("\n") for module in modules.values())
    print(f"{len(modules)} modules, {lines} lines, {code_lines(modules)} of them code")
    for rule, places in found.items():
        print(f"{rule}: {len(places) or 'none'}")
        for place in places:
            print(f"  {place}")
    return 1 if any(found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
