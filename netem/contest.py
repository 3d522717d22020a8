"""A broadcast measured: one player on each host of an emulated network, rounds of one payload each.

`run_contest` is the shell: network, processes, deadlines. What a round's events amount to is `Round`, pure. Must not know what
any player does with its network. Times count from the source's `published` to each node's `verified`.
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
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from netem.players.wire import Account, Command, Expect, Links, Prepare, Publish, Role, Stop, command_line
from netem.profile import LEARNER, Profile
from netem.underlay import Underlay, underlay
from p2p.errors import ShoalError

READY_S = 60.0
ANSWER_S = 60.0
"""For making a payload, a torrent, connections; not for a broadcast, which has the caller's cut."""
STOP_S = 5.0
COPIES = 4
"""Of the payload that a player may hold on disk at once: this round's and the last, whole and in pieces."""

PATH = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]))
"""Where players find their modules, wherever this was started."""

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RoundResult:
    published_at: float
    """CLOCK_MONOTONIC"""
    verified: dict[str, float]
    """node -> seconds after that, of all that got there"""
    source_bytes: int
    """of payload that the source sent"""
    duplicate_bytes: int
    """of payload that nodes received in vain, all together"""
    cpu_s: float
    """of all players, children included"""
    cut_off: bool
    """nodes are missing because the time was up"""
    failures: tuple[str, ...] = ()
    """what went wrong, "HOST: why"; no more rounds are run then, nor after a cut"""
    late_s: float = 0.0
    """the latest that the emulator handed over a packet: above a few ms the machine was too slow for this network"""
    dropped: int = 0
    """packets that found a queue full"""
    congestion: str = ""
    """TCP congestion control in force"""

    @property
    def seconds(self) -> float:
        """Until the last node had it; infinite if one never did."""
        return float("inf") if self.cut_off or self.failures else max(self.verified.values())


class Round:
    """What is known of one round. Feed it every event; pure."""

    def __init__(self, number: int, nodes: Collection[str], source: str, digest: str) -> None:
        self._number, self._nodes, self._source, self._digest = number, frozenset(nodes), source, digest
        self._published: float | None = None
        self._verified: dict[str, float] = {}
        self._accounts: dict[str, Event] = {}
        self.failures: list[str] = []

    def take(self, host: str, event: Event | None) -> None:
        """An event of a player; None says that the player is gone. What belongs to another round is dropped."""
        if event is None or event.get("event") == "failed":
            why = "it ended" if event is None else str(event.get("why", "no reason given"))
            if not any(f.startswith(f"{host}: ") for f in self.failures):
                self.failures.append(f"{host}: {why}")
        elif event.get("round") != self._number:
            pass
        elif event["event"] == "published" and host == self._source:
            self._published = float(event["at"])
        elif event["event"] == "verified" and host in self._nodes:
            if event["digest"] == self._digest:
                self._verified.setdefault(host, float(event["at"]))
            else:
                self.failures.append(f"{host}: verified {event['digest'][:16]}, published was {self._digest[:16]}")
        elif event["event"] == "account":
            self._accounts[host] = event

    @property
    def whole(self) -> bool:
        """Nothing more to wait for: everyone has the payload, or someone failed."""
        return bool(self.failures) or (self._published is not None and self._verified.keys() == self._nodes)

    @property
    def accounted(self) -> bool:
        return bool(self.failures) or self._accounts.keys() == self._nodes | {self._source}

    def result(self, **network: Any) -> RoundResult:
        """As far as it went."""
        began = self._published
        return RoundResult(
            began if began is not None else float("nan"),
            {host: at - began for host, at in sorted(self._verified.items())} if began is not None else {},
            int(self._accounts.get(self._source, {}).get("sent", 0)),
            sum(int(a["duplicates"]) for host, a in self._accounts.items() if host != self._source),
            sum(float(a["cpu_s"]) for a in self._accounts.values()),
            not self.failures and not self.whole, tuple(self.failures), **network,
        )  # fmt: skip


