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
        run_dir=run_dir, epoch=2, nodes={}, local_engine=None, now=lambda: 1.0, wall=lambda: 7.0,
        publisher=SimpleNamespace(
            segment=None, count_traffic=lambda: None, current=None, published=SimpleNamespace(recent=[])
        ),
        rollouts=SimpleNamespace(buffers=SimpleNamespace(redundant=False)),
        keeper=SimpleNamespace(pool=SimpleNamespace(metrics=lambda now: {})),
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
