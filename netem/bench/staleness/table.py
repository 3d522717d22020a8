"""A study for people: tables, Markdown, a picture. Must not know how runs are made."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from netem.bench.staleness.cases import Case
from netem.bench.staleness.summary import COLLAPSE, tables

WIDTH = 130
"""Of a table that goes to no terminal."""

SMOOTH = 8
"""Versions whose mean is a point of a curve."""

COLUMNS = 3
"""Panels beside each other."""


def print_summary(result: Mapping[str, Any]) -> None:
    """Tables on stdout."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    for table in tables(result):
        shown = RichTable(title=table.title, title_justify="left")
        for number, name in enumerate(table.columns):
            shown.add_column(name, justify="right" if number else "left")
        for row in table.rows:
            shown.add_row(*row)
        console.print(shown, markup=False)
    console.print(foot(result), markup=False, highlight=False)


def foot(result: Mapping[str, Any]) -> str:
    """What the tables are of."""
    return (
        f"{result['runs']} runs, {result['core_seconds']:.0f} core-seconds, at {', '.join(result['commits'])}. Mean over seeds "
        f"and its 95 % t-interval (number of seeds); fell: last tenth below {COLLAPSE:g} of the run's best tenth."
    )


def markdown(result: Mapping[str, Any]) -> str:
    """The tables in Markdown."""
    lines = list[str]()
    for table in tables(result):
        rule = "|---" + "|---:" * (len(table.columns) - 1) + "|"
        lines += [f"**{table.title}**", "", "| " + " | ".join(table.columns) + " |", rule]
        lines += ["| " + " | ".join(row) + " |" for row in table.rows] + [""]
    return "\n".join([*lines, foot(result), ""])


def write_plot(result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], file: Path, task: str = "reverse") -> None:
    """A panel an objective: right answers by version, a line a staleness, the mean over seeds, thin lines the seeds. The last
    panel: the last tenth by staleness, with intervals."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    series = [s for s in result["series"] if s["task"] == task]
    high = -(-(len(series) + 1) // COLUMNS)
    figure, grid = plt.subplots(high, COLUMNS, figsize=(3.3 * COLUMNS, 2.3 * high), layout="constrained", squeeze=False)
    panels = list(grid.flat)
    ages = sorted({age for s in series for age in s["ages"]})
    colours = {age: plt.get_cmap("viridis")(0.92 * i / max(1, len(ages) - 1)) for i, age in enumerate(ages)}
    for axes, one in zip(panels, series, strict=False):
        for age in one["ages"]:
            curves = _curves(rows, task, one["label"], age)
            for line in curves:
                axes.plot(_smooth(line), color=colours[age], linewidth=0.5, alpha=0.3)
            short = min(map(len, curves))
            mean = [fmean(c[i] for c in curves) for i in range(short)]
            axes.plot(_smooth(mean), color=colours[age], linewidth=1.6, label=f"S = {age}")
        axes.set_title(one["label"], fontsize=9)
        axes.set_ylim(0, 1)
        axes.tick_params(labelsize=7)
    last = panels[len(series)]
    for number, one in enumerate(series):
        found = one["ages"]
        at = [list(ages).index(a) + 0.06 * (number - len(series) / 2) for a in found]
        last.errorbar(
            at, [of["exact"]["mean"] for of in found.values()], yerr=[of["exact"]["half"] or 0 for of in found.values()],
            marker=".", markersize=4, linewidth=0.9, elinewidth=0.7, capsize=1.5, label=one["label"],
        )  # fmt: skip
    last.set_xticks(range(len(ages)), [str(a) for a in ages], fontsize=7)
    last.set_title("last tenth by S, 95 % intervals", fontsize=9)
    last.set_ylim(0, 1)
    last.tick_params(labelsize=7)
    last.legend(fontsize=5.5, ncols=2, frameon=False)
    for axes in panels[len(series) + 1 :]:
        axes.set_visible(False)
    handles = [plt.Line2D([], [], color=colours[a], linewidth=1.6) for a in ages]
    figure.legend(handles, [f"S = {a}" for a in ages], ncols=len(ages), frameon=False, fontsize=8, loc="outside upper center")
    figure.supxlabel("version (optimizer steps)", fontsize=8)
    figure.supylabel("share of sampled answers that are right", fontsize=8)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def _curves(rows: Sequence[Mapping[str, Any]], task: str, label: str, age: int) -> list[list[float]]:
    cases = [(Case(**row["case"]), row["exact"]) for row in rows]
    return [curve for case, curve in cases if (case.task, case.label, case.staleness) == (task, label, age)]


def _smooth(values: Sequence[float]) -> list[float]:
    return [fmean(values[max(0, i - SMOOTH + 1) : i + 1]) for i in range(len(values))]
