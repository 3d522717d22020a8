"""learner/status: the model that every view of a run reads, and the history of its steps."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest

from learner.status.evaluated import MOST_EVAL_POINTS, MOST_NAMES, EvalHistory, EvalPoint
from learner.status.run_state import RunState
from learner.status.steps import (
    EVALS,
    LINE_BYTES,
    NEWEST_LINES,
    POINTS,
    RECENT,
    SHOWN_PARTS,
    StepHistory,
    StepRow,
    parts_of,
    read_metrics,
    surviving,
)
from learner.status.words import by_name, plain_text
from p2p.errors import UsageError


def line(step: int, epoch: int = 1, **more: float) -> dict[str, object]:
    return {
        "step": step, "epoch": epoch, "reward/mean": step / 100, "exact/mean": 0.5, "off_policy/max": 1.0, "perf/tokens": 100.0,
        "time/step": 2.0, "time/wait_for_batch": 0.5, **{name.replace("__", "/"): value for name, value in more.items()},
    }  # fmt: skip


def test_nothing_is_known_of_a_run_that_just_began() -> None:
    state = RunState.of({})
    assert state.last is None and state.busy is None and state.step_s is None and not state.faults and not state.priced
    assert RunState.of({"nodes": None, "metrics": None, "pool": {"blocked": None}, "recent": [{"reward": 1}]}).nodes == ()


def test_another_programs_answer_is_one_line() -> None:
    with pytest.raises(UsageError, match=r"cannot be read: nodes\.0\.tokens"):
        RunState.of({"nodes": [{"name": "a", "tokens": "many"}]})


def test_a_nodes_state_is_one_word() -> None:
    row = lambda **values: RunState.of({"nodes": [{"alive": True, "ready": True, **values}]}).nodes[0].state
    assert row() == "active" and row(activity="warm") == "warm" and row(activity="asleep", ready=False) == "asleep"
    assert row(ready=False) == "starting" and row(draining=True) == "leaving" and row(alive=False) == "gone"


def test_nodes_are_in_the_order_that_people_count_in() -> None:
    names = [f"node-{i}" for i in range(1, 12)]
    shuffled = random.Random(1).sample(names, len(names))
    nodes = [{"name": n, "alive": n != "node-2"} for n in shuffled]
    assert [n.name for n in RunState.of({"nodes": nodes}).nodes] == [*(n for n in names if n != "node-2"), "node-2"]
    assert sorted(["b", "a10", "a9", "10", "9"], key=by_name) == ["9", "10", "a9", "a10", "b"]


@pytest.mark.parametrize("name", ["\u00b2", "1\u00b2", "node-1\u00b2", "\u2460", "\u0664"])
def test_a_strangers_name_of_what_unicode_calls_digits_leaves_the_status_readable(name: str) -> None:
    nodes = [{"name": other, "alive": True} for other in (name, "node-2")]
    assert {node.name for node in RunState.of({"nodes": nodes}).nodes} == {name, "node-2"}


def test_a_strangers_texts_are_bounded_and_hold_no_control_characters() -> None:
    evil = "\x1b[2Jnode\r\n\u202e" + "x" * 100_000
    state = RunState.of(
        {
            "nodes": [{"name": evil, "reason": evil}], "reports": [evil], "events": [{"text": evil}],
            "samples": [{"prompt": evil, "completion": "two\nlines"}],
        }
    )  # fmt: skip
    for text in (state.nodes[0].name, state.nodes[0].reason, state.reports[0], state.events[0].text):
        assert text.isprintable() and len(text) <= 400
    assert len(state.samples[0].prompt) <= 4000 and "\x1b" not in state.samples[0].prompt
    assert state.samples[0].completion == "two\nlines" and plain_text("a\nb") == "a b"


def test_what_must_never_be_is_a_fault() -> None:
    status = {
        "finished": True, "version": "1.2", "max_staleness": 2, "max_staleness_seen": 3, "trajectories": {"lost": 1},
        "nodes": [{"name": "n", "alive": True, "ready": True, "version": "1.2", "digest_ok": False}],
    }  # fmt: skip
    said = RunState.of(status).faults
    assert len(said) == 3 and "lost" in said[0] and "staleness 3" in said[1] and "n ended" in said[2]


def test_the_first_step_waits_for_nodes_and_does_not_count_as_the_pace() -> None:
    history = StepHistory([line(1, time__step=100.0, time__wait_for_batch=99.0), *(line(s) for s in range(2, 10))])
    state = RunState.of({**history.status(), "step": 9, "steps": 19})
    assert state.busy == pytest.approx(0.75) and state.tokens_per_s == pytest.approx(50) and state.left_s == pytest.approx(20)


def test_a_step_that_is_logged_twice_is_one_row() -> None:
    history = StepHistory([{"step": 0, "eval/exact/mean": 0.3}, line(1), line(2), {"step": 2, "eval/exact/mean": 0.4}])
    assert [(r.step, r.held_out) for r in history.recent] == [(0, 0.3), (1, None), (2, 0.4)] == [
        (r.step, r.held_out) for r in history.curve
    ]


def test_steps_that_are_done_again_replace_what_was_taken_back() -> None:
    history = StepHistory(line(s) for s in range(1, 8))
    history.take_back(4)
    history.add(line(5, reward__mean=0.9))
    assert [r.step for r in history.recent] == [1, 2, 3, 4, 5] and history.recent[-1].reward == 0.9


def test_a_late_line_of_an_earlier_step_takes_nothing_back() -> None:
    history = StepHistory(line(s) for s in range(1, 51))
    history.add({"step": 48, "eval/exact/mean": 0.7})
    history.add({"step": 2, "eval/exact/mean": 0.2})
    history.add(line(3, reward__mean=9.0))
    assert [r.step for r in history.recent] == list(range(51 - RECENT, 51))
    assert [r.step for r in history.curve] == list(range(1, 51)) and max(r.reward or 0 for r in history.curve) < 1
    late = next(r for r in history.recent if r.step == 48)
    assert late.held_out == 0.7 and late.reward == 0.48 and late in history.curve
    assert [(r.step, r.held_out) for r in history.evals] == [(2, 0.2), (48, 0.7)]


def test_a_late_line_is_no_step_twice_where_points_are_several_steps() -> None:
    history = StepHistory(line(s) for s in range(1, 2 * POINTS + 3))
    curve = history.curve
    history.add({"step": 2 * POINTS, "eval/exact/mean": 0.7})
    assert history.curve == curve and history.recent[-3].held_out == 0.7 and history.evals == [StepRow(2 * POINTS, held_out=0.7)]


def test_a_long_runs_curve_is_short_and_keeps_its_means_and_its_worst() -> None:
    history, count = StepHistory(), 10_000
    for s in range(1, count + 1):
        history.add(line(s, off_policy__max=2.0 if s == 5000 else 1.0))
    curve = history.curve
    assert len(curve) <= POINTS and len(history.recent) == RECENT and len(json.dumps(history.status())) < 100_000
    assert [r.step for r in curve] == sorted({r.step for r in curve}) and curve[-1].step == count
    assert curve[0].reward == pytest.approx(0.32, abs=0.33) and max(r.staleness or 0 for r in curve) == 2.0
    mean = sum(r.reward or 0 for r in curve) / len(curve)
    assert mean == pytest.approx((count + 1) / 200, rel=0.02)


def test_a_long_runs_evaluations_keep_their_steps_and_their_values() -> None:
    history = StepHistory([{"step": 0, "eval/exact/mean": 0.0}])
    for s in range(1, 5001):
        history.add(line(s))
        if s % 10 == 0:
            history.add({"step": s, "eval/exact/mean": s / 5000})
    evals = RunState.of(history.status()).evals
    assert len(evals) == EVALS and evals[0] == StepRow(0, held_out=0.0) and evals[-1] == StepRow(5000, held_out=1.0)
    assert all(row.step % 10 == 0 and row.held_out == row.step / 5000 for row in evals)
    assert [row.step for row in evals[-RECENT:]] == list(range(5000 - 10 * (RECENT - 1), 5001, 10))
    assert max(b.step - a.step for a, b in pairwise(evals)) <= 200
    history.take_back(4995)
    assert history.evals[-1].step == 4990 and history.evals[0].step == 0


def test_an_older_summarys_evaluations_are_those_of_its_curve() -> None:
    old = {k: v for k, v in StepHistory([{"step": 0, "eval/exact/mean": 0.3}, line(1)]).status().items() if k != "held_out"}
    assert [(row.step, row.held_out) for row in RunState.of(old).evals] == [(0, 0.3)]


def test_the_surviving_history_takes_back_what_a_crash_lost(tmp_path) -> None:
    lines = [line(1), line(2), line(3), line(2, epoch=2), line(3, epoch=2, reward__mean=0.7)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in lines) + '{"step": 4, "cut sho')
    assert [(r["step"], r["epoch"]) for r in surviving(read_metrics(path))] == [(1, 1), (2, 2), (3, 2)]
    assert read_metrics(tmp_path / "none") == []


def test_a_row_without_times_has_no_pace() -> None:
    row = StepRow(1, reward=0.5)
    assert row.busy is None and row.tokens_per_s is None


def test_parts_of_the_reward_are_followed_over_the_run() -> None:
    history = StepHistory()
    for step in range(1, 1001):
        late = {"reward/late": 1.0} if step > 500 else {}
        history.add(line(step, reward__form=step / 1000, episodes__turns_mean=2.0, **late))
    state = RunState.of({**history.status(), "metrics": line(1000, reward__form=1.0)})
    assert state.parts == {"form": 1.0} and state.curve[0].turns == 2.0
    ends = state.part_first_and_last()
    assert ends["form"].first == pytest.approx(0.05, abs=0.01) and ends["form"].last == pytest.approx(0.95, abs=0.01)
    assert ends["late"] == (1.0, 1.0)
    many = {"step": 1, **{f"reward/{i:03d}": 1.0 for i in range(1000)}, "reward/mean": 1.0, "reward/text": "x"}
    assert list(parts_of(many)) == [f"{i:03d}" for i in range(SHOWN_PARTS)]


def test_named_evaluations_are_kept_by_name_and_step_in_bounded_memory() -> None:
    history = EvalHistory()
    for step in range(0, 1000, 2):
        history.add({"step": step, "eval/exact/mean": 0.5, "eval/hard/exact/mean": step / 1000, "eval/hard/exact/stderr": 0.1})
    history.add({"step": 998, "eval/hard/exact/mean": 0.25, "eval/hard/unscored": 3.0, "eval/hard/finished": 0.5})
    for i in range(100):
        history.add({"step": 1, f"eval/n{i}/reward/mean": 1.0, f"eval/n{i}/exact/mean": None})
    found = history.status()
    assert len(found) == MOST_NAMES and len(found["hard"]) == MOST_EVAL_POINTS and found["hard"][0]["step"] == 0
    state = RunState.of({"evaluated": found})
    hard = next(one for one in state.named_evals if one.name == "hard")
    assert hard.points[-1] == EvalPoint(998, exact=0.25, finished=0.5, unscored=3.0) and hard.points[-2].exact_error == 0.1
    assert all(one.name for one in state.named_evals)
    history.take_back(10)
    assert [p["step"] for p in history.status()["hard"]] == [0]
    assert RunState.of({"evaluated": {"x": "rubbish", "y": [1]}, "evaluations": ["x"]}).named_evals == ()


def test_a_metrics_file_is_read_in_bounded_memory(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert read_metrics(file) == []
    file.symlink_to("/dev/zero")
    assert read_metrics(file) == [], "a device never ends"
    file.unlink()
    lines = [json.dumps(line(s, 1 if s <= 3000 else 2)) for s in range(1, 5001)]
    file.write_text("x" * (3 * LINE_BYTES) + "\n" + "\n".join(lines) + '\n{"step": 5001, "torn')
    rows = read_metrics(file, most=500)
    steps = [row["step"] for row in rows]
    assert len(rows) <= 500 + NEWEST_LINES and steps == sorted(steps) and steps[-NEWEST_LINES:] == list(range(4745, 5001))
    assert 1 in steps and 3001 in steps, "where an epoch began"
    kept = [row["step"] for row in surviving(rows)]
    assert kept == steps and max(b - a for a, b in pairwise(kept)) <= 32
    assert [row["step"] for row in read_metrics(file)] == list(range(1, 5001))
