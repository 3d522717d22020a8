"""Whose turn it is on a machine that plays many: engines compute when nobody else wants to. Needs root."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from netem.processes.engines import engines_of

LAST = 19
"""The niceness of who comes last."""

_AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")
"""Where the kernel says whether each session gets the same share of the processor: niceness then counts within one alone."""


@contextmanager
def behind_all_others() -> Iterator[None]:
    """While it lasts niceness counts between all processes of the machine."""
    before = _AUTOGROUP.read_text() if _AUTOGROUP.exists() else ""
    try:
        if before:
            _AUTOGROUP.write_text("0")
        yield
    finally:
        if before:
            _AUTOGROUP.write_text(before)


def give_way(nodes: Iterable[int]) -> int:
    """Put the engines of these node processes last, with all their threads. How many there are."""
    engines = engines_of(nodes)
    for engine in engines:
        for thread in engine.threads():
            with suppress(ProcessLookupError):  # it ended meanwhile
                os.setpriority(os.PRIO_PROCESS, thread.id, LAST)
    return len(engines)
