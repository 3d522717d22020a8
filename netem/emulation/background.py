"""An emulated network that stays up between commands: `shoal netem up`, `exec`, `down`. Thin shell.

`up` starts a process of its own that owns namespaces, devices and back end, and lists the hosts in a state file. They are removed
when that process ends. After a SIGKILL they remain, and the next `up` or `down` removes them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from netem.emulation.backends import AUTO, choose, open_backend
from netem.emulation.namespaces import check_namespaces, remove
from netem.networks.profile import LEARNER, Profile, load_profile
from netem.processes.children import wait_for
from p2p.errors import ShoalError, UsageError
from p2p.files import write_whole
from p2p.processes import last_line, python_command, start

OWNER = "netem.emulation.background"
"""This module, as the program that owns a network."""

STATE = Path("/run/shoal-netem")
"""Where the state file of each network lies that is up."""

START_S = 60.0
"""Seconds that a network has to come up: each host takes some twenty calls of ip and tc."""

END_S = 20.0
"""Seconds that a network has to go down after SIGTERM."""


def up(file: Path, backend: str = AUTO) -> dict[str, Any]:
    """Bring a profile's network up. Returns its state (as in the state file), and as `note` why the back end is not tc, or "".
    UsageError when it is up already or cannot be made; ShoalError when it does not come up."""
    check_namespaces()
    profile = load_profile(file)
    path = _state_path(profile.name)
    _clear(path)
    if path.exists():
        raise UsageError(f"network {profile.name} is up already: shoal netem down {profile.name}")
    backend, note = choose(backend, profile)
    STATE.mkdir(mode=0o755, parents=True, exist_ok=True)
    log = path.with_suffix(".log")
    log.unlink(missing_ok=True)
    process = start(
        python_command(OWNER, backend, str(Path(file).resolve()), str(path)), stdout=log, stderr=subprocess.STDOUT, outlive=True
    )
    deadline = time.monotonic() + START_S
    while not path.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise ShoalError(f"network {profile.name} did not come up: {last_line(log)}")
        time.sleep(0.05)
    return {**_read(path), "note": note}


def down(name: str) -> dict[str, Any]:
    """Take a network down, by its name or its profile's file; returns its name and hosts. UsageError when no such network is
    up."""
    path = _find(name)
    state = _read(path)
    if _alive(state):
        os.kill(state["pid"], signal.SIGTERM)
        wait_for(f"the end of network {state['name']} (process {state['pid']})", lambda: not path.exists(), END_S)
    _clear(path)
    return {"name": state["name"], "hosts": list(state["hosts"])}


def command(name: str, host: str, argv: Sequence[str]) -> list[str]:
    """The command that runs `argv` on `host` of the network. UsageError for an unknown host or a network that is not up."""
    path = _find(name)
    state = _read(path)
    if not _alive(state):
        raise UsageError(f"network {state['name']} is not up any more: shoal netem down {state['name']}")
    if host not in state["hosts"]:
        raise UsageError(f"network {state['name']} has no host {host!r}: {', '.join(state['hosts'])}")
    check_namespaces()  # to enter one takes what it took to make it
    return ["ip", "netns", "exec", state["hosts"][host]["namespace"], *argv]


def _find(name: str) -> Path:
    """The state file of a network, by its name or its profile's file. UsageError when it is not up."""
    path = _state_path(load_profile(name).name if Path(name).is_file() else name)
    if not path.exists():
        raise UsageError(f"no network {name} is up (start one with: shoal netem up PROFILE.toml)")
    return path


def _state_path(name: str) -> Path:
    if not name or not all(c.isascii() and (c.isalnum() or c in "-_") for c in name):
        raise UsageError(f"{name!r} is no name of a network: letters, digits, - and _")
    return STATE / f"{name}.json"


def _read(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads(path.read_text())
        return state
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error!r}") from None


def _alive(state: dict[str, Any]) -> bool:
    try:
        process = psutil.Process(state["pid"])
        # A pid may be another's by now; and nobody may have waited for a dead owner.
        return abs(process.create_time() - state["started"]) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _clear(path: Path) -> None:
    """Remove the namespaces and the state file of an owner that was killed."""
    if not path.exists():
        return
    state = _read(path)
    if not _alive(state):
        remove(state["namespaces"])
        path.unlink(missing_ok=True)


def _run_network(profile: Profile, path: Path, name: str) -> None:
    """The owner's main: bring the network up, write the state file, run until SIGTERM."""
    over: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: over.append(number))
    with open_backend(name, profile, f"shoal-{profile.name}") as backend:
        state = {
            "name": profile.name, "pid": os.getpid(), "started": psutil.Process().create_time(), "backend": backend.name,
            "namespaces": backend.namespaces, "mtu": profile.mtu, "scale": profile.scale,
            "congestion": backend.hosts[LEARNER].congestion, "congestion_asked": profile.congestion,
            "hosts": {
                name: {"address": host.address, "inner": host.inner or host.address, "namespace": host.namespace}
                for name, host in backend.hosts.items()
            },
        }  # fmt: skip
        write_whole(path, json.dumps(state))
        backend.run(lambda: bool(over))
    path.unlink(missing_ok=True)


if __name__ == "__main__":
    try:
        _run_network(load_profile(sys.argv[2]), Path(sys.argv[3]), sys.argv[1])
    except ShoalError as error:
        sys.exit(str(error))
