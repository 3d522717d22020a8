"""learner/tracking: what a service is told of metrics.jsonl, and what its process costs the run when it is gone.

The services themselves: tests/others/test_trackers.py.
"""

from __future__ import annotations

import json
import logging
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import trio
from pydantic import ValidationError

from learner.tracking.follower import MetricsFollower, TrackedStep
from learner.tracking.keeping import Trackers
from learner.tracking.services import without_secrets
from learner.tracking.settings import TrackingSection, check_trackers
from p2p.errors import UsageError


def line(step: int, epoch: int = 1, **values: Any) -> str:
    named = {key.replace("__", "/"): value for key, value in values.items()}
    return json.dumps({"step": step, "epoch": epoch, "time": 100.0 + step, **named}) + "\n"


def write(file: Path, *lines: str) -> None:
    with open(file, "a") as out:
        out.writelines(lines)


def follower(tmp_path: Path, **more: bool) -> MetricsFollower:
    return MetricsFollower(tmp_path / "metrics.jsonl", tmp_path / "place.json", **more)


def test_each_line_is_told_once_also_by_a_later_process(tmp_path: Path) -> None:
    first = follower(tmp_path)
    assert list(first.news()) == []
    write(tmp_path / "metrics.jsonl", line(1, reward__mean=0.5, off=None, text="x"), '{"step": 2, "reward/me')
    assert list(first.news()) == [TrackedStep(1, 101.0, {"reward/mean": 0.5})]
    write(tmp_path / "metrics.jsonl", 'an": 0.75}\n', "no json\n", "[1]\n")
    assert list(first.news()) == [TrackedStep(2, 0.0, {"reward/mean": 0.75})]
    first.keep()
    write(tmp_path / "metrics.jsonl", line(3, reward__mean=1.0))
    assert [s.step for s in follower(tmp_path).news()] == [3]
    assert [s.step for s in first.news()] == [3] and list(first.news()) == []


def test_steps_that_are_done_again_are_told_once_or_taken_back(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", *(line(s, loss=s) for s in (1, 2, 3)), *(line(s, 2, loss=10 * s) for s in (2, 3, 4)))
    assert [(s.step, s.values["loss"]) for s in follower(tmp_path).news()] == [(1, 1), (2, 2), (3, 3), (4, 40)]
    news = list(follower(tmp_path, takes_back=True).news())
    assert [(s.step, s.values["loss"], s.back) for s in news] == [
        (1, 1, False), (2, 2, False), (3, 3, False), (2, 20, True), (3, 30, False), (4, 40, False),
    ]  # fmt: skip


def test_evaluations_come_late_and_each_has_its_own_steps(tmp_path: Path) -> None:
    write(
        tmp_path / "metrics.jsonl", line(5, loss=1), line(2, eval__exact__mean=0.5), line(2, eval__hard__exact__mean=0.25),
        line(2, eval__exact__mean=0.9), line(4, eval__hard__exact__mean=0.5, **{"eval/hard/pass@2": 0.75}),
    )  # fmt: skip
    assert [(s.step, s.values) for s in follower(tmp_path).news()] == [
        (5, {"loss": 1}), (2, {"eval/exact/mean": 0.5}), (2, {"eval/hard/exact/mean": 0.25}),
        (4, {"eval/hard/exact/mean": 0.5, "eval/hard/pass@2": 0.75}),
    ]  # fmt: skip


def test_evaluations_of_steps_that_are_taken_back_are_told_again(tmp_path: Path) -> None:
    hard = {"eval__hard__exact__mean": 0.5}
    write(
        tmp_path / "metrics.jsonl", line(1, loss=1), line(1, eval__exact__mean=0.1), line(2, loss=2, **hard), line(3, loss=3),
        line(3, eval__exact__mean=0.3), line(2, 2, loss=20, **hard), line(1, 2, eval__exact__mean=0.7), line(3, 2, loss=30),
        line(3, 2, eval__exact__mean=0.4),
    )  # fmt: skip
    evals = [(s.step, *s.values.values()) for s in follower(tmp_path, takes_back=True).news() if "loss" not in s.values]
    assert evals == [(1, 0.1), (3, 0.3), (3, 0.4)], "step 1 stands"
    again = [s.values for s in follower(tmp_path, takes_back=True).news() if s.back]
    assert again == [{"loss": 20, "eval/hard/exact/mean": 0.5}]
    once = [(s.step, *s.values.values()) for s in follower(tmp_path).news()]
    assert once == [(1, 1), (1, 0.1), (2, 2, 0.5), (3, 3), (3, 0.3)], "a service that cannot take back has the first account"


def test_a_place_that_cannot_be_read_and_a_file_that_was_replaced_begin_anew(tmp_path: Path) -> None:
    (tmp_path / "place.json").write_text("[]")
    write(tmp_path / "metrics.jsonl", *(line(s, loss=s) for s in (1, 2)))
    one = follower(tmp_path)
    assert [s.step for s in one.news()] == [1, 2]
    (tmp_path / "metrics.jsonl").write_text(line(3, loss=3))
    assert [s.step for s in one.news()] == [3]
    write(tmp_path / "metrics.jsonl", "x" * (3 << 20) + "\n", line(4, loss=4))
    assert [s.step for s in one.news()] == [4]


async def test_a_service_that_is_gone_costs_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "shoal.tracking")
    (tmp_path / "logs").mkdir()
    with trio.fail_after(120):  # no config.toml: the process ends at once
        with Trackers(["wandb", "tensorboard"], tmp_path) as trackers:
            await trackers.run()
            await trackers.finish()
    assert [m.split(" is ")[0] for m in sorted(caplog.messages)] == ["tensorboard", "wandb"]
    assert all("config.toml" in m and "The run goes on" in m for m in caplog.messages)


def test_settings() -> None:
    assert TrackingSection().wanted == () and TrackingSection(wandb="p", tensorboard=True).wanted == ("wandb", "tensorboard")
    check_trackers(TrackingSection())
    with pytest.raises(ValidationError, match="is no name"):
        TrackingSection(wandb="a/b")


def test_a_package_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("learner.tracking.settings.version", none)
    (tmp_path / "trackio").mkdir()  # such a folder is left by a service, and python could import it
    monkeypatch.syspath_prepend(tmp_path)
    assert find_spec("trackio") is not None
    with pytest.raises(UsageError, match=r"tracking.trackio needs the package trackio.*pip install '.\[trackio\]'"):
        check_trackers(TrackingSection(trackio="p"))


def test_no_secret_goes_to_a_service() -> None:
    judge = {"function": "judge", "options": {"api_key": "sk-1", "url": "http://j", "headers": {"Authorization": "b"}}}
    shown = without_secrets({"task": {"reward": [judge]}, "rollout": {"max_new_tokens": 5}, "endpoint": {"key_file": ""}})
    assert "sk-1" not in str(shown) and "'b'" not in str(shown) and shown["task"]["reward"][0]["options"]["url"] == "http://j"
    assert shown["rollout"] == {"max_new_tokens": 5}
