"""learner/status: the live page, the plain lines, and the log lines beside them."""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from learner.status.facts import node_columns, step_line
from learner.status.live import KEPT_EVENTS, STEP_LOG, LiveView, LogFile, collected_events, logging_to_file
from learner.status.outcome import summary_lines
from learner.status.run_state import RunState
from learner.status.steps import StepHistory
from learner.status.terminal import live_page, print_status, sparkline
from p2p.printable import CleanFormatter
from tests.unit.test_run_state import line


def a_run(nodes: int = 3, step: int = 20, **more: Any) -> RunState:
    """A run of which everything is known."""
    history = StepHistory([{"step": 0, "eval/exact/mean": 0.3}, *(line(s, cost__total_usd=s / 1000) for s in range(1, step + 1))])
    rows = [
        {
            "name": f"node-{i}", "peer": f"12D3KooW{i:044d}", "alive": True, "ready": True, "digest_ok": True, "usd": 0.01,
            "activity": "warm" if i % 3 == 0 else "active", "version": "1.20", "tokens": 10_000 * i, "tokens_per_s": 500.0,
            "pause_s": 0.02, "bytes_from_learner": 10**7, "bytes_from_peers": 10**7, "usd_per_hour": 0.3,
        }
        for i in range(1, nodes + 1)
    ]  # fmt: skip
    values: Mapping[str, Any] = {
        "run": "00aa", "epoch": 1, "step": step, "steps": 40, "seconds": 61.0, "version": "1.20", "nodes": rows,
        "max_staleness": 2, "max_staleness_seen": 1, "pool": {"spent_usd": 0.02, "usd_per_hour": 0.9},
        "events": [{"time": 1e9 + i, "text": f"node node-{i} (12D3KooW{i:044d}) joined"} for i in range(20)],
        "samples": [{"step": 20, "prompt": "reverse 1 2", "completion": "2 1", "reward": 1.0, "finish": "stop"}],
        "checkpoint": "/runs/first/checkpoints/step-20", **history.status(),
    }  # fmt: skip
    return RunState.of({**values, **more})


def drawn(state: RunState, width: int, height: int) -> list[str]:
    console = Console(width=width, height=height, force_terminal=True, color_system=None, file=io.StringIO())
    with console.capture() as capture:
        console.print(live_page(state, width, height, "shoal node --join ticket.txt"))
    return capture.get().splitlines()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (160, 50)])
@pytest.mark.parametrize("nodes", [1, 3, 8, 200])
def test_the_page_fits_the_terminal(width: int, height: int, nodes: int) -> None:
    page = drawn(a_run(nodes), width, height)
    assert len(page) < height and max(map(len, page)) <= width
    text = "\n".join(page)
    for word in ("20 of 40", "reward", "staleness", "50 tokens/s", "learner busy 75 %", "$0.02", "node-1", "joined", "joined"):
        assert word in text, word
    assert ("more" in text) == (nodes == 200 or (nodes == 8 and height == 24))


def test_a_wide_terminal_has_all_columns_and_a_narrow_one_the_first() -> None:
    wide, narrow = ("\n".join(drawn(a_run(), width, 50)) for width in (160, 50))
    assert all(column.title in wide for column in node_columns(a_run()))
    assert "state" in narrow and "digest" not in narrow and "peer" not in narrow


def test_who_waits_for_nodes_is_told_how_they_join() -> None:
    text = "\n".join(drawn(RunState.of({"run": "00aa", "steps": 40}), 80, 24))
    assert "waiting for the first node: shoal node --join ticket.txt" in text and "reward" not in text


