"""How much memory a peer takes for one large version: `shoal bench memory`. A source and a node, real players over loopback.

Counted is anonymous memory (RssAnon) above what the same process had when it was linked and idle. Files are not: chunks lie in
the store, states are mapped. Thin shell; needs neither root nor an emulated network.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from netem.contest.contest import ANSWER_S, Round, prepare_round
from netem.contest.player_processes import open_players
from netem.contest.players import peer_argv
from netem.contest.players.events import AskAccount, Publish
from netem.networks.profile import LEARNER
from p2p.errors import ShoalError, UsageError
from p2p.limits import DEFAULT_SEGMENT, MIB

BOUND = 300 * MIB
"""Above idle, of source and node, for a version of 1 GiB."""

SAMPLE_S = 0.05
"""Seconds between two looks at a process: short, since a peak may last only as long as one segment is decoded."""

NODE = "node-1"
"""Name of the peer that receives."""

COPIES = 5
"""Copies of the payload that the disk must have room for: chunks and state of both peers, and one to spare."""


def measure_memory(payload_bytes: int, folder: Path | None = None, cut_s: float = 600.0) -> dict[str, Any]:
    """One version of `payload_bytes` from a source to a node, both on this machine, files under `folder` (default: where
    temporary files go). Peaks are from the moment the source begins to make the state. UsageError where the disk has no room;
    ShoalError when it does not get there. Blocks."""
    if payload_bytes < 1:
        raise UsageError(f"a payload of {payload_bytes} bytes")
    with tempfile.TemporaryDirectory(prefix="shoal-memory-", dir=folder) as name:
        free = shutil.disk_usage(name).free
        if free < COPIES * payload_bytes:
            raise UsageError(f"{name} has {free >> 20} MiB free, {COPIES * payload_bytes >> 20} are needed")
        return _measure(payload_bytes, Path(name), cut_s)


def _measure(size: int, folder: Path, cut_s: float) -> dict[str, Any]:
    # Addresses of their own: another contest may be on this machine.
    last = f"{os.getpid() >> 8 & 255}.{os.getpid() & 255}"
    hosts = {name: f"127.{net + (os.getpid() >> 16)}.{last}" for name, net in ((LEARNER, 64), (NODE, 128))}
    options = {"segment_bytes": DEFAULT_SEGMENT}  # as a run has it unless told otherwise; contests have smaller ones
    with (
        open_players(hosts, peer_argv("shoal"), folder, options=options) as players,
        Anonymous({name: players.pid(name) for name in hosts}) as anonymous,
    ):
        idle = anonymous.mark()
        state = Round(1, [NODE], LEARNER, prepare_round(players, 1, size, 1).digest)
        players.tell([LEARNER], Publish(1))
        players.feed(state.take, lambda: state.whole, cut_s)
        players.tell(list(hosts), AskAccount(1))
        players.feed(state.take, lambda: state.accounted, ANSWER_S)
        peak = anonymous.peak
    result = state.result()
    if result.failures or result.cut_off:
        raise ShoalError("; ".join(result.failures) or f"not there after {cut_s:g} s")
    above = {name: peak[name] - idle[name] for name in hosts}
    return {
        "ok": max(above.values()) <= BOUND, "payload_bytes": size, "bound_bytes": BOUND, "seconds": result.seconds,
        "samples": anonymous.samples, "hosts": {n: {"idle_bytes": idle[n], "above_idle_bytes": above[n]} for n in hosts},
    }  # fmt: skip


def describe(result: dict[str, Any]) -> str:
    """One line a host, and the verdict."""
    lines = [f"{result['payload_bytes']:,} bytes in {result['seconds']:.1f} s, looked at {result['samples']} times"]
    for name, host in result["hosts"].items():
        lines.append(f"{name}: {host['above_idle_bytes'] / MIB:.0f} MiB above the {host['idle_bytes'] / MIB:.0f} MiB of idle")
    lines.append(f"{'within' if result['ok'] else 'over'} the bound of {result['bound_bytes'] / MIB:.0f} MiB")
    return "\n".join(lines)


class Anonymous:
    """Anonymous memory of processes, looked at every SAMPLE_S until `stop`."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids, self._over, self._lock = pids, threading.Event(), threading.Lock()
        self.peak = self._look()
        self.samples = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def mark(self) -> dict[str, int]:
        """What it is now; the peak begins anew."""
        with self._lock:
            self.peak = self._look()
            return dict(self.peak)

    def __enter__(self) -> Anonymous:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Look no more."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(SAMPLE_S):
            with self._lock:
                now = self._look()
                self.peak = {name: max(self.peak[name], now[name]) for name in now}
                self.samples += 1

    def _look(self) -> dict[str, int]:
        return {name: anonymous_bytes(pid) for name, pid in self._pids.items()}


def anonymous_bytes(pid: int) -> int:
    """RssAnon of a process, in bytes; 0 when it is gone."""
    try:
        memory = psutil.Process(pid).memory_info()
    except psutil.NoSuchProcess:
        return 0
    return int(memory.rss - memory.shared)
