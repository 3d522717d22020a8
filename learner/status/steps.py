"""A run's steps, from metrics.jsonl: the history that counts, the newest steps one by one, the whole run as a curve.

Must not know views, the network or files other than that one.
"""

from __future__ import annotations

import json
import math
import os
import stat
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from learner.status.evaluated import EvalHistory

RECENT = 32
"""Newest steps that are kept one by one: enough that whoever asks once a second misses none of a run of thirty steps a second."""

POINTS = 240
"""Points of a curve at the most, by which its memory and its bytes are bounded; a screen has hardly more columns for one."""

EVALS = 120
"""Evaluations that are kept at the most, for bounded bytes: the first, the newest RECENT, and between them some."""


MOST_LINES = 20_000
"""Lines of a metrics.jsonl that are kept at a time, some 100 MB: of a longer run every second step, every fourth, ..."""

NEWEST_LINES = 256
"""Last lines of it that are all kept: where the run stands, and its latest evaluations."""

LINE_BYTES = 1 << 20
"""Bytes of one line; one that is longer is no line of ours."""

WHOLE_RUN = "reward/mean", "reward/std"
"""Metrics of the whole reward, beside those of its parts."""

SHOWN_PARTS = 8
"""Parts of a reward that views follow over the run: as many as a plot has lines that are told apart."""


def metrics_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a metrics.jsonl, one after the other. What is no line of ours, as one that a crash cut short, is left out.
    None when there is no such file, or when it is none: a device never ends."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return
        long = False
        while raw := file.readline(LINE_BYTES):
            whole, long = not long, not raw.endswith(b"\n") and len(raw) == LINE_BYTES
            if not whole or long:
                continue
            try:
                line = json.loads(raw.decode("utf-8", "replace"))
            except (ValueError, RecursionError):
                continue
            if isinstance(line, dict) and isinstance(line.get("step"), int):
                yield {sys.intern(key): value for key, value in line.items()}


def read_metrics(path: Path, most: int = MOST_LINES) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, at most `most` and the last NEWEST_LINES: of more, those of every second step, every fourth
    and so on, and where an epoch began. [] when there is no such file."""
    kept: list[dict[str, Any]] = []
    last: deque[dict[str, Any]] = deque()
    every, epoch = 1, None

    def take(line: dict[str, Any]) -> None:
        nonlocal every, epoch
        if line["step"] % every and line.get("epoch") == epoch:
            return
        epoch = line.get("epoch")
        kept.append(line)
        if len(kept) > most:
            every *= 2
            begins = [i == 0 or line.get("epoch") != kept[i - 1].get("epoch") for i, line in enumerate(kept)]
            kept[:] = [line for line, first in zip(kept, begins, strict=True) if first or not line["step"] % every][-most:]

    for line in metrics_lines(path):
        last.append(line)
        if len(last) > NEWEST_LINES:
            take(last.popleft())
    return [*kept, *last]


def surviving(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row a step of the history that counts, by step: a new epoch takes back what was done after the step it starts
    from. What several lines say of one step is merged, the later word winning."""
    rows: dict[int, dict[str, Any]] = {}
    epoch = None
    for line in lines:
        step = line["step"]
        if line.get("epoch") != epoch:
            epoch = line.get("epoch")
            start = step - 1 if "time/step" in line else step  # an evaluation before the first step stands at the start
            rows = {s: row for s, row in rows.items() if s <= start}
        known = {k: v for k, v in line.items() if v is not None}
        rows[step] = rows.get(step, {}) | known
    return [rows[s] for s in sorted(rows)]


class StepRow(NamedTuple):
    """One step, or in a curve the mean of neighbouring ones. None: the run's trainer did not say."""

    step: int
    """its number; the last of several"""
    reward: float | None = None
    exact: float | None = None
    """share of sampled answers that were right"""
    held_out: float | None = None
    """share of held-out problems that were answered right"""
    staleness: float | None = None
    """of the oldest trajectory, in steps"""
    tokens: float | None = None
    """tokens trained on"""
    took_s: float | None = None
    """from one optimizer step to the next"""
    waited_s: float | None = None
    """of that, the wait for groups"""
    usd: float | None = None
    """spent until then, by all lives of the run"""
    turns: float | None = None
    """turns of the model in an episode"""
    parts: Mapping[str, float] | None = None
    """named parts of the reward, before their weights; the first SHOWN_PARTS by name"""

    @property
    def busy(self) -> float | None:
        """The share of the step in which the learner did not wait."""
        return busy_share([self])

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens trained on in a second of the step."""
        return pace([self])


KEYS = {
    "reward": "reward/mean", "exact": "exact/mean", "held_out": "eval/exact/mean", "staleness": "off_policy/max",
    "tokens": "perf/tokens", "took_s": "time/step", "waited_s": "time/wait_for_batch", "usd": "cost/total_usd",
    "turns": "episodes/turns_mean",
}  # fmt: skip
"""Field of a `StepRow` -> its name in metrics.jsonl."""

LARGEST = ("staleness", "usd")
"""Fields of which neighbouring steps keep the largest, not the mean."""


def step_row(line: Mapping[str, Any]) -> StepRow:
    """What a line of metrics.jsonl says of its step."""
    values = {field: line.get(key) for field, key in KEYS.items()}
    numbers: dict[str, Any] = {f: v for f, v in values.items() if isinstance(v, (int, float)) and math.isfinite(v)}
    return StepRow(line["step"], parts=parts_of(line) or None, **numbers)


def parts_of(line: Mapping[str, Any], most: int = SHOWN_PARTS) -> dict[str, float]:
    """What a line of metrics.jsonl says of the parts of the reward: the first `most` by name."""
    names = sorted(k for k, v in line.items() if k.startswith("reward/") and k not in WHOLE_RUN and isinstance(v, (int, float)))
    return {name.removeprefix("reward/"): float(line[name]) for name in islice(names, most)}


def busy_share(rows: Iterable[StepRow]) -> float | None:
    """The share of these steps' time in which the learner did not wait for groups; None where no step says."""
    timed = [(r.took_s, min(r.waited_s, r.took_s)) for r in rows if r.took_s is not None and r.waited_s is not None]
    took = sum(t for t, _ in timed)
    return 1 - sum(w for _, w in timed) / took if took else None


