"""The demo's spot nodes: started, told and killed by the trace; and the share of its time that a learner did not wait."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from learner.status.facts import Fact
from learner.status.report import write_report
from learner.status.run_state import RunState
from netem.demo.spot import UP_S, Spot, busy_share, describe_spot
from netem.processes.children import LoggedProcess


class Process:
    """Ends when killed; hangs on when asked, if it is `stubborn`."""

    def __init__(self, stubborn: bool) -> None:
        self.returncode: int | None = None
        self.stubborn = stubborn

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        if number == signal.SIGKILL or not self.stubborn:
            self.returncode = -9 if number == signal.SIGKILL else 0


class World:
    def __init__(self, nodes: int, stubborn: bool = False) -> None:
        self.now, self.started, self.said, self.children = 0.0, [], [], []
        self.stubborn = stubborn
        self.spot = Spot(nodes, 3, self.start, self.said.append, lambda: self.now)

    def start(self, name: str) -> LoggedProcess:
        child: Any = LoggedProcess(name, Process(self.stubborn), Path(), Path())  # type: ignore[arg-type]
        self.started.append(name)
        self.children.append(child)
        return child

    def until(self, seconds: float) -> None:
        while self.now < seconds:
            self.spot.go_on()
            self.now += 0.5


def test_all_begin_then_come_and_go_and_no_end_is_a_fault() -> None:
    world = World(4)
    world.spot.go_on()
    assert world.started == ["node-1", "node-2", "node-3", "node-4"]
    world.until(20 * UP_S)
    world.spot.stop()
    c = world.spot.counts
    assert c.departures == c.killed + c.noticed > 20 and abs(c.killed - c.noticed) <= 4
    assert c.arrivals == len(world.started) and 0 <= c.arrivals - c.departures <= 4 and c.cut_off == 0
    assert sum(child.process.returncode is None for child in world.children) == c.arrivals - c.departures
    assert not any(child.failed() for child in world.children)
    assert c.seconds == world.now and len(world.said) == c.departures + c.arrivals - 4
    world.until(40 * UP_S)
    assert world.spot.counts.departures == c.departures, "it was stopped"


def test_who_does_not_leave_in_time_is_cut_off_before_the_seat_is_taken_again() -> None:
    world = World(2, stubborn=True)
    world.until(20 * UP_S)
    assert 0 < world.spot.counts.cut_off <= world.spot.counts.noticed
    assert sum(child.process.returncode is None for child in world.children) <= 2


def test_a_status_of_its_own_is_a_fault() -> None:
    world = World(1)
    world.spot.go_on()
    world.children[0].process.returncode = 1
    assert world.children[0].failed()
    world.children[0].send(signal.SIGTERM)
    assert world.children[0].failed()


def test_the_first_step_of_the_last_epoch_does_not_count() -> None:
    step = lambda epoch, step, at, waited: {"epoch": epoch, "step": step, "time": at, "time/wait_for_batch": waited}
    lines = [step(1, 1, 0.0, 9.0), step(1, 2, 1.0, 1.0), step(2, 2, 20.0, 15.0), step(2, 3, 22.0, 0.5), step(2, 4, 24.0, 0.5)]
    assert busy_share(lines) == (0.75, 3)
    assert busy_share(lines[:1]) == (None, 0) and busy_share([]) == (None, 0)


def test_the_report_says_it_in_a_line(tmp_path: Path) -> None:
    counts = {"arrivals": 9, "departures": 5, "killed": 2, "noticed": 3, "cut_off": 0}
    spot = {**counts, "seconds": 60.0, "busy": 0.93, "from_step": 2}
    line = describe_spot(spot)
    assert "5 departures in 60 s" in line and "busy 93.0%" in line
    assert line in write_report(tmp_path, RunState(), extra=[Fact("nodes came and went", line)]).read_text()
