"""Forks as processes: how they end, and that they take nothing of their parent's with them."""

from __future__ import annotations

import signal
import sys
import time

import pytest

from netem.demo.forked import ForkedProcess


def fails() -> int:
    raise ValueError("on purpose")


def leaves() -> int:
    sys.exit(4)


def test_the_status_is_what_run_returned_or_how_it_ended(capfd) -> None:
    assert ForkedProcess(lambda: 3).wait() == 3
    assert ForkedProcess(leaves).wait(10) == 4
    assert ForkedProcess(fails).wait(10) == 1 and "on purpose" in capfd.readouterr().err


def test_it_can_be_killed_and_waited_for() -> None:
    process = ForkedProcess(lambda: time.sleep(60) or 0)
    assert process.poll() is None
    with pytest.raises(TimeoutError):
        process.wait(0.05)
    process.kill()
    assert process.wait(10) == process.poll() == -signal.SIGKILL
    process.kill()  # it is gone already: nothing happens, to nobody else either


def test_a_handler_of_the_parent_is_not_the_childs() -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        process = ForkedProcess(lambda: time.sleep(60) or 0)
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == -signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)
