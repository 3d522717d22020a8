"""Forks as processes: how they end, what they take along, and that none outlives whoever started them."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from netem.processes.children import wait_for
from netem.processes.forked import ForkedProcess, fork_module, warm_up
from p2p.processes import child_environment

AT_ONCE_S = 1.0
"""What a fork may take at most where a start takes several seconds; a machine of two busy cores takes a tenth of it."""


def fork(target: Callable[[], object]) -> ForkedProcess:
    return ForkedProcess(multiprocessing.get_context("fork").Process(target=target))


def fails() -> None:
    raise ValueError("on purpose")


def test_the_status_is_how_it_ended(capfd: pytest.CaptureFixture[str]) -> None:
    assert fork(lambda: sys.exit(4)).wait(10) == 4
    assert fork(lambda: None).wait() == 0
    assert fork(fails).wait(10) == 1 and "on purpose" in capfd.readouterr().err


def test_it_can_be_killed_and_waited_for() -> None:
    process = fork(lambda: time.sleep(60))
    assert process.poll() is None and process.returncode is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.05)
    process.kill()
    assert process.wait(10) == process.poll() == process.returncode == -signal.SIGKILL
    process.kill()  # it is gone already: nothing happens, to nobody else either


def test_a_forked_module_is_a_process_of_its_own(tmp_path: Path) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    warm_up()
    began = time.monotonic()
    process = fork_module("tests.support.forked_probe", ["a", "7"], out, log)
    assert out.exists() and log.exists(), "may be read at once"
    assert process.wait(10) == 7
    assert time.monotonic() - began < AT_ONCE_S
    said = out.read_text().split()
    assert said == ["a", "True", str(process.pid), str(process.pid)], "argument, engine warm, own session and group"
    assert "leaving" in log.read_text()


def test_what_a_node_has_set_holds_in_its_forked_engine(tmp_path: Path) -> None:
    """So the bench's cheats are cheats: loaded anew, its engine would be an honest one."""
    out, log, made = tmp_path / "out", tmp_path / "log", tmp_path / "made"
    warm_up()
    assert fork_module("tests.support.rogue_probe", [str(made)], out, log).wait(60) == 0, log.read_text()
    kind, engine, parent = made.read_text().split()
    assert kind == "fake" and parent == out.read_text().strip() != engine


DEMO = """
import sys, time
from pathlib import Path
from netem.processes.children import wait_for
from netem.processes.forked import fork_module
if __name__ == "__main__":
    here = Path(sys.argv[1])
    print(fork_module("http.server", ["0", "--bind", "127.0.0.1"], here / "out", here / "log").pid, flush=True)
    time.sleep(60)
"""


def test_all_forks_die_with_a_killed_starter(tmp_path: Path) -> None:
    (tmp_path / "demo.py").write_text(DEMO)
    command = [sys.executable, "-P", str(tmp_path / "demo.py"), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=child_environment()) as demo:
        try:
            assert demo.stdout is not None
            node = psutil.Process(int(demo.stdout.readline()))
            wait_for("the fork to serve", lambda: (tmp_path / "out").exists())
            left = psutil.Process(demo.pid).children(recursive=True)
            assert node in left and len(left) >= 2, "the warm parent and the fork"
        finally:
            demo.kill()
    psutil.wait_procs(left, timeout=10)
    assert [p for p in left if p.is_running()] == []
