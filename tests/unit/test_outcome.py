"""What a person sees of a run never ends it, nor spoils it once it is finished."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from rich.console import Console

from learner.service import announce_ready, keep_telling
from learner.status.live import LiveView
from learner.status.outcome import RunConsole, summary_lines
from learner.status.run_state import RunState
from learner.status.steps import RECENT

READY = {"run": "00aa", "run_dir": "r", "status_port": 1, "ticket": "t"}


def status_of(step: int) -> dict[str, Any]:
    return {"run": "00aa", "step": step, "steps": 9, "recent": [{"step": s, "reward": 0.5} for s in range(1, step + 1)]}


@pytest.fixture
def stderr() -> Iterator[io.StringIO]:
    """What a terminal shows of the log."""
    root, said, level = logging.getLogger(), io.StringIO(), logging.getLogger("shoal").level
    handler = logging.StreamHandler(said)
    root.addHandler(handler)
    logging.getLogger("shoal").setLevel(logging.INFO)
    yield said
    root.removeHandler(handler)
    logging.getLogger("shoal").setLevel(level)


def raising(error: Exception) -> Any:
    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


@pytest.mark.parametrize("where", ["write_report", "summary_lines"])
@pytest.mark.parametrize("error", [ValueError("no such scale"), OverflowError("too large")])
def test_a_finished_run_is_whole_without_report_or_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO, where: str, error: Exception
) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    monkeypatch.setattr(f"learner.status.outcome.{where}", raising(error))
    with RunConsole(tmp_path, page=True) as console:
        result = console.end(status_of(3))
    assert result["step"] == 3 and ("report.html" in result["report"]) == (where == "summary_lines")
    assert str(error) in stderr.getvalue()


@pytest.mark.parametrize("what", [(LiveView, "update"), (RunState, "of")])
def test_a_finished_run_is_whole_where_its_last_state_cannot_be_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO, what: tuple[type, str]
) -> None:
    with RunConsole(tmp_path, page=False) as console:
        console.hear("ready", READY)
        monkeypatch.setattr(*what, raising(OverflowError("too large")))
        assert console.end(status_of(3))["step"] == 3
    assert "too large" in stderr.getvalue()


def test_where_the_page_fails_plain_lines_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO
) -> None:
    (tmp_path / "logs").mkdir()
    terminal = Console(file=io.StringIO(), force_terminal=True, width=80, height=24)
    monkeypatch.setattr("learner.status.live.Console", lambda: terminal)
    with RunConsole(tmp_path, page=True) as console:
        console.hear("ready", READY)
        console.hear("status", status_of(1))
        assert "step 1" not in stderr.getvalue()  # a page has it
        monkeypatch.setattr("learner.status.live.live_page", raising(ZeroDivisionError("no width")))
        console.hear("status", status_of(2))
        assert "the live view ended" in stderr.getvalue() and "no width" in stderr.getvalue()
        console.hear("status", status_of(4))
        assert "step 4 of 9" in stderr.getvalue()


@pytest.mark.parametrize("broken", ["status", "announce"])
async def test_what_cannot_be_told_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    monkeypatch.setattr("learner.service.MOST_TELL_S", 0.01)
    calls: list[int] = []

    def status() -> dict[str, Any]:
        calls.append(1)
        if len(told) == 2:
            scope.cancel()
        if broken == "status" and len(calls) < 3:
            raise KeyError("a node")
        return {"calls": len(calls)}

    told: list[Any] = []

    def announce(event: str, facts: dict[str, Any]) -> None:
        if broken == "announce" and len(calls) < 3:
            raise KeyError("a node")
        told.append(facts["calls"])

    with trio.fail_after(60), trio.CancelScope() as scope:
        await keep_telling(announce, status)
    assert told[:2] == [3, 4]
    assert len(caplog.messages) == 1 and "goes on" in caplog.messages[0]


def test_a_closed_stdout_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    monkeypatch.setattr("learner.status.outcome.say_on_stdout", raising(BrokenPipeError(32, "Broken pipe")))
    with RunConsole(tmp_path, page=True) as console:
        console.hear("ready", READY)
        console.hear("status", status_of(1))
        assert console.end(status_of(3))["step"] == 3
    said = stderr.getvalue()
    assert said.count("stdout cannot be written to") == 1 and "step 1" in said and "Traceback" not in said


def test_whoever_cannot_be_told_that_nodes_can_join_ends_no_run(stderr: io.StringIO) -> None:
    announce_ready(raising(RuntimeError("deaf")), READY)
    assert "deaf" in stderr.getvalue() and "r/ticket.txt" in stderr.getvalue()


def test_the_summary_of_a_resumed_run_says_whose_seconds_they_are() -> None:
    first, second = (RunState.of({**status_of(3), "seconds": 61.0, "epoch": epoch}) for epoch in (1, 2))
    assert summary_lines(first, Path("r"), "")[0] == "\nfinished: 3 steps in 1 min 01 s"
    assert summary_lines(second, Path("r"), "")[0] == "\nfinished: 3 steps, 1 min 01 s in this life (epoch 2)"


class Logged:
    """A trainer that logs a step every fifth of a second."""

    def __init__(self) -> None:
        self.logged, self.news = 0, trio.Event()

    async def run(self, steps: int) -> None:
        for _ in range(steps):
            await trio.sleep(0.2)
            self.logged += 1
            self.news.set()
            self.news = trio.Event()


@pytest.mark.parametrize(("cost_s", "most"), [(0.0, 1), (0.5, RECENT // 2 + 3)])
async def test_each_step_is_told_before_the_state_forgets_it(
    mock_clock: trio.testing.MockClock, cost_s: float, most: int
) -> None:
    """With a view that costs little each by itself; with one that takes its time several at once."""
    mock_clock.autojump_threshold = 0.01
    trainer, told = Logged(), list[int]()

    def status() -> dict[str, Any]:
        mock_clock.jump(cost_s)
        return {"step": trainer.logged}

    with trio.move_on_after(1000):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_telling, lambda _, values: told.append(values["step"]), status, trainer)
            await trainer.run(100)
            await trio.sleep(30)
            nursery.cancel_scope.cancel()
    assert told[0] == 0 and told[-1] == 100 and max(b - a for a, b in pairwise(told)) <= most
