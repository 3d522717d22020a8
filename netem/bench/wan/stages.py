"""Where the seconds of a version go: the stages that the logs tell of, in order, and the time spent queueing for a core.

Pure but for `Queueing`, which reads what the kernel counts for each thread.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from p2p.stages import Reached
from p2p.version import Version

ORDER = (
    "begun", "sealed", "published", "header here", "chunks here", "decoded", "seal here", "checked", "engine staged",
    "engine stops", "weights copied", "engine committed", "on disk", "first token",
)  # fmt: skip
"""The stages as they follow each other. "published": `publish` has returned; it, "begun" and "sealed" are the learner's, the
rest a node's. "engine stops": its last token under the old version. "on disk" is beside "first token"."""


def stage_seconds(lines: Iterable[Reached], version: Version, began_s: float) -> dict[str, float]:
    """Stage -> seconds from `began_s` until `version` first reached it."""
    found: dict[str, float] = {}
    for line in lines:
        if line.version == version:
            found.setdefault(line.stage, line.at_s - began_s)
    return found


def table(versions: Sequence[Mapping[str, Mapping[str, float]]]) -> list[str]:
    """Lines for people, one a stage: seconds since the optimizer step at the median of all nodes and versions, and at the node
    that was last, at the median of the versions. `versions`: of each, node -> `stage_seconds`."""
    lines = [f"{'stage':<18}{'all nodes':>10}{'last node':>10}  s after the optimizer step, medians"]
    lasts = [max(nodes.values(), key=lambda stages: stages.get("first token", 0.0)) for nodes in versions]
    for stage in ORDER:
        every = [stages[stage] for nodes in versions for stages in nodes.values() if stage in stages]
        last = [stages[stage] for stages in lasts if stage in stages]
        if every and last:
            lines.append(f"{stage:<18}{statistics.median(every):>10.3f}{statistics.median(last):>10.3f}")
    return lines


class Queueing:
    """Seconds that the threads of some processes ran, and that they were ready and waited for a core."""

    def __init__(self, processes: Mapping[str, int]) -> None:
        """`processes`: name -> process id. Its children count as "NAME's engine"."""
        self._threads: dict[str, list[Path]] = {}
        for name, pid in processes.items():
            self._threads[name] = [Path(f"/proc/{pid}/task/{pid}/schedstat")]
            for child in psutil.Process(pid).children(recursive=True):
                self._threads.setdefault(f"{name}'s engine", []).append(Path(f"/proc/{child.pid}/task/{child.pid}/schedstat"))
        self._before = self._read()

    def _read(self) -> dict[str, tuple[float, float]]:
        """Name -> seconds run and waited, of its processes' main threads together."""
        found: dict[str, tuple[float, float]] = {}
        for name, files in self._threads.items():
            ran = waited = 0.0
            for file in files:
                with suppress(OSError):  # it ended meanwhile
                    numbers = file.read_text().split()
                    ran, waited = ran + int(numbers[0]) / 1e9, waited + int(numbers[1]) / 1e9
            found[name] = ran, waited
        return found

    def since(self) -> dict[str, tuple[float, float]]:
        """Name -> seconds run and seconds waited for a core since this was made."""
        return {name: (r - self._before[name][0], w - self._before[name][1]) for name, (r, w) in self._read().items()}
