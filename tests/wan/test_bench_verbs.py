"""`shoal netem run` and `shoal bench broadcast` as a user runs them, small. Needs root and TUN; how fast is not asked here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from netem.emulation.backends import choose
from tests.support.watchdog import PATIENCE_S, status_of, until
from tests.wan.test_switch import WHY_NOT

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "-")
ROOT = Path(__file__).parents[2]

SCENARIO = """
payload = "1 MiB"
profile = { mtu = 9000, learner = LINK, nodes = [{ count = 2, LINK }] }
""".replace("{ count = 2, LINK }", "{ count = 2, up_mbit = 40, down_mbit = 40, delay_ms = 2 }").replace(
    "LINK", "{ up_mbit = 40, down_mbit = 40, delay_ms = 2 }"
)


def shoal(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shoal", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE_S, check=False)


def left_behind() -> set[str]:
    there = {name for name in os.listdir("/run/netns") if name.startswith("shoal-")} if Path("/run/netns").exists() else set()
    return there | {name for name in os.listdir("/dev/shm") if name.startswith("shoal-")}


def scenario(folder: Path, more: str = "", require: str = "") -> str:
    file = folder / "tiny.toml"
    file.write_text(SCENARIO + more + require)
    return str(file)


def last(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    return json.loads(done.stdout.splitlines()[-1])


def test_a_scenario_holds_or_not(tmp_path: Path) -> None:
    before = left_behind()
    faults = 'faults = [{ at = 0.05, kind = "kill", host = "node-2" }, { at = 0.06, kind = "outage", seconds = 0.3 }]\n'
    done = shoal("netem", "run", scenario(tmp_path, faults, "[require]\nratio = 1000\n"), "--json")
    assert done.returncode == 0, done
    said = last(done)
    cold, warm = said["rounds"]
    assert said["holds"] and said["why"] == [] and said["policy"] == "shoal" and said["t_star"] > 0.3
    assert cold["cold"] and set(cold["verified"]) == {"node-1", "node-2"} and cold["faults"] == 0
    assert warm["faults"] == 2 and set(warm["verified"]) == {"node-1"} and warm["t_max"] > 0.36
    done = shoal("netem", "run", scenario(tmp_path, "", "[require]\nratio = 1\nsource_share = 0.5\n"))
    assert done.returncode == 1 and "does not hold: " in done.stdout, done
    assert left_behind() <= before


def test_a_late_host_catches_up(tmp_path: Path) -> None:
    """After the others have finished, maybe: the round lasts until it has."""
    faults = 'faults = [{ at = 0.05, kind = "join", host = "node-2" }]\n'
    said = last(shoal("netem", "run", scenario(tmp_path, faults, "[require]\nratio = 1000\n"), "--json"))
    assert said["holds"], said
    assert said["rounds"][0]["verified"].keys() == {"node-1"}
    assert said["rounds"][1]["verified"].keys() == {"node-1", "node-2"} and said["rounds"][1]["joined"]["node-2"] > 0.05


def test_a_relay_that_corrupts_is_named_and_dropped(tmp_path: Path) -> None:
    """By the one other node, who gets the whole of it all the same; the source is told, and goes on with both."""
    faults = 'faults = [{ at = 0.05, kind = "corrupt", host = "node-2" }]\n'
    file = Path(scenario(tmp_path, faults, '[require]\nnamed = ["node-2"]\n'))
    file.write_text(file.read_text().replace("1 MiB", "4 MiB"))
    said = last(shoal("netem", "run", str(file), "--json"))
    assert said["holds"] and said["why"] == [], said
    cold, warm = said["rounds"]
    assert cold["named"] == {} and cold["verified"].keys() == {"node-1", "node-2"}
    assert warm["named"] == warm["banned"] == {"node-2": ["node-1"]} and warm["reported"] == ["node-2"]
    assert "node-1" in warm["verified"]


def test_a_relay_that_withholds_stops_nobody(tmp_path: Path) -> None:
    faults = 'faults = [{ at = 0.05, kind = "withhold", host = "node-2" }]\n'
    file = Path(scenario(tmp_path, faults, "[require]\nnamed = []\n"))
    file.write_text(file.read_text().replace("1 MiB", "4 MiB"))
    said = last(shoal("netem", "run", str(file), "--json"))
    assert said["holds"] and "node-1" in said["rounds"][1]["verified"], said
    # Not the source's bytes: in an honest round a few chunks cross, and are sent twice, which is as much as this asks for.
    brought = [each["from_source"].get("node-1", 0) / 2**22 for each in said["rounds"]]
    assert brought[1] > 0.8, f"what it kept, the source brings to node-1; of the payload {brought}, honest and withholding"


def test_a_tiny_bench(tmp_path: Path) -> None:
    before, plot, table = left_behind(), tmp_path / "plot.png", tmp_path / "table.md"
    done = shoal(
        "bench", "broadcast", "--scenario", scenario(tmp_path), "--policies", "shoal,star", "--repeat", "1", "--mtu", "1500",
        "--json", "--plot", str(plot), "--markdown", str(table),
    )  # fmt: skip
    assert done.returncode == 0, done
    (one,) = last(done)["scenarios"]
    assert (one["name"], one["nodes"], one["payload_bytes"], one["mtu"]) == ("tiny", 2, 1 << 20, 1500)
    assert one["backend"] == choose("auto")[0] and one["t_star"] == pytest.approx(8 * 2**20 / 40e6)
    assert [row["policy"] for row in one["rows"]] == ["shoal", "star"]
    for row in one["rows"]:
        assert row["t_max"] >= row["t_median"] > 0 and row["ratio"] == pytest.approx(row["t_max"] / one["t_star"])
        assert row["source_bytes"] >= 2**20 and row["cpu_s"] > 0 and row["cold_ratio"] > 0
    assert plot.stat().st_size > 1000 and "| shoal |" in table.read_text() and "shoal" in done.stderr
    assert left_behind() <= before


def _at_least(count: int, tree: psutil.Process) -> list[psutil.Process]:
    """What runs under `tree`, once that are `count` processes."""
    found = tree.children(recursive=True)
    return found if len(found) >= count else []


def test_an_interrupted_bench_leaves_nothing(tmp_path: Path) -> None:
    before = left_behind()
    command = [sys.executable, "-m", "shoal", "bench", "broadcast", "--scenario", scenario(tmp_path), "--policies", "shoal"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, cwd=ROOT) as bench:
        tree = psutil.Process(bench.pid)
        players = until("the switch and three players", lambda: _at_least(4, tree))
        bench.send_signal(signal.SIGINT)
        assert status_of(bench) == 130
        assert bench.stderr is not None and b"interrupted" in bench.stderr.read()
    assert not psutil.wait_procs(players, timeout=PATIENCE_S)[1]
    assert left_behind() <= before


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    for arguments in (
        ("netem", "run", "no-such-scenario"), ("netem", "run", scenario(tmp_path, "speed = 1\n")),
        ("bench", "broadcast", "--policies", "pigeon"), ("bench", "broadcast", "--scenario", "killed-relay"),
    ):  # fmt: skip
        done = shoal(*arguments)
        assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1, done
