"""A real learner behind a forwarded port trains with real nodes behind NATs, who link with each other as the status says; one
of them gets another address on the way. And over IPv6, behind firewalls. Needs root, TUN and nft."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from learner.config import build_config, dump_toml
from netem.demo.recipes import RECIPES
from netem.emulation.backends import SWITCH, open_backend
from netem.emulation.homes import why_no_nat
from netem.emulation.namespaces import HostNamespace
from netem.networks.profile import LEARNER, build_profile
from netem.processes.children import MODEST, run_module
from p2p.ip import tcp_multiaddr
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


IPV6: dict[str, Any] = {
    "ipv6": "only",
    "mtu": 9000,
    "learner": {**LINK, "nat": "firewall", "forward": [4001]},
    "nodes": [{"name": "wall", "count": 2, **LINK, "nat": "firewall"}],
}


class LiveRun:
    """A learner on an emulated network, and nodes that join it."""

    def __init__(self, folder: Path, hosts: dict[str, HostNamespace], any_address: str) -> None:
        self.hosts, self.deadline = hosts, time.monotonic() + PATIENCE_S
        self._folder, self._listen = folder, any_address
        self._environment = child_environment(MODEST)
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, host: str, *argv: str) -> subprocess.Popen[bytes]:
        command = on_host(self.hosts[host], *python_command("shoal", *argv))
        log = self._folder / f"{host}.log"
        process = start(command, stdout=log, stderr=subprocess.STDOUT, environment=self._environment)
        self.processes.append(process)
        return process

    def said(self, *hosts: str) -> str:
        return "\n".join((self._folder / f"{host}.log").read_text() for host in hosts)

    def train(self, *names: str) -> None:
        """The learner, and nodes of these names, each on its host."""
        model, run_dir = self._folder / "model", self._folder / "run"
        run_module("netem.demo.recipes", str(model), "reverse", "0", timeout_s=PATIENCE_S)
        settings = RECIPES["reverse"].config(run_dir, model, STEPS, 0)
        settings["swarm"] |= {"listen": [self._listen], "announce": [tcp_multiaddr(self.hosts[LEARNER].address, 4001)]}
        (self._folder / "learner.toml").write_text(dump_toml(build_config(settings, "test").model_dump()))
        self.learner = self.start(LEARNER, "learner", str(self._folder / "learner.toml"), "--json")
        while not (run_dir / "ticket.txt").exists():
            assert self.learner.poll() is None and time.monotonic() < self.deadline, self.said(LEARNER)
            time.sleep(0.2)
        for name in names:
            more = ["--dir", str(self._folder / name), "--name", name, "--listen", self._listen]
            self.start(name, "node", "--join-file", str(run_dir / "ticket.txt"), *more)

    def pairs(self, count: int) -> dict[tuple[str, str], dict[str, str]]:
        """How nodes are linked, as the status says, once it knows so many pairs."""
        found: dict[tuple[str, str], dict[str, str]] = {}
        while self.learner.poll() is None and len(found) < count:
            assert time.monotonic() < self.deadline
            command = on_host(self.hosts[LEARNER], *python_command("shoal", "status", str(self._folder / "run"), "--json"))
            done = subprocess.run(command, capture_output=True, text=True, env=self._environment, check=False)
            if done.returncode == 0:
                pairs = json.loads(done.stdout.splitlines()[-1]).get("pairs", [])
                found = {tuple(sorted((pair["one"], pair["other"]))): pair for pair in pairs}  # type: ignore[misc]
            time.sleep(0.5)
        return found

    def result(self) -> dict[str, Any]:
        """What the learner says at its end."""
        assert status_of(self.learner) == 0, self.said(LEARNER)
        return json.loads(self.said(LEARNER).splitlines()[-1])


@contextmanager
def live_run(folder: Path, profile: dict[str, Any], any_address: str) -> Iterator[LiveRun]:
    with open_backend(SWITCH, build_profile(profile, "test"), "shoal-train") as network:
        over = threading.Event()
        thread = threading.Thread(target=network.run, args=(over.is_set,))
        thread.start()
        run = LiveRun(folder, network.hosts, any_address)
        try:
            yield run
        finally:
            end(run.processes, 0)
            over.set()
            thread.join()


@nightly
def test_a_run_through_nats(tmp_path: Path) -> None:
    names = "cone", "cgnat", "symmetric"
    with live_run(tmp_path, PROFILE, "/ip4/0.0.0.0/tcp/4001") as run:
        run.train(*names)
        found = run.pairs(3)
        said = {pair: row["kind"] for pair, row in found.items()}
        met = {("cgnat", "cone"): "met", ("cgnat", "symmetric"): "relayed", ("cone", "symmetric"): "relayed"}
        assert said == met, run.said(*names)
        # Nobody but the learner has seen it, so nobody knows what kind of NAT it is: it is tried.
        assert "not met in 6 s" in found["cone", "symmetric"]["why"]
        # A new lease: every connection of this node is gone without a word, and it comes back by itself.
        before = run.said("cone").count("joined run")
        for words in (["flush", "dev", "shoal0"], ["add", HOME_ADDRESS, "dev", "shoal0"]):
            subprocess.run(["ip", "-n", run.hosts["cone"].namespace, "addr", *words], check=True)
        subprocess.run(["ip", "-n", run.hosts["cone"].namespace, "route", "add", "default", "via", "192.168.1.1"], check=True)
        while run.learner.poll() is None and run.said("cone").count("joined run") == before:
            assert time.monotonic() < run.deadline
            time.sleep(0.2)
        result = run.result()
        assert run.said("cone").count("joined run") == before + 1, run.said("cone")
        assert result["step"] == STEPS and {node["name"] for node in result["nodes"]} >= set(names)


@nightly
def test_a_run_over_ipv6(tmp_path: Path) -> None:
    """No host has an IPv4 address, and each is behind a firewall; the learner's lets one port in."""
    with live_run(tmp_path, IPV6, "/ip6/::/tcp/4001") as run:
        run.train("wall-1", "wall-2")
        said = {pair: row["kind"] for pair, row in run.pairs(1).items()}
        assert said == {("wall-1", "wall-2"): "met"}, run.said("wall-1", "wall-2")
        result = run.result()
        assert result["step"] == STEPS and {node["name"] for node in result["nodes"]} == {"wall-1", "wall-2"}
        assert all(node["tokens"] for node in result["nodes"])