def test_after_a_resume_seconds_and_bytes_are_those_of_this_life(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = ("\n".join(drawn(a_run(epoch=epoch), 80, 24)) for epoch in (1, 2))
    assert "20 of 40, 1 min 01 s in this life, " in second and "by nodes in this life" in second and "epoch 2" in second
    assert "this life" not in first
    print_status(a_run(epoch=2))
    said = capsys.readouterr().out
    assert "running, 1 min 01 s in this life (epoch 2)" in said and "between nodes in this life (epoch 2)" in said


def test_curves_lie_between_nought_and_one_or_between_their_ends() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█" and sparkline([-3.0, 7.0]) == "▁█" and sparkline([]) == ""
    assert len(sparkline([0.5] * 1000, 60)) == 60


def test_where_there_is_no_terminal_each_step_is_one_line() -> None:
    said: list[str] = []
    console = Console(file=io.StringIO())
    with LiveView(said.append, console=console) as view:
        assert not view.is_page
        for step in (1, 4, 4, 20):
            view.update(a_run(step=step))
    assert [text.split(":")[0] for text in said] == [f"step {s} of 40" for s in range(1, 21)]
    assert said[-1].endswith("staleness 1 of 2, 50 tokens/s, learner busy 75 %, 3 nodes (2 active), $0.0200")
    assert said[-1] == step_line(a_run(), 20) and not console.file.getvalue()  # type: ignore[attr-defined]


def test_each_step_of_an_own_trainer_that_logs_no_reward_is_one_line() -> None:
    said: list[str] = []
    view = LiveView(said.append, console=Console(file=io.StringIO()))
    history = StepHistory([{"step": 0, "my/start": 1.0}])
    for step in (1, 2, 3):
        view.update(a_run(**history.status()))
        history.add({"step": step, "loss": 0.5})
    view.update(a_run(**history.status()))
    assert [text.split(":")[0] for text in said] == [f"step {s} of 40" for s in (1, 2, 3)]


def test_steps_that_are_done_again_are_told_again() -> None:
    said: list[str] = []
    view = LiveView(said.append, console=Console(file=io.StringIO()))
    for step in (9, 10, 8, 9):
        view.update(a_run(step=step))
    assert [text.split(" of ")[0] for text in said] == ["step 9", "step 10", "step 9"]


def test_a_watched_run_tells_its_events_once() -> None:
    said: list[str] = []
    view = LiveView(said.append, console=Console(file=io.StringIO()), tell_events=True)
    for _ in range(3):
        view.update(a_run())
    assert sum("joined" in text for text in said) == 20


def test_log_lines_do_not_tear_the_page(tmp_path: Path) -> None:
    """They become events, and go to a file; nothing but the page is written to the terminal."""
    stderr, page = io.StringIO(), io.StringIO()
    root, handler = logging.getLogger(), logging.StreamHandler(stderr)
    root.addHandler(handler)
    try:
        console = Console(file=page, force_terminal=True, width=80, height=24)
        with collected_events() as log, logging_to_file(tmp_path / "learner.log"):
            with LiveView(lambda _: None, console=console) as view:
                logging.getLogger("shoal.head").info("node %s joined", "evil\x1b[2J")
                view.update(a_run(events=log.events()))
            assert stderr.getvalue() == "" and "joined" in page.getvalue() and "[2Jevil" not in page.getvalue()
        logging.getLogger("shoal.head").warning("after")
        assert stderr.getvalue() == "after\n"
    finally:
        root.removeHandler(handler)
    kept = (tmp_path / "learner.log").read_text()
    assert "INFO shoal.head: node evil" in kept and "\x1b" not in kept and "after" not in kept


def test_events_are_bounded_and_plain() -> None:
    with collected_events() as log:
        for i in range(3 * KEPT_EVENTS):
            logging.getLogger("shoal.test").info("line %d \x1b", i)
        logging.getLogger("another.library").warning("theirs")
        logging.getLogger(STEP_LOG).info("step 3 of 9")
    events = log.events()
    assert len(events) == KEPT_EVENTS and events[-1]["text"] == "theirs" and events[-1]["level"] == "warning"
    assert "\x1b" not in events[0]["text"]
    record = logging.LogRecord("shoal", logging.INFO, "", 0, "a\x1b[0m\nb", None, None)
    assert CleanFormatter("%(message)s").format(record) == "a?[0m b"


def test_a_thread_that_was_given_up_tells_no_step_twice() -> None:
    said: list[str] = []
    first, go_on = threading.Event(), threading.Event()

    def say(line: str) -> None:
        said.append(line)
        if line.startswith("step 18 ") and not first.is_set():
            first.set()
            assert go_on.wait(60)

    view, state = LiveView(say, page=False), a_run(finished=False)
    view.update(a_run(step=17))
    said.clear()
    threads = [threading.Thread(target=view.update, args=(state,)) for _ in range(2)]
    threads[0].start()
    assert first.wait(60)
    threads[1].start()
    threads[1].join(0.2)
    go_on.set()
    for thread in threads:
        thread.join()
    assert [line.split()[1] for line in said] == ["18", "19", "20"]


def test_status_shows_what_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    print_status(a_run(finished=True, turned_away=37))
    said = capsys.readouterr().out
    for words in ("37 visits: too many", "20 of 40", "3 nodes: 2 active, 1 warm", "learner busy 75 %", "20 ms", "2 1",
                  "checkpoints/step-20"):  # fmt: skip
        assert words in said, words


def test_the_summary_says_what_to_do_next() -> None:
    lines = "\n".join(summary_lines(a_run(finished=True), Path("runs/first"), "runs/first/report.html"))
    assert "finished: 20 steps in 1 min 01 s" in lines and "reward 0.015 -> 0.195" in lines
    assert "shoal export runs/first OUT" in lines and "runs/first/report.html" in lines and "/step-20" in lines
    bare = "\n".join(summary_lines(RunState(), Path("r"), ""))
    assert "export" not in bare and "report" not in bare


def test_a_log_call_whose_arguments_do_not_fit_raises_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with collected_events() as log:  # asked itself: pytest's own handler would raise
        log.handle(logging.LogRecord("shoal", logging.INFO, "", 0, "%d nodes", ("three",), None))
        log.handle(logging.LogRecord("shoal", logging.INFO, "", 0, "after", None, None))
    assert [event["text"] for event in log.events()] == ["after"] and "%d nodes" in capsys.readouterr().err


def test_the_log_file_is_bounded_and_its_errors_are_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = LogFile(tmp_path / "learner.log", most=1000)
    nowhere = LogFile(tmp_path / "none" / "learner.log")
    for i in range(100):
        record = logging.LogRecord("shoal", logging.INFO, "", 0, f"line {i}", None, None)
        file.handle(record)
        nowhere.handle(record)
    file.close()
    nowhere.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["learner.log", "learner.log.1"]
    assert all(p.stat().st_size <= 1000 for p in tmp_path.iterdir())
    assert "line 99" in (tmp_path / "learner.log").read_text() and capsys.readouterr().err == ""


def test_whoever_looks_before_the_first_step_is_told_of_each_step() -> None:
    said: list[str] = []
    view = LiveView(said.append, console=Console(file=io.StringIO()))
    view.update(RunState.of({"run": "00aa", "steps": 40}))
    view.update(a_run(step=3))
    assert [text.split(" of ")[0] for text in said] == ["step 0: held out 0.30", "step 1", "step 2", "step 3"]


EPISODE = {
    "step": 20, "prompt": "?", "completion": "8<4", "reward": 0.95, "finish": "stop", "parts": {"found": 1.0},
    "end": {"over": "turns", "calls": 1, "errors": 0},
    "turns": [
        {"by": "model", "tokens": 1, "text": "8"}, {"by": "environment", "tokens": 1, "text": "<\x1b[2J"},
        {"by": "model", "tokens": 9, "text": "raw", "calls": [{"name": "look", "arguments": '{"at": 4}'}]},
    ],
}  # fmt: skip


def evaluated_run(**more: Any) -> RunState:
    history = StepHistory(
        [
            *(line(s, reward__found=s / 20) for s in range(1, 21)), {"step": 0, "eval/hard/exact/mean": 0.25},
            {"step": 20, "eval/hard/exact/mean": 0.5, "eval/hard/exact/stderr": 0.125, "eval/hard/finished": 0.75,
             "eval/hard/unscored": 4.0},
        ]
    )  # fmt: skip
    metrics = {
        "reward/mean": 0.5, "reward/found": 1.0, "episodes/turns_mean": 2.5, "episodes/turns_max": 4.0,
        "episodes/over_done": 0.75, "episodes/over_turns": 0.25, "episodes/tool_calls": 1.5, "episodes/tool_errors": 0.5,
    }  # fmt: skip
    lost = {"groups": 3, "last": "it raised (r.py:7)"}
    values = {**history.status(), "metrics": metrics, "samples": [EPISODE], "unscored": lost}
    return a_run(**{**values, **more})


@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 50)])
def test_turns_parts_and_evaluations_are_on_the_page(width: int, height: int) -> None:
    page = drawn(evaluated_run(), width, height)
    assert len(page) < height and max(map(len, page)) <= width
    text = "\n".join(page)
    for word in ("found 1", "2.5 turns (most 4)", "hard: exact 0.50 ± 0.12", "3 groups", "node-1", "75 % of its"):
        assert word in text, word
    many = {f"n{i}": [{"step": 1, "exact": 0.5}] for i in range(30)}
    assert "more evaluations" in "\n".join(drawn(evaluated_run(evaluated=many), width, height))


