"""A run's plots as SVG that a page takes in. Must not know the page or the network; matplotlib is imported when it draws.

Colours are names of the page's (`var(--blue)`), so that one drawing is right on light and on dark ground. Text stays text.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from learner.status.curves import (
    BLUE,
    GREEN,
    GREY,
    GRID,
    INK,
    NAMES,
    ORANGE,
    PURPLE,
    RED,
    Row,
    column,
    curve,
    stacked,
    thinned,
)
from learner.status.evaluated import eval_points
from learner.status.steps import SHOWN_PARTS, parts_of
from learner.status.words import plain_text

EVAL = "eval "
"""What the name of an evaluation's plot begins with."""

MOST_EVALS = 33
"""Evaluations that have a plot: as many as a configuration may name, and the default one."""

SIZE = (4.9, 2.9)
"""Inches, width and height. Small, so that text is legible where a telephone shows the plot at 370 pixels."""

class Key(NamedTuple):
    """What a colour of a plot means."""

    label: str
    colour: str
    """its name on the page"""
    kind: str
    """line, dashed, mark or area"""


class Plot(NamedTuple):
    """One plot that was drawn."""

    name: str
    title: str
    caption: str
    keys: tuple[Key, ...]
    svg: str


class Drawing(NamedTuple):
    """How a plot is drawn."""

    name: str
    """for the page"""
    title: str
    draw: Callable[[Any, Sequence[Row], int | None], None]
    """told the axes, a line for each step, and the bound of staleness; it draws nothing where data are lacking"""
    y: str
    """what the vertical axis shows, unless `draw` says"""
    caption: str
    x: str = "optimizer step"


class ByteUnit(NamedTuple):
    """A unit for sizes on an axis."""

    size: float
    """bytes of one unit"""
    name: str


def draw_plots(lines: Sequence[Row], rows: Sequence[Row], bound: int | None = None) -> list[Plot]:
    """Every plot that `rows` have data for. `lines`: all of metrics.jsonl; `rows`: one line for each step
    (see `learner.status.steps.surviving`); `bound`: the bound of staleness, in steps."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    ink = {"text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "axes.edgecolor": GREY}
    # The salt makes the same drawing the same bytes.
    plain = {"svg.fonttype": "none", "svg.hashsalt": "shoal", "font.size": 9, "axes.facecolor": "none"}
    starts, drawn = epoch_starts(lines), []
    with rc_context({**ink, **plain}):
        for drawing in (*DRAWINGS, *_eval_drawings(rows)):
            # Not through pyplot: that keeps state between figures.
            figure = Figure(figsize=SIZE, layout="constrained", facecolor="none")
            ax = figure.subplots()
            ax.set_ylabel(drawing.y)
            drawing.draw(ax, rows, bound)
            if ax.has_data():
                _dress(ax, drawing, starts)
                drawn.append(Plot(drawing.name, drawing.title, drawing.caption, _keys(ax), _svg(figure)))
    return drawn


def _svg(figure: Any) -> str:
    """For a page: without a head or a size of its own, and with the page's colours."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = out.getvalue()
    text = text[text.index("<svg") :]
    head, body = text.split(">", 1)
    box = head.split('viewBox="', 1)[1].split('"', 1)[0]
    for colour, name in NAMES.items():
        body = body.replace(colour, f"var(--{name})")
    return f'<svg viewBox="{box}" role="img" xmlns:xlink="http://www.w3.org/1999/xlink">{body}'


def epoch_starts(lines: Sequence[Row]) -> dict[int, int]:
    """Epoch -> first step logged in it, for every epoch after the first one: where the learner was started again."""
    first: dict[int, int] = {}
    for line in lines:
        epoch = line.get("epoch")
        if isinstance(epoch, int):
            first.setdefault(epoch, line["step"])
    return {epoch: step for epoch, step in first.items() if epoch != min(first)}


def byte_unit(largest: float) -> ByteUnit:
    """The largest binary unit of which `largest` bytes are one or more."""
    for size, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if largest >= size:
            return ByteUnit(size, name)
    return ByteUnit(1, "bytes")


