"""A run's plots as PNG files. Must not know HTML or the network; matplotlib is imported when it draws."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#8a4f9e", "#6b7785"
"""Okabe and Ito's palette: told apart also by readers who do not see red and green."""

SIZE = (8.4, 3.6)
DPI = 120
"""Inches, width and height, and dots for each inch: 1008 by 432 pixels."""

SMOOTH_FROM = 30
"""Steps from which a curve gets a moving average; shorter ones show every point instead."""

Row = Mapping[str, Any]


class Plot(NamedTuple):
    """One plot that was drawn."""

    file: Path
    title: str
    caption: str


class Points(NamedTuple):
    """A curve's points."""

    x: list[int]
    y: list[float]


class ByteUnit(NamedTuple):
    """A unit for sizes on an axis."""

    size: float
    """bytes of one unit"""
    name: str


def draw_plots(lines: Sequence[Row], rows: Sequence[Row], folder: Path, bound: int | None = None) -> list[Plot]:
    """Draw every plot that `rows` have data for, into `folder`. `lines`: all of metrics.jsonl; `rows`: one line for each step
    (see `netem.demo.report.surviving`); `bound`: the bound of staleness, in steps."""
    folder.mkdir(parents=True, exist_ok=True)
    starts = epoch_starts(lines)
    drawn = (
        _learning(rows, starts, folder / "learning.png"),
        _traffic(rows, starts, folder / "traffic.png"),
        _broadcast(rows, starts, folder / "broadcast.png"),
        _staleness(rows, starts, folder / "staleness.png", bound),
        _step_time(rows, starts, folder / "step_time.png"),
        _mismatch(rows, starts, folder / "mismatch.png"),
        _capacity(rows, starts, folder / "capacity.png"),
        _cost(rows, starts, folder / "cost.png"),
    )
    return [plot for plot in drawn if plot is not None]


def epoch_starts(lines: Sequence[Row]) -> dict[int, int]:
    """Epoch -> first step logged in it, for every epoch after the first one: where the learner was started again."""
    first: dict[int, int] = {}
    for line in lines:
        epoch = line.get("epoch")
        if isinstance(epoch, int):
            first.setdefault(epoch, line["step"])
    return {epoch: step for epoch, step in first.items() if epoch != min(first)}


def column(rows: Sequence[Row], key: str, scale: float = 1.0, at: str = "step") -> Points:
    """The points (row[at], row[key] * scale) of the rows that have both, sorted; a later row replaces an earlier one at the same
    x."""
    points = {row[at]: row[key] * scale for row in rows if isinstance(row.get(key), (int, float)) and at in row}
    return Points(sorted(points), [points[x] for x in sorted(points)])