def test_a_sample_of_an_episode_shows_its_turns_and_calls(capsys: pytest.CaptureFixture[str]) -> None:
    print_status(evaluated_run())
    said = capsys.readouterr().out
    assert "model 8  env <\ufffd[2J  model look" in said and '"at": 4' in said and "2 turns, ended by turns" in said
    assert "\x1b[2J" not in said


def test_results_of_evaluations_are_lines_where_there_is_no_terminal() -> None:
    said: list[str] = []
    view = LiveView(said.append, console=Console(file=io.StringIO()))
    view.update(RunState.of({"run": "00aa", "steps": 40}))
    view.update(evaluated_run())
    view.update(evaluated_run())
    told = [text for text in said if "evaluation" in text]
    assert told == [
        "step 0: evaluation hard: exact 0.25",
        "step 20: evaluation hard: exact 0.50 ± 0.12 (75 % of its prompts, 4 not scored)",
    ]


def test_the_summary_has_parts_episodes_evaluations_and_what_was_unscored() -> None:
    text = "\n".join(summary_lines(evaluated_run(finished=True), Path("r"), ""))
    assert "parts: found 0.075 -> 0.975" in text and "evaluation hard: 0.25 at step 0 -> exact 0.50 ± 0.12" in text
    assert "unscored: 3 groups, the last because: it raised (r.py:7)" in text and "75 % done, 25 % by turns" in text
