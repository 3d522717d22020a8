"""Whole runs with real processes over real libp2p: chaos, a killed trainer, a killed learner, sparse deltas."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from pathlib import Path
from typing import Any

import psutil
import pytest

from learner.config import build_config, dump_toml
from netem.demo.recipes import RECIPES
from netem.processes.children import Children, start_module
from tests.support.nightly import nightly
from tests.support.watchdog import PATIENCE_S, status_of, until

pytestmark = pytest.mark.e2e


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def steps_done(run_dir: Path) -> int:
    return max((line["step"] for line in metrics(run_dir)), default=0)


def check_books(trajectories: dict[str, Any]) -> None:
    aborted = sum(trajectories["aborted"].values())
    assert trajectories["lost"] == 0
    assert trajectories["reserved"] == (
        trajectories["consumed"] + aborted + trajectories["outstanding"] + trajectories["lost"]
    )


@nightly
def test_demo_survives_a_killed_node(shoal: Children, tmp_path: Path) -> None:
    demo = shoal.start(
        "demo", "demo", "--json", "--chaos", "--steps", "24", "--seed", "3", "--run-dir", str(tmp_path / "demo")
    )
    assert status_of(demo, shoal) == 0, shoal.said("demo")
    result = shoal.result("demo")
    assert result["steps"] == 24 and result["versions_published"] == 25
    assert result["max_staleness_seen"] <= 2
    nodes = {node["name"]: node for node in result["nodes"]}
    assert set(nodes) == {"node-1", "node-2", "node-3", "node-4"} and not nodes["node-2"]["alive"]
    for name in ("node-1", "node-3", "node-4"):
        assert nodes[name]["alive"] and nodes[name]["digest_ok"] and nodes[name]["version"] == "1.24", nodes[name]
        assert nodes[name]["bytes_from_peers"] > 0, nodes[name]
    # The newcomer may have come up too late in so short a run to be given work.
    assert nodes["node-1"]["tokens"] > 0 and nodes["node-3"]["tokens"] > 0
    check_books(result["trajectories"])
    assert result["trajectories"]["consumed"] == 24 * 16 * 16
    assert result["trajectories"]["aborted"] == {}  # a dead node is never a reason
    assert result["learner_egress_ratio"] <= 1.6
    report = Path(result["report"])
    assert report.exists() and report.stat().st_size > 10_000
    assert "SIGKILL" in result["events"][0]


@nightly
def test_sparse_deltas_are_a_few_per_cent_of_an_anchor(shoal: Children, tmp_path: Path) -> None:
    arguments = ["demo", "--json", "--recipe", "sparse", "--nodes", "2", "--steps", "3", "--run-dir", str(tmp_path / "d")]
    demo = shoal.start("demo", *arguments)
    assert status_of(demo, shoal) == 0, shoal.said("demo")
    result = shoal.result("demo")
    assert result["steps"] == 3
    assert 0 < result["delta_density_mean"] < 0.05
    assert 0 < result["delta_bytes_mean"] < 0.05 * result["anchor_bytes"]
    assert all(node["digest_ok"] and node["version"] == "1.3" for node in result["nodes"])
    check_books(result["trajectories"])


@nightly
def test_killed_trainer_and_killed_learner_resume(shoal: Children, tmp_path: Path, demo_model: Path) -> None:
    """Nodes stay up throughout: they must find the learner again by themselves, each time."""
    run_dir, config = tmp_path / "run", tmp_path / "learner.toml"
    settings = RECIPES["reverse"].config(run_dir, demo_model, 16, 0)
    config.write_text(dump_toml(build_config(settings, "test").model_dump()))
    # Its trainer is known by its command line, which a fork has not.
    learner = shoal.start("learner", "learner", str(config), "--json", starter=start_module)
    until("a ticket", (run_dir / "ticket.txt").exists, shoal)
    nodes = [
        shoal.start(
            name, "node", "--join", str(run_dir / "ticket.txt"), "--dir", str(tmp_path / name), "--name", name,
            "--capacity", "96", "--json", *reach,
        )
        for name, reach in (("node-1", ["--listen", "/ip4/127.0.0.1/tcp/0"]), ("node-2", ["--no-listen"]))
    ]  # fmt: skip
    until("step 4", lambda: steps_done(run_dir) >= 4, shoal)
    [trainer] = [p for p in psutil.Process(learner.pid).children() if "learner.trainer.trainer" in " ".join(p.cmdline())]
    trainer.send_signal(signal.SIGKILL)
    assert status_of(learner, shoal) == 1
    assert "--resume" in shoal.said("learner") and "Traceback" not in shoal.said("learner")

    second = shoal.start("second", "learner", str(config), "--resume", "--json")
    reached = steps_done(run_dir)
    until("steps after the resume", lambda: steps_done(run_dir) >= reached + 3, shoal)
    children = psutil.Process(second.pid).children(recursive=True)
    os.kill(second.pid, signal.SIGKILL)
    second.wait()
    psutil.wait_procs(children, timeout=PATIENCE_S)
    assert not any(p.is_running() for p in children), "the trainer outlived its head"

    third = shoal.start("third", "learner", str(config), "--resume", "--json")
    assert status_of(third, shoal) == 0, shoal.said("third")
    result = shoal.result("third")
    assert [status_of(node, shoal) for node in nodes] == [0, 0]
    assert result["epoch"] == 3 and result["step"] == 16 and result["max_staleness_seen"] <= 2
    told = [line.partition(": step ")[2] for line in shoal.said("third").splitlines() if ": step " in line]
    of_steps = [line for line in told if " of 16: " in line]  # the last evaluation has a line of its own, which may come after
    assert of_steps[-1].startswith("16 of 16: reward ") and "learner busy" in of_steps[-1], told
    assert "held-out" in Path(result["report"]).read_text() and result["checkpoint"].endswith("step_16")
    assert [row["step"] for row in result["curve"]] == list(range(17)), "the curve is that of all three lives"
    assert any("joined" in event["text"] for event in result["events"]) and not any("busy" in e["text"] for e in result["events"])
    watcher = shoal.start("watcher", "status", str(run_dir), "--watch", "--json")
    assert status_of(watcher, shoal) == 0 and shoal.result("watcher")["finished"]
    check_books(result["trajectories"])
    assert set(result["trajectories"]["aborted"]) <= {"restart", "orphaned", "stale"}
    assert all(node["digest_ok"] and node["version"] == "3.16" for node in result["nodes"])
    assert len(result["nodes"]) == 2

    db = sqlite3.connect(run_dir / "journal.sqlite")
    consumed = [row[0] for row in db.execute("SELECT group_id FROM consumed")]
    steps = [row[0] for row in db.execute("SELECT step FROM commits ORDER BY step")]
    db.close()
    assert len(consumed) == len(set(consumed)) == 16 * 16  # each group once, and each step its sixteen
    assert steps == list(range(1, 17))
    epochs = {line["step"]: line["epoch"] for line in metrics(run_dir) if line["step"] and "loss/mean" in line}
    assert sorted(set(epochs.values())) == [1, 2, 3]

    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]  # no line is torn
    sampled = [line["step"] for line in samples]
    assert sampled == sorted(sampled) and all(sampled.count(step) == 4 for step in sampled)
    assert len(set(range(1, 17)) - set(sampled)) <= 2  # each of two crashes may come between a commit and its samples
    assert {span["node"] for line in samples for span in line["spans"]} <= {"node-1", "node-2"}
    assert [line["step"] for line in result["samples"]] == [15] * 4 + [16] * 4
