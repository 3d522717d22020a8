"""Child processes: signals, ends, and that they die with whoever started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from p2p.processes import ROOT, child_environment, end, last_line, signal_group, start, wait_or_kill


def test_a_group_is_signalled_and_what_does_not_end_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    process = start([sys.executable, "-c", deaf], stdout=log)
    while not log.exists() or "deaf" not in log.read_text():
        time.sleep(0.02)
    began = time.monotonic()
    end([process], 0.2)
    assert process.returncode == -signal.SIGKILL and time.monotonic() - began < 5
    signal_group(process, signal.SIGTERM)  # it is gone: nothing happens
    assert wait_or_kill(process, 0) == -signal.SIGKILL
    assert last_line(tmp_path / "nothing", log) == "deaf"
    assert last_line(tmp_path / "nothing") == "it said nothing"


STARTER = """
import subprocess, sys, time
from p2p.processes import start
lasting = [sys.executable, "-c", "import time; time.sleep(60)"]
print(start(lasting).pid, start(lasting, own_session=False).pid, start(lasting, outlive=True).pid, flush=True)
time.sleep(60)
"""


def test_a_child_dies_with_its_parent_unless_it_may_outlive_it() -> None:
    with subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, env=child_environment()) as starter:
        try:
            assert starter.stdout is not None
            children = [psutil.Process(int(pid)) for pid in starter.stdout.readline().split()]
            assert [os.getsid(c.pid) == c.pid for c in children] == [True, False, True]
        finally:
            starter.kill()
    psutil.wait_procs(children[:2], timeout=10)
    left = [c for c in children if c.is_running()]
    assert left == children[2:]
    children[2].kill()


HOLES = """
import sys
import torch
from p2p.processes import give_back_what_is_freed, keep_blocks_apart

def held():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) >> 10

if sys.argv[1] == "apart":
    keep_blocks_apart()
del_first = torch.ones(30 << 18)
del del_first  # glibc takes its size for the one below which it keeps blocks
before = held()
blocks = [torch.ones(int(sys.argv[2])) for _ in range(200 * (1 << 18) // int(sys.argv[2]))]
del blocks[:-1]  # the last one is on top of them
if sys.argv[1] == "back":
    give_back_what_is_freed()
print(held() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's")
def test_what_is_freed_below_a_block_that_stays_is_given_back() -> None:
    def left(how: str, values: int) -> int:
        command = [sys.executable, "-c", HOLES, how, str(values)]
        return int(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout)

    small, large = 1 << 18, 1 << 19  # float32 values: 1 MiB and 2 MiB
    found = {how: left(*how) for how in (("kept", small), ("back", small), ("kept", large), ("apart", large))}
    assert found["kept", small] > 150 and found["kept", large] > 150, f"MiB held after 200 were freed but for one: {found}"
    assert found["back", small] < 20 and found["apart", large] < 20, f"MiB held after 200 were freed but for one: {found}"
