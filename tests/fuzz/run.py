"""`python -m tests.fuzz.run --inputs 10000000`: damage valid inputs and read them. Prints what was not refused cleanly, or took
too long or too much; exit status 1 then."""

from __future__ import annotations

import argparse
import resource
import sys
from random import Random
from time import perf_counter
from typing import NamedTuple

from tests.fuzz.mutating import mutate
from tests.fuzz.targets import REFUSALS, Target, targets

SLOW_S, LARGE_KIB = 0.05, 64 * 1024
"""The longest that one input may take, and the most memory that it may add to the process, in KiB."""

TURNS = {"messages": 3000, "part": 100, "header": 30, "table": 30, "record": 10, "seal": 10}
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


def _rss_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def read_once(name: str, target: Target, data: bytes) -> Finding | None:
    """One input. A slow one is read again: the machine may have been busy."""
    before, began = _rss_kib(), perf_counter()
    try:
        target.read(data)
    except REFUSALS:
        pass
    except Exception as error:
        return Finding(name, f"{type(error).__name__}: {error}"[:200], data)
    took, grown = perf_counter() - began, _rss_kib() - before
    if grown > LARGE_KIB:
        return Finding(name, f"{grown} KiB", data)
    if took > SLOW_S:
        again = []
        for _ in range(3):
            began = perf_counter()
            try:
                target.read(data)
            except REFUSALS:
                pass
            again.append(perf_counter() - began)
        if min(again) > SLOW_S:
            return Finding(name, f"{min(again):.3f} s", data)
    return None


def fuzz(inputs: int, seed: int, only: str = "") -> list[Finding]:
    """So many inputs, the targets in turn. The same for the same seed."""
    chance, found = Random(seed), list[Finding]()
    chosen = {name: target for name, target in targets().items() if only in name}
    done = 0
    while done < inputs:
        for name, target in chosen.items():
            for _ in range(min(TURNS.get(name, TURN), inputs - done)):
                finding = read_once(name, target, mutate(target.seeds, chance))
                if finding is not None:
                    found.append(finding)
                done += 1
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="part of a target's name")
    args = parser.parse_args()
    began = perf_counter()
    found = fuzz(args.inputs, args.seed, args.only)
    for finding in found:
        print(finding)
    print(f"{args.inputs} inputs in {perf_counter() - began:.0f} s, {len(found)} findings, {_rss_kib() // 1024} MiB")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
