"""The stated bound on memory: a version of 1 GiB costs source and node less than 300 MiB each, above idle. In `make test` half a
GiB, of which a copy is still too much; one GiB by night."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from netem.bench.node_memory import BOUND, COPIES, SAMPLE_S, Anonymous, anonymous_bytes, describe, measure_memory
from p2p.errors import UsageError
from p2p.limits import GIB, MIB
from tests.support.nightly import NIGHTLY
from tests.support.watchdog import status_of, until

pytestmark = pytest.mark.e2e

PAYLOAD = GIB if NIGHTLY else GIB // 2
"""Bytes of the version: one copy of it is over the bound."""


def test_a_version_larger_than_the_bound(tmp_path: Path) -> None:
    if psutil.virtual_memory().available < 2 * GIB:
        pytest.skip("less than 2 GiB of memory are free")
    if psutil.disk_usage(str(tmp_path)).free < (COPIES + 1) * PAYLOAD:
        pytest.skip(f"less than {(COPIES + 1) * PAYLOAD >> 20} MiB of disk are free")
    result = measure_memory(PAYLOAD, tmp_path)
    assert result["ok"] and result["payload_bytes"] == PAYLOAD > BOUND and result["bound_bytes"] == BOUND == 300 * MIB
    assert set(result["hosts"]) == {"learner", "node-1"}
    for host in result["hosts"].values():
        assert host["idle_bytes"] > 10 * MIB, "a Python process takes some"
        assert 0 < host["above_idle_bytes"] < BOUND, describe(result)
    assert result["samples"] > result["seconds"] / SAMPLE_S / 4, "looked at all the time"
    assert describe(result).endswith("within the bound of 300 MiB") and list(tmp_path.iterdir()) == []


HOG = """
import mmap, sys
m = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
m[::4096] = b"x" * (64 << 8)
sys.stdin.readline()
m.close()
print("down", flush=True)
sys.stdin.readline()
"""


def test_what_is_looked_at() -> None:
    """A peak that is over is remembered; a process that is gone counts nothing."""
    with subprocess.Popen([sys.executable, "-c", HOG], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        anonymous = Anonymous({"hog": process.pid})
        try:
            until("its peak", lambda: anonymous.peak["hog"] >= 64 * MIB)
            print(file=process.stdin, flush=True)
            assert process.stdout.readline() == "down\n"
            assert anonymous.peak["hog"] >= 64 * MIB > anonymous_bytes(process.pid)
            assert anonymous.mark()["hog"] < 64 * MIB
        finally:
            anonymous.stop()
            process.stdin.close()
            status_of(process)
        assert anonymous_bytes(process.pid) == 0


def test_no_room(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="MiB free"):
        measure_memory(1 << 50, tmp_path)
    with pytest.raises(UsageError, match="payload of 0 bytes"):
        measure_memory(0, tmp_path)
