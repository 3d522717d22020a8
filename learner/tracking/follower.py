"""What of metrics.jsonl a service has not been told yet: read line by line from where it left off, each step once.

The file is the queue: a service that is slow, dead or begun anew with the run catches up, and the head waits for none of it.
A run that goes back to its last commit writes steps again. A service that cannot take back has the first account of them.
Must not know the services.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from p2p.files import write_whole

LINE_BYTES = 1 << 20
"""Bytes of one line; one that is longer is no line of ours, and is left out."""

OWN = ("step", "epoch", "time")
"""Keys that say where a line belongs."""


class TrackedStep(NamedTuple):
    """What a service is told of a step."""

    step: int
    time: float
    """Unix time"""
    values: dict[str, float]
    back: bool = False
    """what was told of this step and later ones is taken back: the run went on from before it"""


@dataclass(slots=True)
class Told:
    """How far a service has come. Kept in a file of the run's."""

    offset: int = 0
    """bytes of metrics.jsonl that were read"""
    step: int = -1
    """newest step of the trainer's that was told"""
    epoch: int = 0
    """of the line before"""
    evals: dict[str, int] = field(default_factory=dict)
    """evaluation (the beginning of its keys) -> the newest step that was told"""


class MetricsFollower:
    """The news of `metrics`, for a service whose place is kept in `place`. `takes_back`: it can be told that steps are void."""

    def __init__(self, metrics: Path, place: Path, *, takes_back: bool = False) -> None:
        self._metrics, self._place, self._takes_back = metrics, place, takes_back
        self.told = _kept(place)

    def news(self) -> Iterator[TrackedStep]:
        """What was written since the last call, in order; a line without its end waits. OSError as the disk says."""
        try:
            file = open(self._metrics, "rb")
        except FileNotFoundError:
            return
        with file:
            if file.seek(0, 2) < self.told.offset:
                self.told.offset = 0  # somebody wrote another file there: the steps say what is new
            file.seek(self.told.offset)
            long = False
            while raw := file.readline(LINE_BYTES):
                whole = raw.endswith(b"\n")
                if not whole and len(raw) < LINE_BYTES:
                    return  # its end is still to come
                self.told.offset += len(raw)
                if whole and not long and (step := self._step(raw)) is not None:
                    yield step
                long = not whole

    def keep(self) -> None:
        """Remember how far it has come. OSError as the disk says."""
        t = self.told
        write_whole(self._place, json.dumps({"offset": t.offset, "step": t.step, "epoch": t.epoch, "evals": t.evals}))

    def _step(self, raw: bytes) -> TrackedStep | None:
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError):
            return None
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            return None
        step, told, back = line["step"], self.told, False
        numbers = {
            k: float(v)
            for k, v in line.items()
            if k not in OWN and isinstance(v, (int, float)) and abs(v) < 1e300 and math.isfinite(v)
        }
        values: dict[str, float] = {}
        of_step = {k: v for k, v in numbers.items() if not k.startswith("eval/")}
        if of_step:
            said = line.get("epoch")
            epoch = said if isinstance(said, int) else told.epoch
            if self._takes_back and epoch != told.epoch and step <= told.step:
                told.step, back = step - 1, True
                told.evals = {of: min(newest, step - 1) for of, newest in told.evals.items()}
            told.epoch = epoch
            if step > told.step:
                told.step = step
                values |= of_step
        values |= self._new_evals(step, {k: v for k, v in numbers.items() if k.startswith("eval/")})
        when = line.get("time")
        return TrackedStep(step, float(when) if isinstance(when, (int, float)) else 0.0, values, back) if values else None

    def _new_evals(self, step: int, values: dict[str, float]) -> dict[str, float]:
        new = {}
        latest = dict(self.told.evals)
        for key, value in values.items():
            parts = key.split("/")
            of = "/".join(parts[:2]) if len(parts) > 2 and parts[1] not in ("exact", "reward", "completions") else "eval"
            if step > self.told.evals.get(of, -1):
                new[key], latest[of] = value, step
        self.told.evals = latest
        return new


def _kept(place: Path) -> Told:
    try:
        values: Any = json.loads(place.read_text(encoding="utf-8"))
        evals = {str(name): int(step) for name, step in values["evals"].items()}
        return Told(int(values["offset"]), int(values["step"]), int(values["epoch"]), evals)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Told()
