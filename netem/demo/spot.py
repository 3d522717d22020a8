"""Nodes as spot instances, of the demo and of `shoal bench capacity`: they come and go by a trace, until the learner is done.
Must not know what a node is.

A node that comes back finds its directory, as an instance does that was stopped and kept its disk: its key, and the version
that it had. So the learner knows it, and it has only to catch up.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from netem.networks.availability import FleetChange, spot_moves
from netem.processes.children import LoggedProcess

NODES, STEPS = 6, 100
"""Unless asked otherwise: enough that some are there at any time, and that a run takes a minute or two."""

UP_S, DOWN_S = 20.0, 10.0
"""There and away in the mean: of six nodes one goes every five seconds, and one comes."""

HORIZON_S = 3600.0
"""Longer than any demo."""


@dataclass
class Counts:
    arrivals: int = 0
    departures: int = 0
    killed: int = 0
    """SIGKILL, out of the blue"""
    noticed: int = 0
    """SIGTERM: they hand over, and leave"""
    cut_off: int = 0
    """of those, still there when their seat was taken again"""
    seconds: float = 0.0


class Spot:
    """`start(name)` makes a node's process; `go_on()`, called now and then, does what is due."""

    def __init__(
        self, nodes: int, seed: int, start: Callable[[str], LoggedProcess], say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic, *, up_s: float = UP_S, down_s: float = DOWN_S, horizon_s: float = HORIZON_S,
    ) -> None:  # fmt: skip
        self._due: list[FleetChange] = spot_moves(nodes, up_s, down_s, horizon_s, seed)[::-1]
        self._start, self._say, self._clock = start, say, clock
        self._began = clock()
        self._running: dict[str, LoggedProcess] = {}
        self.counts = Counts()

    def go_on(self) -> None:
        """Start and stop the nodes whose time has come."""
        while self._due and self._due[-1].at <= self._clock() - self._began:
            move = self._due.pop()
            name = f"node-{move.seat + 1}"
            if move.comes:
                self._come(name, move.at)
            else:
                self._go(name, move)

    def stop(self) -> None:
        """Nobody comes or goes any more."""
        if self._due:
            self.counts.seconds = self._clock() - self._began
            self._due.clear()

    def _come(self, name: str, at: float) -> None:
        old = self._running.get(name)
        if old is not None and old.poll() is None:  # its notice is over
            old.send(signal.SIGKILL)
            old.wait()
            self.counts.cut_off += 1
        self._running[name] = self._start(name)
        self.counts.arrivals += 1
        if at:
            self._say(f"{at:.0f} s: {name} is back")

    def _go(self, name: str, move: FleetChange) -> None:
        self._running[name].send(signal.SIGTERM if move.notice else signal.SIGKILL)
        self.counts.departures += 1
        self.counts.noticed += move.notice
        self.counts.killed += not move.notice
        self._say(f"{move.at:.0f} s: {name} " + ("got notice (SIGTERM)" if move.notice else "was taken at once (SIGKILL)"))


class BusyShare(NamedTuple):
    """How busy the learner was."""

    busy: float | None
    """share of its time in which it did not wait for groups; None where too few steps were logged"""
    from_step: int
    """the first step that counts"""


def busy_share(lines: Sequence[Mapping[str, Any]]) -> BusyShare:
    """How busy the learner was in its latest life. `lines`: metrics.jsonl, a line a step. Its first step waits until the first
    node is there, and does not count."""
    last = [line for line in lines if "time/wait_for_batch" in line and line["epoch"] == lines[-1]["epoch"]]
    if len(last) < 2:
        return BusyShare(None, 0)
    took = last[-1]["time"] - last[0]["time"]
    waited = sum(line["time/wait_for_batch"] for line in last[1:])
    return BusyShare(1 - waited / took, last[1]["step"])


def describe_spot(spot: Mapping[str, Any]) -> str:
    """One line of its result."""
    busy = "-" if spot["busy"] is None else f"{spot['busy']:.1%}"
    cut = f", {spot['cut_off']} of them cut off" if spot["cut_off"] else ""
    return (
        f"{spot['departures']} departures in {spot['seconds']:.0f} s ({spot['noticed']} with notice{cut}, "
        f"{spot['killed']} killed), {spot['arrivals']} arrivals; the learner was busy {busy} of its time "
        f"from step {spot['from_step']} on"
    )
