"""Learners and nodes of end-to-end tests, forked from a parent that has imported torch: each is the program as ever, a process of
its own."""

from __future__ import annotations

from netem.processes.children import Children, LoggedProcess, ModuleStarter, start_module
from netem.processes.forked import fork_module

CHEATING = "tests.support.cheating_node"
LEARNER = "tests.support.warm_learner"


class WithWarmParts(Children):
    """A node and its engine would take some four seconds of CPU each to import torch and transformers, a learner, its trainer
    and its auditor as much again, which is most of what many tests do. What starts as users start it: what has a `starter` of its
    own, all of `tests/e2e/test_cli.py`, verbs other than `node` and `learner`, and all that `shoal demo` starts."""

    def start(self, name: str, *arguments: str, module: str = "shoal", starter: ModuleStarter | None = None) -> LoggedProcess:
        warm = module == CHEATING or (module == "shoal" and arguments[:1] in (("node",), ("learner",)))
        if starter is None and warm and arguments[:1] == ("learner",):
            module = LEARNER
        return super().start(name, *arguments, module=module, starter=starter or (fork_module if warm else start_module))
