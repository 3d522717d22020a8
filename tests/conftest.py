"""For all tests: programs that they start can be interrupted, however the suite itself was started; what hypothesis prints."""

from __future__ import annotations

import signal
from typing import Any

import hypothesis
import pytest
from xdist.scheduler.loadscope import LoadScopeScheduling

from p2p import complaints

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts a script's background jobs; children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A failure is to be had again from its output alone, on any machine: the blob goes into @reproduce_failure.
hypothesis.settings.register_profile("shoal", print_blob=True, deadline=None)
hypothesis.settings.load_profile("shoal")


@pytest.fixture(autouse=True)
def _all_complaints() -> None:
    """What an earlier test said of a peer of the same name keeps no line of this one back."""
    complaints.forget()


KEPT_TOGETHER = ("tests/wan/", "tests/e2e/test_metrics.py", "tests/e2e/test_endpoint_run.py")
"""Beginnings of the names of tests that one worker runs, one after the other: emulated networks share the kernel's, and the tests
of the metrics and those of the endpoint share a run that takes long to start."""


class OneByOne(LoadScopeScheduling):
    """Hands out tests one by one to whichever worker is free, but for those in KEPT_TOGETHER."""

    def _split_scope(self, nodeid: str) -> str:
        return next((kept for kept in KEPT_TOGETHER if nodeid.startswith(kept)), nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    """For --dist loadscope; other ways of xdist are left alone. (Its own loadgroup finds no groups with pytest 9.2.)"""
    return OneByOne(config, log) if config.getvalue("dist") == "loadscope" else None
