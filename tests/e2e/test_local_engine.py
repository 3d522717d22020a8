"""A learner with an engine of its own, as real processes: it trains alone, through a kill of that engine, until others come."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from learner.config import build_config, dump_toml
from learner.status.source import fetch_status
from netem.demo.recipes import RECIPES
from netem.processes.children import Children
from tests.e2e.test_run import check_books, metrics, steps_done
from tests.support.nightly import nightly
from tests.support.watchdog import status_of, until

pytestmark = pytest.mark.e2e


def write_config(tmp_path: Path, model: Path, steps: int, **local_engine: object) -> Path:
    settings = RECIPES["reverse"].config(tmp_path / "run", model, steps, 0)
    settings["local_engine"] = {"engine": "transformers", "capacity": 96, "floor_s": 0.1, **local_engine}
    path = tmp_path / "learner.toml"
    path.write_text(dump_toml(build_config(settings, "test").model_dump()))
    return path


@nightly
def test_it_trains_alone_through_a_kill_until_others_come(shoal: Children, tmp_path: Path, demo_model: Path) -> None:
    run_dir = tmp_path / "run"
    learner = shoal.start("learner", "learner", str(write_config(tmp_path, demo_model, 30)), "--json")
    until("steps made alone", lambda: steps_done(run_dir) >= 4, shoal)
    [own] = [n for n in fetch_status(run_dir)["nodes"] if n["alive"]]
    assert own["name"] == "local-engine" and own["tokens"] > 0
    os.kill(own["pid"], signal.SIGKILL)
    at = steps_done(run_dir)
    until("steps after the kill", lambda: steps_done(run_dir) >= at + 4, shoal)
    node = shoal.start("node", "node", "--join", str(run_dir / "ticket.txt"), "--dir", str(tmp_path / "node"), "--name", "helper",
                       "--listen", "/ip4/127.0.0.1/tcp/0", "--capacity", "96", "--json")  # fmt: skip
    assert status_of(learner, shoal) == 0, shoal.said("learner")
    assert status_of(node, shoal) == 0, shoal.said("node")
    summary = json.loads((run_dir / "summary.json").read_text())
    check_books(summary["trajectories"])
    assert summary["trajectories"]["consumed"] == 30 * 16 * 16 and summary["trajectories"]["aborted"] == {}
    assert summary["max_staleness_seen"] <= 2
    tokens = {n["name"]: n["tokens"] for n in summary["nodes"] if n["alive"]}
    assert tokens["helper"] > 0 and tokens["local-engine"] > 0
    lines = metrics(run_dir)
    # A step whose rollouts were there already takes none of the engine's time.
    assert sum(line.get("local_engine/seconds", 0.0) for line in lines) > 0
    # What the local engine gets does not leave the machine.
    assert summary["learner_egress_bytes"] < summary["versions_published"] * summary["anchor_bytes"]
    assert {n["name"] for n in summary["nodes"] if n["bytes_from_peers"]} == set()


def test_one_that_cannot_run_is_said_at_once(shoal: Children, tmp_path: Path, demo_model: Path) -> None:
    learner = shoal.start("learner", "learner", str(write_config(tmp_path, demo_model, 3, engine_set={"rows": 4})), "--json")
    assert status_of(learner, shoal) == 2
    assert "the learner's local engine cannot run" in shoal.said("learner") and "--engine-set" in shoal.said("learner")
