"""Programs of `examples/` as a user starts them, each in a process of its own."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from netem.processes.children import MODEST, Children
from p2p.processes import Process, child_environment, start

EXAMPLES = Path(__file__).parents[2] / "examples"


def start_example(shoal: Children, script: str, name: str, *arguments: str) -> Process:
    """`python examples/SCRIPT ARGUMENTS`. What it prints goes to NAME.out in the folder of `shoal`, which ends it."""
    process = start(
        [sys.executable, str(EXAMPLES / script), *arguments], stdout=shoal.folder / f"{name}.out", stderr=subprocess.STDOUT,
        environment=child_environment(MODEST),
    )  # fmt: skip
    shoal.all.append(process)
    return process


def ours(script: str) -> set[str]:
    """What of ours an example imports."""
    imported = {
        name
        for node in ast.walk(ast.parse((EXAMPLES / script).read_text()))
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in getattr(node, "names", ())])
        if isinstance(node, (ast.Import, ast.ImportFrom)) and name
    }
    return {name for name in imported if name.split(".")[0] in ("p2p", "node", "learner", "netem", "shoal", "tests")}
