"""The demo whose nodes come and go, with real processes."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import psutil
import pytest

from netem.processes.children import Children
from tests.support.nightly import nightly
from tests.support.watchdog import status_of

pytestmark = pytest.mark.e2e

STEPS = 30


@nightly
def test_the_demo_on_spot_nodes_loses_nothing(shoal: Children, tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    arguments = ("--json", "--spot", "--steps", str(STEPS), "--seed", "1", "--run-dir", str(folder))
    demo = shoal.start("demo", "demo", *arguments)
    assert status_of(demo, shoal) == 0, shoal.said("demo")
    result = shoal.result("demo")
    assert result["steps"] == STEPS and result["faults"] == []
    spot = result["spot"]
    assert spot["departures"] == spot["killed"] + spot["noticed"] > 0 and spot["arrivals"] >= 6
    assert 0 < spot["busy"] <= 1 and spot["from_step"] == 2
    assert result["trajectories"]["lost"] == 0 and result["trajectories"]["consumed"] == STEPS * 32 * 16
    assert result["max_staleness_seen"] <= result["max_staleness"]
    db = sqlite3.connect(folder / "run" / "journal.sqlite")
    consumed = [row[0] for row in db.execute("SELECT group_id FROM consumed")]
    db.close()
    assert len(consumed) == len(set(consumed)) == STEPS * 32  # each group once
    assert "departures in" in Path(result["report"]).read_text()
    left = [p for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or ())]
    assert not left, "processes of the demo outlived it"
    assert json.loads((folder / "run" / "summary.json").read_text())["step"] == STEPS


def test_spot_and_chaos_are_refused_together(shoal: Children) -> None:
    demo = shoal.start("demo", "demo", "--spot", "--chaos")
    assert status_of(demo, shoal) == 2
    assert shoal.said("demo").strip() == "shoal: --spot kills nodes already: leave out --chaos"
