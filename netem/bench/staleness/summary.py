"""What the runs of a study come to: means over seeds with intervals, collapses, differences to on-policy. Pure numbers.

Must not know how runs are made or drawn. What counts was fixed before the first run was looked at; the largest fall was added
after two runs that swing without ending low.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any, NamedTuple

from netem.bench.staleness.cases import Case

COLLAPSE = 0.5
"""A run collapsed when the last tenth of its versions is right less than this share of what its best tenth was."""

STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101,
    2.093, 2.086,
)  # fmt: skip
"""97.5 % points of Student's t for 1, 2, ... degrees of freedom; beyond, the normal's 1.96."""


class Interval(NamedTuple):
    """A mean over seeds and half of its 95 % t-interval."""

    mean: float
    half: float | None
    """None with one seed"""
    seeds: int

    def __str__(self) -> str:
        return f"{self.mean:.2f}" if self.half is None else f"{self.mean:.2f} ± {self.half:.2f}"


def interval(values: Sequence[float]) -> Interval:
    """Of values that are not none."""
    count = len(values)
    if count == 1:
        return Interval(values[0], None, 1)
    student = STUDENT[count - 2] if count - 2 < len(STUDENT) else 1.96
    return Interval(fmean(values), student * stdev(values) / math.sqrt(count), count)


def tenths(values: Sequence[float]) -> list[float]:
    """Means of ten parts of a run, the last ending with its last value; shorter where it ended early."""
    size = max(1, len(values) // 10)
    ends = range(len(values), size - 1, -size)
    return [fmean(values[end - size : end]) for end in reversed(ends)]


def of_run(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of one run that are summed up."""
    case, parts = row["case"], tenths(row["exact"][1:] or row["exact"])
    last, kl = (0.0 if row["diverged"] else parts[-1]), [v for v in row["steps"]["kl"] if v is not None]
    held_out = row["held_out"]
    found = {
        "exact": last, "best": max(parts), "collapse": float(last < COLLAPSE * max(parts)),
        "fall": max(max(parts[: i + 1]) - part for i, part in enumerate(parts)),
        "area": fmean(row["exact"][1:] or [0.0]), "start": row["exact"][0],
        "held_out": 0.0 if row["diverged"] else held_out[max(held_out, key=int)]["all"],
        "kl": tenths(kl)[-1] if kl else math.nan, "cpu_s": row["cpu_s"],
        "reward": tenths(row["reward"])[-1], "length": tenths(row["length"])[-1],
        "kept_length": fmean(row["kept_length"]), "all_length": fmean(row["length"]), "cut": fmean(row["cut"]),
        "drawn": sum(row["drawn"]) / (len(row["drawn"]) * case["groups"]),
    }  # fmt: skip
    found |= {f"held_out_{k}": v for k, v in held_out[max(held_out, key=int)].items() if k != "all"}
    return found


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """By task, label, and staleness: each number's mean and interval, and its distance to the same seeds at staleness 0."""
    by: dict[tuple[str, str], dict[int, dict[int, dict[str, float]]]] = {}
    constant = dict[str, str]()
    """label -> that without a rule for the learning rate, which changes nothing at staleness 0"""
    for row in rows:
        case = Case(**row["case"])
        of = by.setdefault((case.task, case.label), {}).setdefault(case.staleness, {})
        of[case.seed] = of_run(row)
        constant[case.label] = replace(case, lr_rule="constant").label
    series = [_series(task, label, found, by.get((task, constant[label]), {}).get(0, {})) for (task, label), found in by.items()]
    series.sort(key=lambda s: (s["task"], s["label"]))
    commits = sorted({row["commit"] for row in rows})
    return {"series": series, "runs": len(rows), "commits": commits, "core_seconds": sum(row["cpu_s"] for row in rows)}


def _series(
    task: str, label: str, found: Mapping[int, Mapping[int, Mapping[str, float]]], onpolicy: Mapping[int, Mapping[str, float]]
) -> dict[str, Any]:
    ages = {}
    for age in sorted(found):
        runs = found[age]
        names = list(next(iter(runs.values())))
        numbers = {name: interval([run[name] for run in runs.values() if name in run])._asdict() for name in names}
        shared = sorted(runs.keys() & onpolicy.keys())
        apart = {
            name: interval([runs[s][name] - onpolicy[s][name] for s in shared])._asdict()
            for name in ("exact", "held_out", "area") if shared and age
        }  # fmt: skip
        fell = int(sum(run["collapse"] for run in runs.values()))
        by_seed = {s: round(runs[s]["exact"], 4) for s in sorted(runs)}
        ages[age] = {**numbers, "seeds": sorted(runs), "exact_by_seed": by_seed, "fell": fell, "apart": apart}
    return {"task": task, "label": label, "ages": ages}


def tables(result: Mapping[str, Any]) -> list[Table]:
    """For people."""
    found = list[Table]()
    for task in sorted({s["task"] for s in result["series"]}):
        series = [s for s in result["series"] if s["task"] == task]
        kinds: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
            ("right answers, last tenth, sampled", lambda of: _told(of["exact"]) + _fell(of)),
            ("right answers, held out, greedy", lambda of: _told(of["held_out"])),
            ("right answers, mean of the run", lambda of: _told(of["area"])),
            ("largest fall from one tenth to a later one", lambda of: _told(of["fall"])),
            ("last tenth, less the same seeds' at S = 0", lambda of: _told(of["apart"].get("exact"))),
            ("mismatch KL, last tenth, nats", lambda of: f"{of['kl']['mean']:.3f}"),
        ]
        ages = sorted({age for s in series for age in s["ages"]})
        for title, cell in kinds:
            rows = [[s["label"], *(cell(s["ages"][a]) if a in s["ages"] else "-" for a in ages)] for s in series]
            found.append(Table(f"{task}: {title}", ["", *(f"S = {a}" for a in ages)], rows))
    return found


class Table(NamedTuple):
    """Rows of cells."""

    title: str
    columns: list[str]
    rows: list[list[str]]


def _told(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    text = str(Interval(found["mean"], found["half"], found["seeds"]))
    return f"{text} ({found['seeds']})"


def _fell(of: Mapping[str, Any]) -> str:
    return f", {of['fell']} fell" if of["fell"] else ""