def moving_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean over the `width` values up to and including each."""
    return [sum(values[max(0, i + 1 - width) : i + 1]) / min(width, i + 1) for i in range(len(values))]


def byte_unit(largest: float) -> ByteUnit:
    """The largest binary unit of which `largest` bytes are one or more."""
    for size, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if largest >= size:
            return ByteUnit(size, name)
    return ByteUnit(1, "bytes")


@contextmanager
def _axes(path: Path, title: str, x: str, y: str, starts: Mapping[int, int]) -> Iterator[Any]:
    """An axes to draw on, saved to `path` afterwards. Not through pyplot: that keeps state between figures."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=SIZE, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    ax = figure.subplots()
    yield ax
    for i, (epoch, step) in enumerate(sorted(starts.items())):
        label = None if i else "learner restarted"
        ax.axvline(step, color=GREY, linestyle=":", linewidth=1.2, zorder=0.5, label=label)
        ax.annotate(f"epoch {epoch}", (step, 1), xycoords=("data", "axes fraction"), xytext=(3, -4), fontsize=8,
                    textcoords="offset points", color=GREY, va="top")  # fmt: skip
    ax.set_title(title, loc="left", fontsize=11, fontweight="bold")
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    ax.grid(True, axis="y", color="#e3e7eb", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    if ax.get_legend_handles_labels()[0]:
        # Beside the data, never on it.
        ax.legend(loc="upper left", bbox_to_anchor=(1.005, 1.0), frameon=False, fontsize=9)
    figure.savefig(path)


def _curve(ax: Any, points: Points, label: str, color: str) -> None:
    """A line, if there are points. With many, the raw ones pale behind their moving average."""
    x, y = points
    if not x:
        return
    if len(x) < SMOOTH_FROM:
        ax.plot(x, y, color=color, label=label, linewidth=1.6, marker="o", markersize=3.5)
        return
    width = max(5, len(x) // 20)
    ax.plot(x, y, color=color, alpha=0.25, linewidth=0.9)
    ax.plot(x, moving_mean(y, width), color=color, label=f"{label}\n(mean of {width} steps)", linewidth=1.8)


def _learning(rows: Sequence[Row], starts: Mapping[int, int], path: Path) -> Plot | None:
    title = "Learning"
    exact, reward, held_out = (column(rows, k) for k in ("exact/mean", "reward/mean", "eval/exact/mean"))
    if not (exact[0] or reward[0] or held_out[0]):
        return None
    with _axes(path, title, "optimizer step", "share of answers / reward", starts) as ax:
        _curve(ax, reward, "reward", ORANGE)
        _curve(ax, exact, "exact, sampled", BLUE)
        if held_out[0]:
            ax.plot(*held_out, color=GREEN, marker="D", markersize=6, linewidth=1.2, linestyle="--", zorder=3,
                    label="exact, held out\n(greedy)")  # fmt: skip
        values = [*exact[1], *reward[1], *held_out[1]]
        if min(values) >= 0 and max(values) <= 1:
            ax.set_ylim(0, 1.02)
    return Plot(path, title, "Sampled answers are those trained on, held-out problems are never trained on.")


def _traffic(rows: Sequence[Row], starts: Mapping[int, int], path: Path) -> Plot | None:
    title = "Bytes to bring one version to every node"
    keys = ("broadcast/seed_egress_bytes", "broadcast/peer_bytes", "broadcast/bytes")
    sent, relayed, size = (column(rows, k, at="broadcast/step") for k in keys)
    if not (sent[0] or relayed[0]):
        return None
    divisor, unit = byte_unit(max([*sent[1], *relayed[1], *size[1]]))
    by_learner = {x: v / divisor for x, v in zip(*sent, strict=True)}
    by_peers = {x: v / divisor for x, v in zip(*relayed, strict=True)}
    steps = sorted(by_learner.keys() | by_peers.keys())
    below = [by_learner.get(s, 0.0) for s in steps]
    above = [by_peers.get(s, 0.0) for s in steps]
    wide = 1.0 if len(steps) > 40 else 0.8
    with _axes(path, title, "version (optimizer step)", unit, starts) as ax:
        ax.bar(steps, below, color=BLUE, width=wide, label="sent by the learner")
        ax.bar(steps, above, bottom=below, color=ORANGE, width=wide, label="sent by nodes")
        if size[0]:
            ax.plot(size[0], [v / divisor for v in size[1]], color="black", linestyle="none", marker="_",
                    markersize=12 if len(steps) <= 40 else 4, label="the delta itself")  # fmt: skip
        ax.set_ylim(bottom=0)
    return Plot(path, title, "Where the learner's part meets the mark, it sent each version once and the nodes did the rest.")


def _broadcast(rows: Sequence[Row], starts: Mapping[int, int], path: Path) -> Plot | None:
    title = "Time from publishing a version to serving it"
    half, last = (column(rows, k, at="broadcast/step") for k in ("broadcast/p50_s", "broadcast/max_s"))
    pause = column(rows, "node/pause_s")
    if not (half[0] or last[0]):
        return None
    with _axes(path, title, "version (optimizer step)", "seconds", starts) as ax:
        _curve(ax, last, "last node", RED)
        _curve(ax, half, "median node", BLUE)
        shown = [(x, y) for x, y in zip(*pause, strict=True) if y > 0]
        if shown:
            ax.plot(*zip(*shown, strict=True), color=GREY, linestyle="none", marker=".", markersize=4,
                    label="decoding paused\n(longest node)")  # fmt: skip
        values = [v for v in [*half[1], *last[1], *(y for _, y in shown)] if v > 0]
        if values and max(values) > 50 * min(values):
            ax.set_yscale("log")
        else:
            ax.set_ylim(bottom=0)
    return Plot(path, title, "Nodes go on decoding while a version arrives; the pause is what its installation costs them.")


def _staleness(rows: Sequence[Row], starts: Mapping[int, int], path: Path, bound: int | None) -> Plot | None:
    title = "Staleness of what was trained on"
    mean, largest = column(rows, "off_policy/mean"), column(rows, "off_policy/max")
    if not (mean[0] or largest[0]):
        return None
    with _axes(path, title, "optimizer step", "steps behind", starts) as ax:
        if largest[0]:
            ax.plot(*largest, color=RED, linestyle="none", marker="o", markersize=4, label="oldest trajectory")
        _curve(ax, mean, "mean", BLUE)
        if bound is not None:
            ax.axhline(bound, color="black", linestyle="--", linewidth=1.1, label=f"bound ({bound})")
        ax.set_ylim(-0.08, max([*mean[1], *largest[1], bound or 0, 1]) * 1.12)
        ax.yaxis.get_major_locator().set_params(integer=True)
    return Plot(path, title, "Counted from the version that made a trajectory's first token to the step that trained on it.")


def _step_time(rows: Sequence[Row], starts: Mapping[int, int], path: Path) -> Plot | None:
    title = "Where a step's time goes"
    parts = (
        ("time/wait_for_batch", "waiting for rollouts", ORANGE),
        ("time/train", "training", BLUE),
        ("time/commit", "checkpoint, commit", PURPLE),
        ("time/publish", "publishing", GREEN),
    )
    timed = [r for r in rows if any(isinstance(r.get(k), (int, float)) for k, _, _ in parts)]
    if not timed:
        return None
    steps = [r["step"] for r in timed]
    below = [0.0] * len(timed)
    with _axes(path, title, "optimizer step", "seconds", starts) as ax:
        for key, label, color in parts:
            heights = [float(r.get(key) or 0.0) for r in timed]
            # Bars that touch, without edges: with hundreds of steps they read as an area.
            ax.bar(steps, heights, bottom=below, width=1.0 if len(steps) > 40 else 0.8, color=color, label=label)
            below = [a + b for a, b in zip(below, heights, strict=True)]
        ordinary = sorted(below)[max(0, int(0.95 * len(below)) - 1)]
        if max(below) > 4 * ordinary > 0:  # a first step that waits for nodes must not flatten the others
            ax.set_ylim(0, 2 * ordinary)
            for step, total in zip(steps, below, strict=True):
                if total > 2 * ordinary:
                    ax.annotate(f"{total:.0f} s", (step, 0.995), xycoords=("data", "axes fraction"), ha="left",
                                va="top", fontsize=8, xytext=(5, 0), textcoords="offset points")  # fmt: skip
    return Plot(path, title, "From one optimizer step to the next, as the trainer measures it; evaluations are not in it.")


def _mismatch(rows: Sequence[Row], starts: Mapping[int, int], path: Path) -> Plot | None:
    title = "How far rollouts are from the policy they train"
    mean = column(rows, "mismatch_kl/mean")
    if not mean[0]:
        return None
    with _axes(path, title, "optimizer step", "KL per token (nats)", starts) as ax:
        _curve(ax, mean, "mean", BLUE)
        if min(mean[1]) > 0 and max(mean[1]) > 30 * min(mean[1]):
            ax.set_yscale("log")
    return Plot(path, title, "Staleness raises it; so do numerical differences between the nodes' engines and the trainer.")


def _capacity(rows: Sequence[Row], starts: Mapping[int, int], path: Path) -> Plot | None:
    title = "What the learner needs, and what the active nodes make"
    needed, made = column(rows, "pool/required_tokens_per_s"), column(rows, "pool/supply_tokens_per_s")
    if not needed[0]:
        return None
    with _axes(path, title, "optimizer step", "tokens per second", starts) as ax:
        _curve(ax, needed, "needed", RED)
        _curve(ax, made, "made, or could be", BLUE)
        ax.set_ylim(0, 2.5 * sorted([*needed[1], *made[1]])[int(0.9 * (len(needed[1]) + len(made[1]) - 1))] or 1)
    return Plot(path, title, "From measured steps, dissemination and nodes; a node that is not measured yet counts for nothing.")


def _cost(rows: Sequence[Row], starts: Mapping[int, int], path: Path) -> Plot | None:
    title = "What it cost"
    total = column(rows, "cost/total_usd")
    if not total[0] or not max(total[1]) > 0:
        return None
    with _axes(path, title, "optimizer step", "US dollars so far", starts) as ax:
        ax.plot(*total, color=GREEN, linewidth=1.8, label="all nodes,\nand the learner's\nmachine if it has a price")
        ax.set_ylim(bottom=0)
    return Plot(path, title, "Nodes cost what they say an hour, or what the config says of them, while they generate.")
