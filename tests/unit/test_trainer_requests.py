"""The numbers that a trainer logs: whatever they are, they are kept, and they end no run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from learner.client.messages import Log, Ok
from learner.head.trainer_requests import TrainerRequests


def requests_in(run_dir: Path) -> TrainerRequests:
    """Those of a head without nodes."""
    parts: Any = SimpleNamespace(
        run_dir=run_dir, epoch=2, nodes={}, local_engine=None, audits=None, now=lambda: 1.0, wall=lambda: 7.0,
        publisher=SimpleNamespace(
            segment=None, count_traffic=lambda: None, current=None, published=SimpleNamespace(recent=[])
        ),
        rollouts=SimpleNamespace(buffers=SimpleNamespace(redundant=False, unscored_groups=0)),
        keeper=SimpleNamespace(pool=SimpleNamespace(metrics=lambda now: {})),
        trust=SimpleNamespace(trained_on=lambda by_node: None),
    )  # fmt: skip
    return TrainerRequests(parts, 9)


@pytest.mark.parametrize("logged", [{"step": None, "epoch": "x", "time": {}}, {"step": 10**400}, {"step": 99, "time": -1}])
async def test_step_epoch_and_time_are_the_heads(tmp_path: Path, logged: dict[str, Any]) -> None:
    requests = requests_in(tmp_path)
    assert await requests.answer(Log(4, json.dumps({**logged, "reward/mean": 0.5}))) == Ok()
    [written] = (tmp_path / "metrics.jsonl").read_text().splitlines()
    said = json.loads(written)
    assert list(said)[:3] == ["step", "epoch", "time"]
    assert (said["step"], said["epoch"], said["time"], said["reward/mean"]) == (4, 2, 7.0, 0.5)
    assert [(row.step, row.reward) for row in requests.history.recent] == [(4, 0.5)]


async def test_a_number_that_no_float_holds_is_left_out(tmp_path: Path) -> None:
    requests = requests_in(tmp_path)
    for value in (10**400, -(10**400), float("nan"), float("inf")):
        assert await requests.answer(Log(4, json.dumps({"reward/mean": value, "mine": value}))) == Ok()
    assert requests.latest["reward/mean"] is None and requests.latest["mine"] is None
    assert [row.reward for row in requests.history.recent] == [None]


async def test_the_line_is_kept_before_the_views_history_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = requests_in(tmp_path)

    def fail(_: object) -> None:
        raise RuntimeError("a view's")

    monkeypatch.setattr(requests.history, "add", fail)
    with pytest.raises(RuntimeError):
        await requests.answer(Log(4, "{}"))
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["step"] == 4


@pytest.mark.parametrize("logged", ["[1, 2]", "no JSON", "7", "[" * 100_000, '{"n": 1' + "0" * 5000 + "}"])
async def test_a_message_that_is_no_object_is_said_once_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, logged: str
) -> None:
    requests = requests_in(tmp_path)
    for step in (4, 5):
        assert await requests.answer(Log(step, logged)) == Ok()
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [4, 5]
    (line,) = caplog.messages
    assert "cannot be read: step 4" in line and len(line) < 500


@pytest.mark.parametrize("value", ["NaN", '"good"', "Infinity", "null", "[0.5]", "1" + "0" * 400])
async def test_an_evaluation_that_is_no_number_is_said_once_and_kept_nowhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, value: str
) -> None:
    requests = requests_in(tmp_path)
    for step in (4, 5):
        assert await requests.answer(Log(step, f'{{"eval/exact/mean": {value}}}')) == Ok()
    assert requests.evals == {} and requests.history.evals == []
    assert len(caplog.messages) == 1 and "eval/exact/mean is no number: step 4" in caplog.text
    assert await requests.answer(Log(6, '{"eval/exact/mean": 0.5}')) == Ok()
    assert requests.evals == {6: 0.5}


async def test_a_full_disk_costs_lines_and_says_how_many(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    requests, file = requests_in(tmp_path), tmp_path / "metrics.jsonl"
    file.symlink_to("/dev/full")
    for step in (4, 5):
        assert await requests.answer(Log(step, '{"reward/mean": 0.5}')) == Ok()
    assert len(caplog.messages) == 1 and "No space left on device" in caplog.text and str(file) in caplog.text
    assert [row.step for row in requests.history.recent] == [4, 5], "who looks on sees the steps"
    file.unlink()
    assert await requests.answer(Log(6, "{}")) == Ok()
    assert "2 lines were lost" in caplog.messages[-1] and json.loads(file.read_text())["step"] == 6
