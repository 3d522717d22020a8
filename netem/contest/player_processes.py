"""A contest's players as processes: start them on their hosts, tell them, hear them, end them. Thin shell.

Must not know what a round is.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from netem.contest.players.events import Command, EndPlayer, Links, Role, command_line
from netem.networks.profile import LEARNER
from netem.processes.children import MODEST
from p2p.errors import ShoalError
from p2p.processes import child_environment, signal_group, start

READY_S = 60.0
"""Until a player that was started says that it is ready: imports, on a busy machine."""

STOP_S = 5.0
"""How long players may take to end once they were told to; what is there then is killed."""

Event = dict[str, Any]


class Trouble:
    """What else has its time while players are heard: nothing, unless a subclass has more to do."""

    @property
    def next_at(self) -> float:
        """CLOCK_MONOTONIC; infinite when nothing is left."""
        return float("inf")

    def act(self) -> None:
        """Do what is due."""

    def heard(self, host: str, event: Event | None) -> None:
        """Before anyone else hears it."""


NO_TROUBLE = Trouble()
"""Nothing happens but what the players do."""


class Players:
    """The processes, and one queue of what all of them say. `launch(name)` starts a host's."""

    def __init__(self, launch: Callable[[Players, str], None]) -> None:
        self._launch = launch
        self.names: list[str] = []
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._logs: dict[str, Path] = {}
        self._events: queue.Queue[tuple[str, Event | None]] = queue.Queue()

    @property
    def nodes(self) -> list[str]:
        return [name for name in self.names if name != LEARNER]

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    def launch(self, name: str) -> None:
        self._launch(self, name)

    def signal(self, name: str, number: signal.Signals) -> None:
        """To everything that `name`'s player started as well."""
        signal_group(self._processes[name], number)

    def start(self, name: str, command: list[str], log: Path) -> None:
        """Start `name`'s player; what it writes to stderr goes to `log`."""
        pipe = subprocess.PIPE
        self._processes[name] = start(command, stdin=pipe, stdout=pipe, stderr=log, environment=child_environment(MODEST))
        self._logs[name] = log
        self.names.append(name)
        threading.Thread(target=self._read, args=(name,), daemon=True).start()

    def tell(self, names: Sequence[str], command: Command) -> None:
        """A player that is gone is not told; its end is an event already."""
        for name in names:
            stdin = self._processes[name].stdin
            assert stdin is not None
            with suppress(OSError):
                stdin.write(command_line(command))
                stdin.flush()

    def gather(self, kind: str, names: Sequence[str], wait_s: float) -> dict[str, Event]:
        """An event of that kind from each of `names`. ShoalError when a player fails or the time is up."""
        got: dict[str, Event] = {}
        deadline = time.monotonic() + wait_s
        while got.keys() != set(names):
            said = self._next(deadline)
            if said is None:
                raise ShoalError(f"no {kind} within {wait_s:g} s from {', '.join(n for n in names if n not in got)}")
            host, event = said
            if event is None or event["event"] == "failed":
                raise ShoalError(f"{host}: {self._last_words(host) if event is None else event.get('why')}")
            if event["event"] == kind:
                got[host] = event
        return got

    def feed(
        self, take: Callable[[str, Event | None], None], enough: Callable[[], bool], wait_s: float, trouble: Trouble = NO_TROUBLE
    ) -> None:
        """Events to `take`, and trouble in its time, until that is enough or the time is up."""
        deadline = time.monotonic() + wait_s
        while not enough():
            said = self._next(min(deadline, trouble.next_at))
            trouble.act()
            if said is None:
                if time.monotonic() >= deadline:
                    return
                continue
            host, event = said
            trouble.heard(host, event)
            take(host, {"event": "failed", "why": self._last_words(host)} if event is None else event)

    def end(self) -> None:
        """Everything, whatever state it is in."""
        self.tell(list(self._processes), EndPlayer())
        deadline = time.monotonic() + STOP_S
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for name, process in self._processes.items():
            self.signal(name, signal.SIGKILL)
            process.wait()
            assert process.stdin is not None
            with suppress(OSError):  # what was not written any more
                process.stdin.close()

    def _next(self, deadline: float) -> tuple[str, Event | None] | None:
        try:
            return self._events.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return None

    def _read(self, name: str) -> None:
        stdout = self._processes[name].stdout
        assert stdout is not None
        with stdout:
            for line in stdout:
                try:
                    event = json.loads(line)
                    event["event"]
                except (ValueError, KeyError, TypeError):
                    event = {"event": "failed", "why": f"no event: {line[:200]!r}"}
                self._events.put((name, event))
        self._events.put((name, None))

    def _last_words(self, name: str) -> str:
        lines = self._logs[name].read_text(errors="replace").strip().splitlines()
        # A group of exceptions ends in a frame of dashes.
        told = [line for line in lines if any(c.isalpha() for c in line)]
        return f"it ended: {told[-1].strip(' |')}" if told else "it ended"


@contextmanager
def open_players(
    hosts: Mapping[str, str], player_argv: Callable[[Role], list[str]], folder: Path, *, options: dict[str, Any],
    on_host: Callable[[str, list[str]], list[str]] = lambda host, command: command, late: Sequence[str] = (),
    sites: Mapping[str, str] | None = None,
) -> Iterator[Players]:
    """The source first, then the nodes but the late ones; all ready and linked. At the end they are gone, whatever they do.

    `hosts`: host -> its address. `on_host(host, command)`: what runs a command there. `sites`: host -> its site.
    """

    def launch(players: Players, name: str) -> None:
        (folder / name).mkdir()
        role = Role(
            role="source" if name == LEARNER else "node", name=name, address=hosts[name], directory=str(folder / name),
            hosts=dict(hosts), source=LEARNER, options=options, late=list(late), site=(sites or {}).get(name, ""),
        )  # fmt: skip
        players.start(name, on_host(name, player_argv(role)), folder / f"{name}.log")

    players = Players(launch)
    try:
        for group in ([LEARNER], [name for name in hosts if name != LEARNER and name not in late]):
            for name in group:
                players.launch(name)
            players.gather("ready", group, READY_S)
        players.tell(players.names, Links())
        players.gather("linked", players.names, READY_S)
        yield players
    finally:
        players.end()


@contextmanager
def open_folder(room: int) -> Iterator[Path]:
    """An empty folder: in memory where that has `room` bytes, so that no disk is measured."""
    memory = Path("/dev/shm")
    fits = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > room
    with tempfile.TemporaryDirectory(prefix="shoal-", dir=memory if fits else None, ignore_cleanup_errors=True) as folder:
        yield Path(folder)
