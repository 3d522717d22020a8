"""What a run's plots are drawn with: colours, points from lines of metrics.jsonl, curves and stacked bars.

Must not know which plots there are, or the page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#8a4f9e", "#6b7785"
"""Okabe and Ito's palette: told apart also by readers who do not see red and green."""

INK, GRID = "#1c2530", "#e3e7eb"
"""Of text and of the lines behind the data, on light ground."""

NAMES = {BLUE: "blue", ORANGE: "orange", GREEN: "green", RED: "red", PURPLE: "purple", GREY: "grey", INK: "ink", GRID: "grid"}
"""A colour -> what the page calls it."""

MOST_POINTS = 400
"""Points of one curve: a page of a long run stays small, and nobody sees more on a screen."""

MOST_BARS = 60
"""Steps up to which each has a bar of its own; more are drawn as areas."""

SMOOTH_FROM = 30
"""Steps from which a curve gets a moving average; shorter ones show every point instead."""

Row = Mapping[str, Any]


class Points(NamedTuple):
    """A curve's points."""

    x: list[int]
    y: list[float]


def column(rows: Sequence[Row], key: str, at: str = "step") -> Points:
    """The points (row[at], row[key]) of the rows that have both, sorted; a later row replaces an earlier one at the same x."""
    points = {row[at]: row[key] for row in rows if isinstance(row.get(key), (int, float)) and at in row}
    return Points(sorted(points), [points[x] for x in sorted(points)])


def thinned(points: Points) -> Points:
    """At most MOST_POINTS of them, each the mean of its neighbours."""
    count = len(points.x)
    if count <= MOST_POINTS:
        return points
    cuts = [i * count // MOST_POINTS for i in range(MOST_POINTS + 1)]
    ends = list(pairwise(cuts))
    return Points([points.x[(a + b) // 2] for a, b in ends], [sum(points.y[a:b]) / (b - a) for a, b in ends])


def moving_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean over the `width` values up to and including each."""
    return [sum(values[max(0, i + 1 - width) : i + 1]) / min(width, i + 1) for i in range(len(values))]


def curve(ax: Any, points: Points, label: str, color: str) -> None:
    """A line, if there are points. With many, the raw ones pale behind their moving average."""
    x, y = thinned(points)
    if not x:
        return
    if len(x) < SMOOTH_FROM:
        ax.plot(x, y, color=color, label=label, linewidth=1.6, marker="o", markersize=3.5)
        return
    width = max(5, len(x) // 20)
    whole = width * max(1, len(points.x) // len(x))
    ax.plot(x, y, color=color, alpha=0.25, linewidth=0.9)
    ax.plot(x, moving_mean(y, width), color=color, label=f"{label} (mean of {whole} steps)", linewidth=1.8)


def stacked(ax: Any, steps: Sequence[int], parts: Sequence[tuple[str, str, Mapping[int, float]]]) -> list[float]:
    """Bars of (label, colour, step -> height) on each other, areas where there are many; returns how high they are together."""
    below = [0.0] * len(steps)
    for label, color, by_step in parts:
        heights = [by_step.get(step, 0.0) for step in steps]
        above = [a + b for a, b in zip(below, heights, strict=True)]
        if len(steps) <= MOST_BARS:
            ax.bar(steps, heights, bottom=below, width=0.8, color=color, label=label)
        else:
            low, high = thinned(Points(list(steps), below)), thinned(Points(list(steps), above))
            ax.fill_between(low.x, low.y, high.y, step="mid", color=color, label=label, linewidth=0)
        below = above
    return below
