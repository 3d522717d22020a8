"""learner/tracking with the services as they are on the package index: what is told is read back from their own files.

Each test is skipped where its package is not installed. Nothing here goes to a network: wandb is in its offline mode.
"""

from __future__ import annotations

import importlib
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from learner.section import dump_toml
from learner.tracking.keeping import Trackers
from learner.tracking.settings import TrackerName
from p2p.files import append_whole

RUN = "0123456789abcdef"
DEADLINE_S = 300.0  # of one life; importing a service on a busy machine


def make_run(folder: Path, **tracking: Any) -> Path:
    (folder / "logs").mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"run": RUN}))
    settings = {"model": "m", "tracking": tracking, "task": {"options": {"api_key": "sk-secret"}}}
    (folder / "config.toml").write_text(dump_toml(settings))
    return folder


def line(step: int, epoch: int, **values: float) -> str:
    return json.dumps({"step": step, "epoch": epoch, "time": 1000.0 + step, **values}) + "\n"


async def live(run_dir: Path, service: TrackerName, *lines: str) -> None:
    """One life of a learner that writes these lines and comes to its end."""
    append_whole(run_dir / "metrics.jsonl", "".join(lines).encode())
    with trio.fail_after(DEADLINE_S), Trackers([service], run_dir) as trackers:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trackers.run)
            await trackers.finish()
    place = json.loads((run_dir / "tracking" / f"{service}.json").read_text())
    said = (run_dir / "logs" / f"tracking-{service}.log").read_text()
    assert place["offset"] == (run_dir / "metrics.jsonl").stat().st_size, said


async def two_lives(run_dir: Path, service: TrackerName) -> None:
    """Steps 1 to 3 and an evaluation of step 1; then a resume from step 1 with steps 2 to 4."""
    await live(
        run_dir, service, *(line(s, 1, **{"reward/mean": s / 10}) for s in (1, 2, 3)),
        line(1, 1, **{"eval/hard/exact/mean": 0.25}),
    )  # fmt: skip
    await live(run_dir, service, *(line(s, 2, **{"reward/mean": s / 10 + 5}) for s in (2, 3, 4)))


async def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run_dir = make_run(tmp_path / "run", tensorboard=True)
    await two_lives(run_dir, "tensorboard")
    accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator").EventAccumulator
    seen = accumulator(str(run_dir / "tensorboard"))
    seen.Reload()
    rewards = [(e.step, round(e.value, 4)) for e in seen.Scalars("reward/mean")]
    assert rewards == [(1, 0.1), (2, 5.2), (3, 5.3), (4, 5.4)], "what was taken back is not shown"
    assert [(e.step, e.value) for e in seen.Scalars("eval/hard/exact/mean")] == [(1, 0.25)]
    text = seen.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert 'model = "m"' in text and "sk-secret" not in text


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of a run's own file: LevelDB's log format after seven bytes."""
    record = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    data, at, part = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield record.FromString(part)
            part = b""


async def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run_dir = make_run(tmp_path / "run", wandb="shoal-test")
    await two_lives(run_dir, "wandb")
    files = sorted((run_dir / "tracking" / "wandb").glob("offline-run-*/*.wandb"), key=os.path.getmtime)
    assert [file.name for file in files] == [f"run-{RUN}.wandb"] * 2, "both lives are one run to the service"
    rows, projects, config = [], set(), ""
    for file in files:
        for record in wandb_records(file):
            if record.HasField("history"):
                rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item})
            if record.HasField("run"):
                projects.add((record.run.project, record.run.run_id, record.run.display_name))
                config += str(record.run.config)
    assert projects == {("shoal-test", RUN, "run-012345")}
    told = [(row["step"], row["reward/mean"]) for row in rows if "reward/mean" in row]
    assert told == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 5.4)], "no step twice"
    assert [(row["step"], row["eval/hard/exact/mean"]) for row in rows if "eval/hard/exact/mean" in row] == [(1, 0.25)]
    assert "sk-secret" not in config and "(left out)" in config


async def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    run_dir = make_run(tmp_path / "run", trackio="shoal-test", name="mine")
    await two_lives(run_dir, "trackio")
    # Its store's place is read when it is imported: in a process of its own.
    code = (
        "import json; from trackio.sqlite_storage import SQLiteStorage as S; "
        "print(json.dumps([S.get_runs('shoal-test'), S.get_logs('shoal-test', 'mine'), S.get_run_config('shoal-test', 'mine')]))"
    )
    import subprocess
    import sys

    done = await trio.run_process([sys.executable, "-c", code], capture_stdout=True, stderr=subprocess.STDOUT)
    runs, logs, config = json.loads(done.stdout.decode().strip().splitlines()[-1])
    assert runs == ["mine"]
    assert [(row["step"], row["reward/mean"]) for row in logs if "reward/mean" in row] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 5.4)]
    assert [(row["step"], row["eval/hard/exact/mean"]) for row in logs if "eval/hard/exact/mean" in row] == [(1, 0.25)]
    assert config["model"] == "m" and "sk-secret" not in json.dumps(config)


async def test_a_service_that_does_not_start_costs_nothing_but_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "online")  # without a key, and without a terminal to ask for one
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    run_dir = make_run(tmp_path / "run", wandb="shoal-test")
    with trio.fail_after(DEADLINE_S), Trackers(["wandb"], run_dir) as trackers:
        await trackers.run()
    [said] = [m for m in caplog.messages if "is not fed any more" in m]
    assert said.startswith("wandb is not fed any more: ") and "api_key" in said.lower().replace(" ", "_")
