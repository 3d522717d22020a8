"""The layout rules hold over the whole tree, and the finders see what breaks them. `make layout` prints what they find."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support.layout import (
    ROOT,
    Module,
    arrows_up,
    bare_constants,
    circles,
    code_lines,
    crowded_calls,
    duplicate_classes,
    findings,
    import_graph,
    long_modules,
    read_modules,
    undocumented,
)

MODULES = read_modules()
FOUND = findings(MODULES)


@pytest.mark.parametrize("rule", FOUND)
def test_the_tree_keeps_the_rule(rule: str) -> None:
    assert FOUND[rule] == []


def module(name: str, source: str) -> Module:
    return Module(name, ROOT / Path(*name.split(".")).with_suffix(".py"), source, ast.parse(source))


def tree(**sources: str) -> dict[str, Module]:
    return {(dotted := name.replace("__", ".")): module(dotted, source) for name, source in sources.items()}


def test_the_whole_tree_is_read() -> None:
    assert len(MODULES) > 200 and "p2p.broadcast.session" in MODULES and "learner.head" in MODULES
    assert "p2p.errors" in import_graph(MODULES)["learner.config"]


def test_a_hidden_circle_is_a_circle() -> None:
    late = tree(p2p__a="from p2p import b", p2p__b="def f():\n    from p2p.a import x")
    typed = tree(p2p__a="import p2p.b", p2p__b="if TYPE_CHECKING:\n    import p2p.a")
    for modules in (late, typed):
        assert [sorted(found) for found in circles(import_graph(modules))] == [["p2p.a", "p2p.b"]]
    assert circles({1: {2}, 2: {3}, 3: set()}) == []


def test_an_arrow_up_is_seen_where_no_module_is_in_a_circle() -> None:
    modules = tree(p2p__low__a="", p2p__low__b="import p2p.high.c", p2p__high__c="import p2p.low.a")
    assert circles(import_graph(modules)) == [] and arrows_up(import_graph(modules)) == ["p2p: high, low"]
    assert arrows_up({"p2p.low": {"p2p.low.a"}, "p2p.low.a": {"p2p.low"}}) == []  # a folder's own __init__


def test_names_lengths_constants_and_calls_are_seen() -> None:
    assert duplicate_classes(tree(p2p__a="class A: pass\nclass _B: pass", node__a="class A: pass\nclass _B: pass")) == [
        "A: p2p/a.py, node/a.py"
    ]
    assert long_modules(tree(p2p__a="x = 1\n" * 401)) == ["p2p/a.py: 401 lines"]
    assert long_modules(tree(p2p__a='"""A.\n\nOne room: it is one.\n"""\n' + "x = 1\n" * 401)) == []
    said = 'A = 1\n"""s, why"""\nB, C = 2, 3\nD = -4\n"""Both, why."""\nE = 5  # why\n# why\nF = 6\n'
    assert bare_constants(tree(p2p__a=said)) == []
    assert bare_constants(tree(p2p__a="A = 1\n\nB = 2 * A\n")) == ["p2p/a.py:1 A", "p2p/a.py:3 B"]
    assert crowded_calls(tree(p2p__a="f(1, 2, 3, 4, 5)\nf(1, 2, 3, 4, 5, 6)\nmax(1, 2, 3, 4, 5, 6)\n")) == ["p2p/a.py:2 f: 6"]


def test_functions_without_a_word_and_lines_of_code_are_counted() -> None:
    long = "def f():\n    a = 1\n    b = 2\n    c = 3\n    return a\n"
    assert undocumented(tree(p2p__a=long)) == ["p2p/a.py:1 f"]
    assert undocumented(tree(p2p__a=long.replace("def f", "def _f") + "def g():\n    return 1\n")) == []
    assert code_lines(tree(p2p__a='"""Doc.\n\nMore."""\n\n# why\nx = (1,\n     2)\n')) == 2
