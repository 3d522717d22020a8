"""A real learner behind a forwarded port trains with real nodes behind NATs, who link with each other as the status says; one
of them gets another address on the way. Needs root, TUN and nft."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from learner.config import build_config, dump_toml
from netem.demo.recipes import RECIPES
from netem.emulation.backends import SWITCH, open_backend
from netem.emulation.homes import why_no_nat
from netem.networks.profile import LEARNER, build_profile
from netem.processes.children import MODEST, run_module
from p2p.processes import child_environment, end, python_command, start
from tests.support.nightly import nightly
from tests.support.watchdog import PATIENCE_S, status_of
from tests.wan.test_switch import WHY_NOT, on_host

pytestmark = [pytest.mark.skipif(bool(WHY_NOT or why_no_nat()), reason=WHY_NOT or why_no_nat() or "-"), pytest.mark.slow]

LINK = {"up_mbit": 100.0, "down_mbit": 100.0, "delay_ms": 5.0}
PROFILE: dict[str, Any] = {
    "mtu": 9000,
    "learner": {**LINK, "nat": "cone", "forward": [4001]},
    "nodes": [
        {"name": "cone", **LINK, "nat": "cone"},
        {"name": "cgnat", **LINK, "nat": "cgnat"},
        {"name": "symmetric", **LINK, "nat": "symmetric"},
    ],
}
STEPS = 30

HOME_ADDRESS = "192.168.1.77/24"
"""What one node's router gives it in place of its address, in the middle of the run."""


@nightly
def test_a_run_through_nats(tmp_path: Path) -> None:
    model, run_dir = tmp_path / "model", tmp_path / "run"
    run_module("netem.demo.recipes", str(model), "reverse", "0", timeout_s=PATIENCE_S)
    settings = RECIPES["reverse"].config(run_dir, model, STEPS, 0)
    with open_backend(SWITCH, build_profile(PROFILE, "test"), "shoal-train") as network:
        hosts = network.hosts
        settings["swarm"] |= {"listen": ["/ip4/0.0.0.0/tcp/4001"], "announce": [f"/ip4/{hosts[LEARNER].address}/tcp/4001"]}
        (tmp_path / "learner.toml").write_text(dump_toml(build_config(settings, "test").model_dump()))
        over = threading.Event()
        thread = threading.Thread(target=network.run, args=(over.is_set,))
        thread.start()
        environment, processes = child_environment(MODEST), []

        def run(host: str, *argv: str, log: str) -> subprocess.Popen[bytes]:
            command = on_host(hosts[host], *python_command("shoal", *argv))
            process = start(command, stdout=tmp_path / log, stderr=subprocess.STDOUT, environment=environment)
            processes.append(process)
            return process

        try:
            learner = run(LEARNER, "learner", str(tmp_path / "learner.toml"), "--json", log="learner.log")
            ticket = run_dir / "ticket.txt"
            deadline = time.monotonic() + PATIENCE_S
            while not ticket.exists():
                assert learner.poll() is None and time.monotonic() < deadline, (tmp_path / "learner.log").read_text()
                time.sleep(0.2)
            for name in ("cone", "cgnat", "symmetric"):
                more = ["--dir", str(tmp_path / name), "--name", name, "--listen", "/ip4/0.0.0.0/tcp/4001"]
                run(name, "node", "--join-file", str(ticket), *more, log=f"{name}.log")
            found: dict[tuple[str, str], dict[str, str]] = {}
            while learner.poll() is None and len(found) < 3:
                assert time.monotonic() < deadline
                command = on_host(hosts[LEARNER], *python_command("shoal", "status", str(run_dir), "--json"))
                done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
                if done.returncode == 0:
                    pairs = json.loads(done.stdout.splitlines()[-1]).get("pairs", [])
                    found = {tuple(sorted((pair["one"], pair["other"]))): pair for pair in pairs}  # type: ignore[misc]
                time.sleep(0.5)
            said = {names: pair["kind"] for names, pair in found.items()}
            logs = "\n".join((tmp_path / f"{name}.log").read_text() for name in ("cone", "cgnat", "symmetric"))
            assert said == {("cgnat", "cone"): "met", ("cgnat", "symmetric"): "relayed", ("cone", "symmetric"): "relayed"}, logs
            # Nobody but the learner has seen it, so nobody knows what kind of NAT it is: it is tried.
            assert "not met in 6 s" in found["cone", "symmetric"]["why"]
            # A new lease: every connection of this node is gone without a word, and it comes back by itself.
            before = (tmp_path / "cone.log").read_text().count("joined run")
            for words in (["flush", "dev", "shoal0"], ["add", HOME_ADDRESS, "dev", "shoal0"]):
                subprocess.run(["ip", "-n", hosts["cone"].namespace, "addr", *words], check=True)
            subprocess.run(["ip", "-n", hosts["cone"].namespace, "route", "add", "default", "via", "192.168.1.1"], check=True)
            while learner.poll() is None and (tmp_path / "cone.log").read_text().count("joined run") == before:
                assert time.monotonic() < deadline
                time.sleep(0.2)
            assert status_of(learner) == 0, (tmp_path / "learner.log").read_text()
            result = json.loads((tmp_path / "learner.log").read_text().splitlines()[-1])
            joined = (tmp_path / "cone.log").read_text().count("joined run")
            assert joined == before + 1, (tmp_path / "cone.log").read_text()
            assert result["step"] == STEPS and {node["name"] for node in result["nodes"]} >= {"cone", "cgnat", "symmetric"}
        finally:
            end(processes, 0)
            over.set()
            thread.join()