def pace(rows: Iterable[StepRow]) -> float | None:
    """Tokens trained on in a second of these steps; None where no step says."""
    timed = [(r.tokens, r.took_s) for r in rows if r.tokens is not None and r.took_s]
    return sum(n for n, _ in timed) / sum(t for _, t in timed) if timed else None


@dataclass(slots=True)
class _Point:
    """Neighbouring steps as one."""

    row: StepRow
    steps: int = 1

    def merge(self, other: _Point) -> None:
        mine, theirs, merged = self.row._asdict(), other.row._asdict(), {}
        for field in StepRow._fields[1:]:
            a, b = mine[field], theirs[field]
            if a is None or b is None:
                merged[field] = b if a is None else a
            elif field in LARGEST:
                merged[field] = max(a, b)
            elif field == "parts":
                mean = lambda x, y: (x * self.steps + y * other.steps) / (self.steps + other.steps)
                merged[field] = {n: mean(a.get(n, b.get(n)), b.get(n, a.get(n))) for n in list(a | b)[:SHOWN_PARTS]}
            else:
                merged[field] = (a * self.steps + b * other.steps) / (self.steps + other.steps)
        self.row, self.steps = StepRow(max(self.row.step, other.row.step), **merged), self.steps + other.steps


class StepHistory:
    """The steps of a run so far, in bounded memory: `recent` one by one, `curve` from the first to the last, `evals` where
    held-out problems were answered, each at its own step and with its own value."""

    def __init__(self, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        self._recent: deque[StepRow] = deque(maxlen=RECENT)
        self._points: list[_Point] = []
        self._evals: list[StepRow] = []
        self._evaluated = EvalHistory()
        self._width = 1
        for line in lines:
            self.add(line)

    def add(self, line: Mapping[str, Any]) -> None:
        """Take a line of metrics.jsonl. A later one of a recent step adds to what the first said, and takes nothing back: an
        evaluation may end after newer steps. Of a step that is not recent only the evaluation is taken."""
        self._evaluated.add(line)
        row = step_row(line)
        if row.held_out is not None:
            self._keep_eval(StepRow(row.step, held_out=row.held_out))
        if self._points and row.step <= self._points[-1].row.step:
            self._add_to_recent(row)
            return
        self._recent.append(row)
        if self._points and self._points[-1].steps < self._width:
            self._points[-1].merge(_Point(row))
        else:
            self._points.append(_Point(row))
        if len(self._points) > POINTS:
            self._width *= 2
            pairs = [self._points[i : i + 2] for i in range(0, len(self._points), 2)]
            for pair in pairs:
                if len(pair) == 2:
                    pair[0].merge(pair[1])
            self._points = [pair[0] for pair in pairs]

    def _add_to_recent(self, row: StepRow) -> None:
        news = {f: v for f, v in row._asdict().items() if v is not None}
        for i, known in enumerate(self._recent):
            if known.step == row.step:
                self._recent[i] = known._replace(**news)
                for point in self._points:
                    if point.steps == 1 and point.row.step == row.step:
                        point.row = self._recent[i]

    def _keep_eval(self, row: StepRow) -> None:
        kept = {one.step: one for one in self._evals} | {row.step: row}
        rows = self._evals = [kept[step] for step in sorted(kept)]
        if len(rows) > EVALS:  # the one that its neighbours are the nearest to says the least
            del rows[min(range(1, len(rows) - RECENT), key=lambda i: rows[i + 1].step - rows[i - 1].step)]

    def take_back(self, step: int) -> None:
        """Forget what came after this step: the trainer goes on from there."""
        while self._points and self._points[-1].row.step > step:
            self._points.pop()
        while self._recent and self._recent[-1].step > step:
            self._recent.pop()
        self._evals = [row for row in self._evals if row.step <= step]
        self._evaluated.take_back(step)

    @property
    def recent(self) -> list[StepRow]:
        return list(self._recent)

    @property
    def curve(self) -> list[StepRow]:
        return [point.row for point in self._points]

    @property
    def evals(self) -> list[StepRow]:
        return list(self._evals)

    def status(self) -> dict[str, Any]:
        """Plain values for the status page: what a step does not say is left out."""
        plain = lambda rows: [{f: v for f, v in row._asdict().items() if v is not None} for row in rows]
        return {
            "recent": plain(self.recent), "curve": plain(self.curve), "held_out": plain(self.evals),
            "evaluated": self._evaluated.status(),
        }  # fmt: skip
