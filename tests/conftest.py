"""For all tests: programs that they start can be interrupted, however the suite itself was started; what hypothesis prints."""

from __future__ import annotations

import signal
from typing import Any

import hypothesis
import pytest
from xdist.scheduler.loadscope import LoadScopeScheduling

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts a script's background jobs; children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A failure is to be had again from its output alone, on any machine: the blob goes into @reproduce_failure.
hypothesis.settings.register_profile("shoal", print_blob=True, deadline=None)
hypothesis.settings.load_profile("shoal")


class NetworksInOneWorker(LoadScopeScheduling):
    """Emulated networks share the kernel's: one of them after the other, in one worker. Every other test is on its own."""

    def _split_scope(self, nodeid: str) -> str:
        return "networks" if nodeid.startswith("tests/wan/") else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    """For --dist loadscope; other ways of xdist are left alone. (Its own loadgroup finds no groups with pytest 9.2.)"""
    return NetworksInOneWorker(config, log) if config.getvalue("dist") == "loadscope" else None
