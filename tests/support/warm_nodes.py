"""Nodes of end-to-end tests, forked from a parent that has imported torch: each is `shoal node` as ever, a process of its own."""

from __future__ import annotations

from netem.processes.children import Children, LoggedProcess, ModuleStarter, start_module
from netem.processes.forked import fork_module

CHEATING = "tests.support.cheating_node"


class WithWarmNodes(Children):
    """Learners and all else are started as a user starts them. A node and its engine would take some four seconds of CPU each to
    import torch and transformers, which is most of what many tests do. Nodes that start as users start them: those with a
    `starter` of their own, all of `tests/e2e/test_cli.py`, and those of `shoal demo`."""

    def start(self, name: str, *arguments: str, module: str = "shoal", starter: ModuleStarter | None = None) -> LoggedProcess:
        warm = module == CHEATING or arguments[:1] == ("node",)
        return super().start(name, *arguments, module=module, starter=starter or (fork_module if warm else start_module))
