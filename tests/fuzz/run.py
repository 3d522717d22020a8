"""`python -m tests.fuzz.run --inputs 10000000`: damage valid inputs and read them. Prints what was not refused cleanly, or took
too long or too much (exit status 1 then), and a line for each target: inputs, the slowest, and the most memory that one added.

`python -m tests.fuzz.guided` does the same by coverage."""

from __future__ import annotations

import argparse
import os
import re
import resource
import sys
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from time import perf_counter, thread_time
from typing import NamedTuple

from tests.fuzz.mutating import mutate
from tests.fuzz.targets import REFUSALS, Target, targets

SLOW_S, LARGE_KIB = 0.05, 64 * 1024
"""The longest that one input may take, in seconds of a core (other programs may share the machine), and the most memory that it
may add to the process, in KiB."""

TURNS = {"messages": 3000, "part": 100, "header": 30, "table": 30, "record": 10, "seal": 10}
RESET = b"5"
"""Written to /proc/self/clear_refs, it sets the peak of the process's memory to what it has now (proc(5))."""

TURN = 60
"""Inputs of one target before the next has its turn, of TURNS by name and TURN of any other: what a stranger can send without the
head's key, most often; what takes a signature each, a few times."""


class Finding(NamedTuple):
    """An input that was not dealt with as it should be."""

    target: str
    what: str
    data: bytes

    def __str__(self) -> str:
        return f"{self.target}: {self.what}: {self.data[:400].hex()}{'...' if len(self.data) > 400 else ''}"


class PeakMemory:
    """The most memory that this process had since `reset`. Where the system has no such mark (not Linux, /proc closed) it is
    the most that it ever had, and what stays below that is not seen."""

    def __init__(self) -> None:
        self._status = self._mark = -1
        with suppress(OSError):
            self._mark = os.open("/proc/self/clear_refs", os.O_WRONLY)
            self._status = os.open("/proc/self/status", os.O_RDONLY)
            os.pwrite(self._mark, RESET, 0)
            self.resets = b"VmHWM:" in os.pread(self._status, 8192, 0)
            return
        self.resets = False
        """whether `reset` does anything"""

    def __del__(self) -> None:
        for opened in (self._mark, self._status):
            if opened >= 0:
                os.close(opened)

    def reset(self) -> None:
        """The peak is what the process has now."""
        if self.resets:
            os.pwrite(self._mark, RESET, 0)

    def kib(self) -> int:
        """The peak."""
        found = re.search(rb"VmHWM:\s+(\d+) kB", os.pread(self._status, 8192, 0)) if self.resets else None
        return int(found[1]) if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@dataclass
class Tally:
    """Of one target: inputs that were read, the seconds of a core of the slowest, the KiB of the largest."""

    inputs: int = 0
    slowest_s: float = 0.0
    largest_kib: int = 0


class Reading:
    """Reads inputs, and keeps what was wrong (`found`) and what each target took (`tallies`)."""

    def __init__(self) -> None:
        self.found: list[Finding] = []
        self.tallies = defaultdict[str, Tally](Tally)
        self._peak = PeakMemory()

    def read(self, name: str, target: Target, data: bytes) -> None:
        """One input."""
        finding = self._read(name, target, data)
        if finding is not None:
            self.found.append(finding)

    def _read(self, name: str, target: Target, data: bytes) -> Finding | None:
        # An earlier peak hides what comes after it: a header that takes 256 MiB counts as nothing after one of 600.
        self._peak.reset()
        tally, before, began = self.tallies[name], self._peak.kib(), thread_time()
        tally.inputs += 1
        try:
            target.read(data)
        except REFUSALS:
            pass
        except Exception as error:
            return Finding(name, f"{type(error).__name__}: {error}"[:200], data)
        took, grown = thread_time() - began, self._peak.kib() - before
        tally.largest_kib = max(tally.largest_kib, grown)
        if took > tally.slowest_s:
            # A collection of garbage, or a page that had to be found, is not the input's: the least of four tries counts.
            took = min([took, *(_seconds(target, data) for _ in range(3))])
            tally.slowest_s = max(tally.slowest_s, took)
        if grown > LARGE_KIB:
            return Finding(name, f"{grown} KiB", data)
        return Finding(name, f"{took:.3f} s", data) if took > SLOW_S else None


def _seconds(target: Target, data: bytes) -> float:
    began = thread_time()
    try:
        target.read(data)
    except REFUSALS:
        pass
    return thread_time() - began


def fuzz(inputs: int, seed: int, only: str = "") -> Reading:
    """So many inputs, the targets in turn. The same for the same seed."""
    chance, reading = Random(seed), Reading()
    chosen = {name: target for name, target in targets().items() if only in name}
    done = 0
    while done < inputs:
        for name, target in chosen.items():
            for _ in range(min(TURNS.get(name, TURN), inputs - done)):
                reading.read(name, target, mutate(target.seeds, chance))
                done += 1
    return reading


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="part of a target's name")
    args = parser.parse_args()
    began = perf_counter()
    return tell(fuzz(args.inputs, args.seed, args.only), began)


def tell(reading: Reading, began: float) -> int:
    """Print what was found and taken since `began` (of perf_counter); the exit status."""
    for finding in reading.found:
        print(finding)
    for name, tally in reading.tallies.items():
        print(f"{name}: {tally.inputs} inputs, slowest {1000 * tally.slowest_s:.2f} ms, largest {tally.largest_kib} KiB")
    read = sum(tally.inputs for tally in reading.tallies.values())
    print(f"{read} inputs in {perf_counter() - began:.0f} s ({thread_time():.0f} s of a core), {len(reading.found)} findings, "
          f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MiB")  # fmt: skip
    return int(bool(reading.found))


if __name__ == "__main__":
    sys.exit(main())
