"""What the kinds of processes of a hostile run spend of the machine's cores: all of them share it, and in life they would not.

Must not know what the processes do.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence

import psutil

LOOK_S = 1.0
"""Seconds between two looks. What a process spends after the last look at it is not counted."""

Look = tuple[float, Mapping[str, float]]
"""When (seconds since the epoch), and processor seconds of each kind until then."""


class SpentByKind:
    """Processor time of kinds of processes with all that they started; who has ended stays counted."""

    def __init__(self) -> None:
        self.looks = list[Look]()
        self._of_process = dict[tuple[int, float], tuple[str, float]]()

    def due(self) -> bool:
        """A look is to be taken."""
        return not self.looks or time.time() - self.looks[-1][0] >= LOOK_S

    def look(self, kinds: Mapping[int, str]) -> None:
        """`kinds`: of the first process of each tree, by its id."""
        found = {p.pid: p for p in psutil.process_iter(["ppid", "create_time", "cpu_times"])}
        for pid, process in found.items():
            root: int | None = pid
            while root is not None and root not in kinds:
                root = found[root].info["ppid"] if root in found and root > 1 else None
            times = process.info["cpu_times"]
            if root is not None and times is not None:
                self._of_process[pid, process.info["create_time"]] = (kinds[root], times.user + times.system)
        sums = defaultdict[str, float](float)
        for kind, seconds in self._of_process.values():
            sums[kind] += seconds
        self.looks.append((time.time(), dict(sums)))


def cores_taken(looks: Sequence[Look], begin: float, end: float) -> dict[str, float]:
    """Cores that each kind had in the mean, from `begin` to `end` (seconds since the epoch); empty where not two looks were
    taken. Pure."""
    between = [look for look in looks if begin <= look[0] <= end]
    if len(between) < 2 or between[-1][0] <= between[0][0]:
        return {}
    (first, before), (last, after) = between[0], between[-1]
    return {kind: round((seconds - before.get(kind, 0.0)) / (last - first), 2) for kind, seconds in after.items()}