def run_contest(
    profile: Profile,
    player_argv: Callable[[Role], list[str]],
    payload_bytes: int,
    rounds: int,
    seed: int,
    cut_s: float,
    options: dict[str, Any] | None = None,
) -> list[RoundResult]:
    """`rounds` broadcasts of `payload_bytes` from the learner to all nodes of `profile`; a round is cut off after `cut_s`.

    Fewer results than rounds when one was cut off or failed: what its players still send would be in the next one's way.
    UsageError or ShoalError, one line, when network or players do not come up. Blocks; nothing is left behind.
    """
    results: list[RoundResult] = []
    copies = COPIES * payload_bytes * len(profile.hosts)
    with underlay(profile) as network, _folder(copies) as folder:
        with _players(network, player_argv, folder, options or {}) as players:
            for number in range(rounds):
                results.append(_run_round(network, players, number, payload_bytes, seed + number, cut_s))
                if results[-1].cut_off or results[-1].failures:
                    break
    return results


def _run_round(network: Underlay, players: _Players, number: int, size: int, seed: int, cut_s: float) -> RoundResult:
    players.tell([LEARNER], Prepare(number, size, seed))
    prepared = players.gather("prepared", [LEARNER], ANSWER_S)[LEARNER]
    extra = {name: value for name, value in prepared.items() if name not in ("event", "round", "digest")}
    players.tell(players.nodes, Expect(number, prepared["digest"], size, extra))
    players.gather("expecting", players.nodes, ANSWER_S)
    network.weather()
    state = Round(number, players.nodes, LEARNER, prepared["digest"])
    players.tell([LEARNER], Publish(number))
    players.feed(state, lambda: state.whole, cut_s)
    weather = network.weather()
    if not state.failures:
        players.tell(players.names, Account(number))
        players.feed(state, lambda: state.accounted, ANSWER_S)
    return state.result(late_s=weather.late_s, dropped=weather.dropped, congestion=network.congestion)


class _Players:
    """The processes, and one queue of what all of them say."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.nodes = [name for name in names if name != LEARNER]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._logs: dict[str, Path] = {}
        self._events: queue.Queue[tuple[str, Event | None]] = queue.Queue()

    def start(self, name: str, command: list[str], log: Path) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATH}
        with open(log, "wb") as said:
            self._processes[name] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, env=environment, start_new_session=True
            )
        self._logs[name] = log
        threading.Thread(target=self._read, args=(name,), daemon=True).start()

    def tell(self, names: Sequence[str], command: Command) -> None:
        """A player that is gone is not told; its end is an event already."""
        for name in names:
            stdin = self._processes[name].stdin
            assert stdin is not None
            try:
                stdin.write(command_line(command).encode())
                stdin.flush()
            except OSError:
                pass

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

    def feed(self, state: Round, enough: Callable[[], bool], wait_s: float) -> None:
        """Events to `state` until that is enough or the time is up."""
        deadline = time.monotonic() + wait_s
        while not enough() and (said := self._next(deadline)) is not None:
            host, event = said
            state.take(host, {"event": "failed", "why": self._last_words(host)} if event is None else event)

    def end(self) -> None:
        """Everything, whatever state it is in."""
        self.tell(list(self._processes), Stop())
        deadline = time.monotonic() + STOP_S
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                pass
        for process in self._processes.values():
            try:
                os.killpg(process.pid, signal.SIGKILL)  # what it started as well
            except ProcessLookupError:
                pass
            process.wait()
            assert process.stdin is not None
            try:
                process.stdin.close()
            except OSError:
                pass  # what was not written any more

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
        return f"it ended: {lines[-1]}" if lines else "it ended"


@contextmanager
def _players(
    network: Underlay, player_argv: Callable[[Role], list[str]], folder: Path, options: dict[str, Any]
) -> Iterator[_Players]:
    """The source first, then the nodes; all ready."""
    hosts = network.addresses
    players = _Players(list(hosts))
    try:
        for group in ([LEARNER], players.nodes):
            for name in group:
                own = folder / name
                own.mkdir()
                role = Role("source" if name == LEARNER else "node", name, hosts[name], str(own), hosts, LEARNER, options)
                players.start(name, network.command(name, player_argv(role)), folder / f"{name}.log")
            players.gather("ready", group, READY_S)
        players.tell(players.names, Links())
        players.gather("linked", players.names, READY_S)
        yield players
    finally:
        players.end()


@contextmanager
def _folder(room: int) -> Iterator[Path]:
    """An empty folder: in memory where that has `room` bytes, so that no disk is measured."""
    memory = Path("/dev/shm")
    fits = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > room
    with tempfile.TemporaryDirectory(prefix="shoal-", dir=memory if fits else None, ignore_cleanup_errors=True) as folder:
        yield Path(folder)
