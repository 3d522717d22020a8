"""A profile's network for the length of a `with` block: namespaces, devices and back end in a child process of their own.

The child owns all of them. It ends when its stdin does, and kills all programs on its hosts, so that nothing is left when this
process is killed. Thin shell.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from select import select

from pydantic import TypeAdapter

from netem.emulation.backends import AUTO, Backend, Weather, choose, open_backend
from netem.networks.profile import LEARNER, Profile
from p2p.errors import ShoalError
from p2p.processes import python_command, start, wait_or_kill

OWNER = "netem.emulation.underlay"
"""This module, as the program that owns a network."""

START_S = 60.0
"""Seconds that a network has to come up: each host takes some twenty calls of ip and tc."""

NICE = -10
"""Priority of the switch: it is the wire, and must not wait for a processor behind the programs on its hosts."""

ANSWER_S = 5.0
"""Seconds that the child has to answer a question; it only sets rates or reads counters."""

END_S = 20.0
"""Seconds that the child has to kill programs and remove namespaces; then it is killed."""


class Underlay:
    """A network that is up. Made by `underlay`."""

    def __init__(
        self, process: subprocess.Popen[bytes], hosts: dict[str, tuple[str, str]], congestion: str, backend: str
    ) -> None:
        self._process, self._hosts = process, hosts
        self.congestion = congestion
        """TCP congestion control in force, which may not be the one asked for"""
        self.backend = backend
        """the back end that runs it, tc or switch"""

    @property
    def addresses(self) -> dict[str, str]:
        return {name: address for name, (address, _) in self._hosts.items()}

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` on `host`. KeyError for an unknown host."""
        return ["ip", "netns", "exec", self._hosts[host][1], *argv]

    def weather(self) -> Weather:
        """Counts since the last call. ShoalError when the network is gone."""
        return Weather(**self._ask({}))

    def set_rates(self, host: str, up: float, down: float, seconds: float | None = None) -> None:
        """Set the rates (bit/s, 0: an outage) of `host`'s access link from now on or for `seconds`."""
        self._ask({"rates": [host, up, down, seconds]})

    def _ask(self, question: dict) -> dict:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise ShoalError("the emulated network is gone") from None
        return _answer(self._process, ANSWER_S)


@contextmanager
def underlay(profile: Profile, backend: str = AUTO) -> Iterator[Underlay]:
    """Bring `profile` up by that back end. UsageError or ShoalError when that cannot be done."""
    backend, _ = choose(backend, profile)
    command = python_command(OWNER, backend, TypeAdapter(Profile).dump_json(profile).decode())
    # When we are killed it ends by the end of its input: a signal would leave it no time to clear everything away.
    process = start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, outlive=True)
    try:
        state = _answer(process, START_S)
        if "error" in state:
            raise ShoalError(f"network {profile.name} did not come up: {state['error']}")
        yield Underlay(process, state["hosts"], state["congestion"], backend)
    finally:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        wait_or_kill(process, END_S)
        process.stdout.close()


def _answer(process: subprocess.Popen[bytes], wait_s: float) -> dict:
    """The child's next line. The child writes only answers, so lines never queue up. ShoalError when none comes within
    `wait_s`."""
    assert process.stdout is not None
    deadline, line = time.monotonic() + wait_s, b""
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        got = os.read(process.stdout.fileno(), 1 << 16) if left > 0 and select([process.stdout], [], [], left)[0] else b""
        if not got:
            raise ShoalError("the emulated network does not answer")
        line += got
    return json.loads(line)


def _run_network(profile: Profile, name: str) -> None:
    with open_backend(name, profile, f"shoal-{os.getpid()}") as backend:
        hosts = backend.hosts
        _say({"hosts": {n: [p.address, p.namespace] for n, p in hosts.items()}, "congestion": hosts[LEARNER].congestion})
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, NICE)
        over = threading.Event()
        threading.Thread(target=_attend, args=(backend, over), daemon=True).start()
        try:
            backend.run(over.is_set)
        finally:
            for host in hosts.values():
                _kill_in(host.namespace)


def _kill_in(namespace: str) -> None:
    """Kill all programs of a namespace: one that outlives the process that started it would keep the namespace alive."""
    found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    for pid in found.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def _attend(backend: Backend, over: threading.Event) -> None:
    """Answer each line on stdin; at its end the network ends."""
    while line := sys.stdin.readline():
        question = json.loads(line)
        if "rates" in question:
            backend.set_rates(*question["rates"])
            _say({})
        else:
            _say(asdict(backend.weather()))
    over.set()


def _say(values: dict) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    try:
        _run_network(TypeAdapter(Profile).validate_json(sys.argv[2]), sys.argv[1])
    except (ShoalError, OSError) as error:
        _say({"error": str(error)})
        sys.exit(1)
