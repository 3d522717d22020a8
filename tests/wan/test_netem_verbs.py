"""`shoal netem up|exec|down` as a user runs them. Needs root and TUN."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from netem.emulation.backends import choose
from netem.emulation.background import STATE
from tests.support.watchdog import PATIENCE_S
from tests.wan.test_switch import WHY_NOT, WHY_NOT_TC

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "-")
ROOT = Path(__file__).parents[2]


def shoal(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shoal", "netem", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE_S, check=False)


def refused(*arguments: str) -> str:
    done = shoal(*arguments)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1, done
    return done.stderr


@pytest.fixture
def profile(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / f"test-{os.getpid()}.toml"
    path.write_text('[learner]\npreset = "dc"\n[[nodes]]\ncount = 2\npreset = "home-cable"\ndelay_ms = 30\n')
    yield path
    shoal("down", path.stem)


def state(path: Path) -> dict[str, Any]:
    return json.loads((STATE / f"{path.stem}.json").read_text())


def kill_owner(path: Path) -> None:
    owner = psutil.Process(state(path)["pid"])
    owner.kill()
    psutil.wait_procs([owner], timeout=PATIENCE_S)


def namespaces(path: Path) -> list[str]:
    return [n for n in os.listdir("/run/netns") if n.startswith(f"shoal-{path.stem}-")]


def test_up_exec_down(profile: Path) -> None:
    done = shoal("up", str(profile), "--json")
    assert done.returncode == 0, done
    said = json.loads(done.stdout.splitlines()[-1])
    hosts = said["hosts"]
    there = shoal("exec", profile.stem, "node-1", "cat", "/proc/sys/net/ipv4/tcp_congestion_control")
    assert there.stdout.strip() == said["congestion"] and said["congestion_asked"] == "cubic"
    assert list(hosts) == ["learner", "node-1", "node-2"] and sorted(namespaces(profile)) == sorted(said["namespaces"])
    assert (said["backend"], said["note"]) == choose("auto") and said["note"] in done.stderr
    assert "is up already" in refused("up", str(profile))
    target = hosts["node-2"]["address"]
    served = [sys.executable, "-m", "http.server", "8000", "--directory", str(profile.parent)]
    command = [sys.executable, "-m", "shoal", "netem", "exec", str(profile), "node-2", *served]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, cwd=ROOT) as server:
        fetch = (
            "import sys, time, urllib.request\n"
            "while True:\n"
            "    try: print(urllib.request.urlopen(sys.argv[1], timeout=60).status); break\n"
            "    except OSError: time.sleep(0.1)\n"
        )
        got = shoal("exec", profile.stem, "learner", sys.executable, "-c", fetch, f"http://{target}:8000/{profile.name}")
        server.kill()
    assert got.returncode == 0 and got.stdout == "200\n", got
    assert shoal("exec", profile.stem, "node-1", sys.executable, "-c", "raise SystemExit(7)").returncode == 7
    assert "no host 'node-3'" in refused("exec", profile.stem, "node-3", "true")
    assert "no command" in refused("exec", profile.stem, "node-1")
    assert shoal("down", str(profile)).returncode == 0
    assert not namespaces(profile) and not (STATE / f"{profile.stem}.json").exists()
    assert "no network" in refused("down", profile.stem) and "no network" in refused("exec", profile.stem, "learner", "true")


@pytest.mark.skipif(not WHY_NOT_TC, reason="this kernel has what tc needs")
def test_a_back_end_that_cannot_be_had(profile: Path) -> None:
    assert f"back end tc: {WHY_NOT_TC}" in refused("up", str(profile), "--backend", "tc")
    assert "back end tc: " in refused("run", "small", "--backend", "tc")
    assert shoal("up", str(profile), "--backend", "switch").stderr == ""


def test_what_a_killed_owner_leaves_is_cleared_away(profile: Path) -> None:
    assert shoal("up", str(profile)).returncode == 0
    kill_owner(profile)
    assert len(namespaces(profile)) >= 3
    assert "not up any more" in refused("exec", profile.stem, "learner", "true")
    assert shoal("up", str(profile)).returncode == 0  # over the remains
    kill_owner(profile)
    assert shoal("down", profile.stem).returncode == 0
    assert not namespaces(profile)


def test_bad_profiles_and_names(profile: Path, tmp_path: Path) -> None:
    assert "no such profile" in refused("up", str(tmp_path / "none.toml"))
    profile.write_text(profile.read_text() + "speed = 1\n")
    assert "unknown key" in refused("up", str(profile))
    assert "no such choice" in refused("up", "--backend", "pigeon", str(profile))
    assert "is no name of a network" in refused("down", "no/such")
    assert "unknown argument" in refused("down", "x", "y")
    assert "no such choice" in refused("sideways", "x")