def _dress(ax: Any, drawing: Drawing, starts: Mapping[int, int]) -> None:
    """Labels, a grid, and where the learner was started again."""
    from matplotlib.ticker import MaxNLocator

    for epoch, step in sorted(starts.items()):
        ax.axvline(step, color=GREY, linestyle=":", linewidth=1.2, zorder=0.5)
        ax.annotate(f"epoch {epoch}", (step, 1), xycoords=("data", "axes fraction"), xytext=(3, -4), fontsize=8,
                    textcoords="offset points", color=GREY, va="top")  # fmt: skip
    ax.set_xlabel(drawing.x)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    ax.grid(True, axis="y", color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def _keys(ax: Any) -> tuple[Key, ...]:
    """The legend: the page writes it, since it wraps as the screen has room."""
    from matplotlib.colors import to_hex

    keys = []
    for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
        if hasattr(handle, "get_linestyle") and hasattr(handle, "get_marker"):
            line = handle.get_linestyle()
            kind, colour = "mark" if line == "None" else "dashed" if line == "--" else "line", handle.get_color()
        else:
            part = handle.patches[0] if hasattr(handle, "patches") else handle
            face = part.get_facecolor()
            kind, colour = "area", face if hasattr(part, "get_width") else face[0]
        keys.append(Key(label, NAMES.get(to_hex(colour), "ink"), kind))
    return tuple(keys)


def _learning(ax: Any, rows: Sequence[Row], bound: int | None) -> None:
    exact, reward, held_out = (column(rows, k) for k in ("exact/mean", "reward/mean", "eval/exact/mean"))
    curve(ax, reward, "reward", ORANGE)
    curve(ax, exact, "exact, sampled", BLUE)
    if held_out[0]:
        ax.plot(*held_out, color=GREEN, marker="D", markersize=6, linewidth=1.2, linestyle="--", zorder=3,
                label="held out (greedy)")  # fmt: skip
    values = [*exact[1], *reward[1], *held_out[1]]
    if values and min(values) >= 0 and max(values) <= 1:
        ax.set_ylim(0, 1.02)


def _parts(ax: Any, rows: Sequence[Row], bound: int | None) -> None:
    names = sorted({name for row in rows for name in parts_of(row)})[:SHOWN_PARTS]
    for name, colour in zip(names, (BLUE, ORANGE, GREEN, RED, PURPLE, GREY, INK, BLUE), strict=False):
        curve(ax, column(rows, f"reward/{name}"), name, colour)


def _episodes(ax: Any, rows: Sequence[Row], bound: int | None) -> None:
    mean, most = column(rows, "episodes/turns_mean"), column(rows, "episodes/turns_max")
    if not mean.x:
        return
    curve(ax, mean, "mean turns", BLUE)
    ax.plot(*thinned(most), color=RED, linestyle="none", marker="_", markersize=7, label="most turns")
    ax.set_ylim(0, 1.12 * max([*mean.y, *most.y, 1]))


def _ends(ax: Any, rows: Sequence[Row], bound: int | None) -> None:
    parts = (("done", "its environment", GREEN), ("length", "no tokens left", ORANGE), ("turns", "no turns left", BLUE),
             ("time", "time", RED))  # fmt: skip
    told = [row for row in rows if isinstance(row.get("episodes/over_done"), (int, float))]
    if not told:
        return
    by_step = lambda why: {row["step"]: float(row.get(f"episodes/over_{why}") or 0.0) for row in told}
    heights = [(label, colour, by_step(why)) for why, label, colour in parts if any(by_step(why).values())]
    stacked(ax, [row["step"] for row in told], heights)
    ax.set_ylim(0, 1.02)


def _eval_drawings(rows: Sequence[Row]) -> list[Drawing]:
    """A plot for each evaluation that `rows` have results of, and the default one with its errors."""
    found: dict[str, None] = {}
    for row in rows:
        found |= dict.fromkeys(eval_points(row))
    caption = "At its version's step. Bars are standard errors over prompts; a ring marks what rests on some of them only."
    return [
        Drawing(f"{EVAL}{name}", f"Evaluation {plain_text(name, 60)}" if name else "Evaluation of held-out problems",
                partial(_evaluation, f"eval/{name}/" if name else "eval/"), y="exact / reward", caption=caption)
        for name in sorted(found)[:MOST_EVALS]
    ]  # fmt: skip


def _evaluation(prefix: str, ax: Any, rows: Sequence[Row], bound: int | None) -> None:
    values: list[float] = []
    for of, colour in (("reward", ORANGE), ("exact", BLUE)):
        x, y = column(rows, f"{prefix}{of}/mean")
        if not x:
            continue
        errors = dict(zip(*column(rows, f"{prefix}{of}/stderr"), strict=True))
        bars = [errors.get(step, 0.0) for step in x]
        ax.errorbar(x, y, yerr=bars, color=colour, linewidth=1.4, marker="o", markersize=3.5, capsize=2.5, elinewidth=1.0)
        ax.plot([], [], color=colour, linewidth=1.4, label=of)  # its key: an error bar's is no line
        part = {row["step"] for row in rows if (row.get(f"{prefix}finished") or 1) < 1}
        if some := [(step, value) for step, value in zip(x, y, strict=True) if step in part]:
            ax.plot(*zip(*some, strict=True), color=colour, linestyle="none", marker="o", markersize=9, fillstyle="none")
        values += [*(a - b for a, b in zip(y, bars, strict=True)), *(a + b for a, b in zip(y, bars, strict=True))]
    if values and min(values) >= -0.1 and max(values) <= 1.1:
        ax.set_ylim(min(0, *values) - 0.02, max(1.02, *values))


def _traffic(ax: Any, rows: Sequence[Row], bound: int | None) -> None:
    keys = ("broadcast/seed_egress_bytes", "broadcast/peer_bytes", "broadcast/bytes")
    sent, relayed, size = (column(rows, k, at="broadcast/step") for k in keys)
    if not (sent[0] or relayed[0]):
        return
    divisor, unit = byte_unit(max([*sent[1], *relayed[1], *size[1]]))
    by_learner = {x: v / divisor for x, v in zip(*sent, strict=True)}
    by_peers = {x: v / divisor for x, v in zip(*relayed, strict=True)}
    steps = sorted(by_learner.keys() | by_peers.keys())
    ax.set_ylabel(unit)
    below = stacked(ax, steps, [("by the learner", BLUE, by_learner), ("by nodes", ORANGE, by_peers)])
    if size.x:
        marks = thinned(size)
        ax.plot(marks.x, [v / divisor for v in marks.y], color=INK, linestyle="none", marker="_",
                markersize=12 if len(steps) <= 40 else 4, label="the delta itself")  # fmt: skip
    ax.set_ylim(0, 1.12 * max([*below, *(v / divisor for v in size.y)]) or 1)


def _broadcast(ax: Any, rows: Sequence[Row], bound: int | None) -> None:
    half, last = (column(rows, k, at="broadcast/step") for k in ("broadcast/p50_s", "broadcast/max_s"))
    pause = column(rows, "node/pause_s")
    if not (half[0] or last[0]):
        return
    curve(ax, last, "last node", RED)
    curve(ax, half, "median node", BLUE)
    shown = [(x, y) for x, y in zip(*thinned(pause), strict=True) if y > 0]
    if shown:
        ax.plot(*zip(*shown, strict=True), color=GREY, linestyle="none", marker=".", markersize=4,
                label="longest pause of a node")  # fmt: skip
    values = [v for v in [*half[1], *last[1], *(y for _, y in shown)] if v > 0]
    if values and max(values) > 50 * min(values):
        ax.set_yscale("log")
    else:
        ax.set_ylim(bottom=0)


def _staleness(ax: Any, rows: Sequence[Row], bound: int | None) -> None:
    mean, largest = column(rows, "off_policy/mean"), column(rows, "off_policy/max")
    if not (mean[0] or largest[0]):
        return
    if largest[0]:
        ax.plot(*thinned(largest), color=RED, linestyle="none", marker="o", markersize=4, label="oldest trajectory")
    curve(ax, mean, "mean", BLUE)
    if bound is not None:
        ax.axhline(bound, color=INK, linestyle="--", linewidth=1.1, label=f"bound ({bound})")
    ax.set_ylim(-0.08, max([*mean[1], *largest[1], bound or 0, 1]) * 1.12)
    ax.yaxis.get_major_locator().set_params(integer=True)


def _step_time(ax: Any, rows: Sequence[Row], bound: int | None) -> None:
    parts = (
        ("time/wait_for_batch", "waiting for rollouts", ORANGE),
        ("time/train", "training", BLUE),
        ("time/commit", "checkpoint, commit", PURPLE),
        ("time/publish", "publishing", GREEN),
    )
    timed = [r for r in rows if any(isinstance(r.get(k), (int, float)) for k, _, _ in parts)]
    if not timed:
        return
    steps = [r["step"] for r in timed]
    heights = [(label, color, {r["step"]: float(r.get(key) or 0.0) for r in timed}) for key, label, color in parts]
    below = stacked(ax, steps, heights)
    ordinary = sorted(below)[max(0, int(0.95 * len(below)) - 1)]
    if max(below) > 4 * ordinary > 0:  # a first step that waits for nodes must not flatten the others
        ax.set_ylim(0, 2 * ordinary)
        for step, total in zip(steps, below, strict=True):
            if total > 2 * ordinary:
                ax.annotate(f"{total:.0f} s", (step, 0.995), xycoords=("data", "axes fraction"), ha="left",
                            va="top", fontsize=8, xytext=(5, 0), textcoords="offset points")  # fmt: skip


def _mismatch(ax: Any, rows: Sequence[Row], bound: int | None) -> None:
    mean = column(rows, "mismatch_kl/mean")
    curve(ax, mean, "mean", BLUE)
    if mean[1] and min(mean[1]) > 0 and max(mean[1]) > 30 * min(mean[1]):
        ax.set_yscale("log")


def _capacity(ax: Any, rows: Sequence[Row], bound: int | None) -> None:
    needed, made = column(rows, "pool/required_tokens_per_s"), column(rows, "pool/supply_tokens_per_s")
    if not needed[0]:
        return
    curve(ax, needed, "needed", RED)
    curve(ax, made, "made, or could be", BLUE)
    ax.set_ylim(0, 2.5 * sorted([*needed[1], *made[1]])[int(0.9 * (len(needed[1]) + len(made[1]) - 1))] or 1)


def _cost(ax: Any, rows: Sequence[Row], bound: int | None) -> None:
    total = column(rows, "cost/total_usd")
    if not total[0] or not max(total[1]) > 0:
        return
    ax.plot(*total, color=GREEN, linewidth=1.8, label="nodes, and the learner's machine if it has a price")
    ax.set_ylim(bottom=0)


DRAWINGS = (
    Drawing("learning", "Learning", _learning, y="share of answers / reward",
            caption="Sampled answers are those trained on, held-out problems are never trained on."),
    Drawing("parts", "Parts of the reward", _parts, y="mean, before weights",
            caption="Of the step's trajectories; the first eight by name."),
    Drawing("episodes", "Turns of an episode", _episodes, y="turns of the model",
            caption="Of the step's episodes. Each is one turn after another of model and environment."),
    Drawing("ends", "What ended the episodes", _ends, y="share of the step's episodes",
            caption="Its environment, or a limit: the most tokens, the most turns, or time."),
    Drawing("traffic", "Bytes to bring one version to every node", _traffic, y="bytes", x="version (optimizer step)",
            caption="Where the learner's part meets the mark, it sent each version once and the nodes did the rest."),
    Drawing("broadcast", "Time from publishing a version to serving it", _broadcast, y="seconds", x="version (optimizer step)",
            caption="Nodes go on decoding while a version arrives; the pause is what its installation costs them."),
    Drawing("staleness", "Staleness of what was trained on", _staleness, y="steps behind",
            caption="Counted from the version that made a trajectory's first token to the step that trained on it."),
    Drawing("step_time", "Where a step's time goes", _step_time, y="seconds",
            caption="From one optimizer step to the next, as the trainer measures it; evaluations are not in it."),
    Drawing("mismatch", "How far rollouts are from the policy they train", _mismatch, y="KL per token (nats)",
            caption="Staleness raises it; so do numerical differences between the nodes' engines and the trainer."),
    Drawing("capacity", "What the learner needs, and what the active nodes make", _capacity, y="tokens per second",
            caption="From measured steps, dissemination and nodes; a node that is not measured yet counts for nothing."),
    Drawing("cost", "What it cost", _cost, y="US dollars so far",
            caption="Nodes cost what they say an hour, or what the config says of them, while they generate."),
)  # fmt: skip
"""Every plot of a run."""
