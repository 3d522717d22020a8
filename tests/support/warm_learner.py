"""`shoal learner` in a fork of the warm parent, with its trainer and its auditor as forks of its own."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from learner.head import auditor_process, children
from netem.processes.forked import ForkedProcess, leave
from p2p.processes import Process, start

WARM = ("learner.trainer.trainer", "learner.audit.auditor")
"""The modules of a learner's programs that import torch, and nothing that a fork of a running head would disturb."""


def main() -> int:
    """Run `shoal` with our own arguments."""
    for module in WARM:
        import_module(module)
    children.start = auditor_process.start = start_warm  # type: ignore[attr-defined, assignment]
    return int(import_module("shoal").main(sys.argv[1:]))


def start_warm(command: Sequence[str], *, stdout: Path, stderr: int, pass_fds: Sequence[int] = ()) -> Process:
    """See `p2p.processes.start`, which starts what is not in WARM. To be called by the head's main thread."""
    python, _, _, module, *arguments = command  # as `python_command` makes it
    if python != sys.executable or module not in WARM:
        return start(command, stdout=stdout, stderr=stderr, pass_fds=pass_fds)
    stdout.touch()  # whoever reads what it says may do so at once
    fork = multiprocessing.get_context("fork")
    return ForkedProcess(fork.Process(target=_run, args=(module, arguments, stdout, tuple(pass_fds)), daemon=True))


def _run(module: str, arguments: list[str], out: Path, kept: tuple[int, ...]) -> None:
    """In the fork: `python -m MODULE ARGUMENTS` with its own session, both outputs in `out`, and of the head's files `kept`."""
    leave(kept)
    os.setsid()
    opened = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for fd in (1, 2):
        os.dup2(opened, fd)
    os.close(opened)
    sys.argv = [module, *arguments]
    program: Any = import_module(module)
    sys.exit(program.main())


if __name__ == "__main__":
    sys.exit(main())
