"""A run in a terminal: the page of a live view, and the tables of `shoal status`.

Renderables only, made from a `RunState`; nothing is worked out here that another view needs too. Must not know where the state
comes from, or processes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from learner.status.evaluated import EvalPoint
from learner.status.facts import (
    allowed,
    audits,
    capacity,
    caught,
    doubt,
    episodes,
    error,
    eval_point,
    evaluating,
    node_columns,
    nodes_title,
    pairs_apart,
    parts,
    run_facts,
    speed,
    spent,
    staleness,
    unscored,
)
from learner.status.run_state import NamedEvaluation, RunState
from learner.status.sample_rows import SampleRow
from learner.status.steps import StepRow
from learner.status.words import DASH, counted, joined, number, plain_text
from p2p.quantities import human_bytes, human_seconds

WIDTH = 120
"""Columns when the output is a file or a pipe, where there is no terminal to ask."""

BARS = "▁▂▃▄▅▆▇█"
"""A character of a curve, by its height."""

LABEL = 11
"""Columns of a row's name on the live page, with the space behind it."""

MOST_CURVE = 80
"""Characters of a curve at the most; a longer one is not read better."""

EVENTS = (3, 8)
"""Latest events on the live page: as many as leave room for the nodes on 24 lines, and on a tall terminal."""

EVALUATIONS = (2, 6)
"""Evaluations with a name on the live page, on a short terminal and on a tall one."""

WIDE = 100
"""Columns from which a terminal has room for long names."""

NAME = (14, 30)
"""Characters of a node's name that are shown, on a narrow terminal and on a wide one."""

GAP = 2
"""Columns between two columns of the table of nodes."""

TALL = 36
"""Lines from which a terminal has room for more events and a longer sample."""

STYLES = {"gone": "dim", "warm": "cyan", "asleep": "dim", "leaving": "yellow", "resting": "dim", "starting": "yellow"}
"""A node's state -> how its row looks."""

EVENT_STYLES = {"warning": "yellow", "error": "red"}
"""An event's level -> how it looks."""


# --- shoal status ----------------------------------------------------------------------------------------------------


def print_status(state: RunState, console: Console | None = None) -> None:
    """The run, its nodes and its recent reports as tables on stdout."""
    if console is None:
        console = Console()
        if not console.is_terminal:
            console = Console(width=int(os.environ.get("COLUMNS") or WIDTH))
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for fact in run_facts(state):
        table.add_row(fact.name, Text(fact.text))
    console.print(Group(table, Text(), node_table(state, console.width)))
    for sample in state.samples[-1:]:
        console.print(Text("\na sample"), style="bold")
        console.print(sample_text(sample, console.width, 6))
    for title, lines in (
        ("what owners allow", allowed(state)), ("who generates, and why", state.pool.changes),
        ("nodes without a link, and why", pairs_apart(state)), ("recent reports", state.reports),
    ):  # fmt: skip
        if lines:
            console.print(Text(f"\n{title}"), style="bold")
        for line in lines:
            console.print(Text(f"  {line}"), highlight=False)


def node_table(state: RunState, width: int, most: int | None = None) -> RenderableType:
    """A row for each node, at most `most`; columns as so many characters have room for."""
    nodes = state.nodes if most is None else state.nodes[:most]
    longest = NAME[width >= WIDE]
    columns = [(c, [plain_text(c.cell(n), width if i else longest) for n in nodes]) for i, c in enumerate(node_columns(state))]
    room = lambda: sum(GAP + max(map(len, (c.title, *cells))) for c, cells in columns) - GAP
    while room() > width and any(c.rank for c, _ in columns):
        columns.remove(max(columns, key=lambda one: one[0].rank))
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0))
    for column, _ in columns:
        table.add_column(column.title, justify="right" if column.numeric else "left", no_wrap=True)
    for i, node in enumerate(nodes):
        table.add_row(*(Text(cells[i]) for _, cells in columns), style=STYLES.get(node.state))
    more = len(state.nodes) - len(nodes)
    title = Text(nodes_title(state), style="bold", no_wrap=True, overflow="ellipsis")
    return Group(title, table, *([Text(f"and {more} more", style="dim")] if more else []))


def sample_text(sample: SampleRow, width: int, lines: int) -> Text:
    """A prompt and its completion in at most so many lines."""
    said = joined(f"{name} {value:.3g}" for name, value in sample.parts.items())
    turns = counted(sum(turn.by == "model" for turn in sample.turns), "turn") if sample.turns else ""
    facts = joined((f"step {sample.step}", f"reward {number(sample.reward, '.3g')}", said, turns, sample.ended))
    text = Text(f"{plain_text(facts, width)}\n", style="dim", overflow="ellipsis")
    if sample.turns:
        room = width * max(1, lines - 2) - 1
        text.append(f"> {plain_text(' '.join(sample.prompt.split()), width - 3)}\n").append(_turns(sample, room)).append("\n")
        text.right_crop()
        return text
    for mark, words, style in (("> ", sample.prompt, "none"), ("", sample.completion, "cyan")):
        room = max(8, width * max(1, (lines - 1) // 2) - len(mark) - 1)
        text.append(f"{mark}{plain_text(' '.join(words.split()), room)}\n", style=style)
    text.right_crop()
    return text


def _turns(sample: SampleRow, room: int) -> Text:
    """An episode in a row: what the model wrote, what was answered, in at most `room` characters."""
    text = Text()
    for turn in sample.turns:
        said = joined(f"{call.name}({call.arguments})" for call in turn.calls) or " ".join(turn.text.split())
        text.append("model " if turn.by == "model" else "env ", style="dim")
        text.append(f"{said or DASH}  ", style="cyan" if turn.by == "model" else "none")
        if len(text) > room:
            text.truncate(room - 1)
            return text.append("…")
    return text


# --- the live page ---------------------------------------------------------------------------------------------------


def live_page(state: RunState, width: int, height: int, join: str = "") -> RenderableType:
    """The page of a live view, made to fit a terminal of this size. `join` says how a node joins, while there is none."""
    inner, tall = width - 4, height >= TALL
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(style="bold", no_wrap=True, min_width=LABEL - 1)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    rows = _rows(state, inner - LABEL, tall)
    for name, what in rows:
        grid.add_row(name, what)
    parts: list[RenderableType] = [grid]
    used = 2 + len(rows)
    events = _events(state, inner, EVENTS[tall])
    sample = state.samples[-1] if state.samples else None
    sample_lines = (7 if tall else 3) if sample else 0
    # What is left is the nodes', with a title, a head and its line above them; the cursor has the last line.
    room = height - 1 - used - len(events) - sample_lines - 3
    if room < len(state.nodes) <= room + sample_lines or room < 2:
        sample, room = None, room + sample_lines
    if room < 1:
        events = events[max(0, 1 - room) :]
        room = 1
    if state.nodes:
        parts.append(node_table(state, inner, room if room >= len(state.nodes) else max(1, room - 1)))
    elif not state.finished:
        parts.append(Text(f"\nwaiting for the first node{': ' if join else ''}{join}\n", style="yellow"))
    if sample is not None:
        parts.append(sample_text(sample, inner, sample_lines))
    parts += events
    title = joined((f"shoal run {state.run}", f"epoch {state.epoch}" if state.epoch > 1 else ""))
    return Panel(Group(*parts), title=Text(title), title_align="left", width=width)


def _rows(state: RunState, width: int, tall: bool) -> list[tuple[str, RenderableType]]:
    """The named lines at the top. What is not known yet is left out."""
    rows: list[tuple[str, RenderableType]] = [("step", _progress(state, width))]
    room = min(width - 24, MOST_CURVE)
    for name, field, colour in (("reward", "reward", "cyan"), ("exact", "exact", "green")):
        values = [v for row in state.curve if (v := getattr(row, field)) is not None]
        if values:
            said = Text(sparkline(values, room), style=colour)
            last = getattr(state.last or StepRow(0), field)
            said.append(f"  {number(last, '.3f')}", style="bold").append(f"  from {values[0]:.2f}", style="dim")
            rows.append((name, said))
    for name, said_of in (("parts", parts(state)), ("episodes", episodes(state))):
        if said_of:
            rows.append((name, said_of))
    if state.evals:
        tail = (state.evals[:1] + state.evals[-4:]) if len(state.evals) > 5 else state.evals
        point = next((p for p in state.evaluated.get("", ()) if p.step == tail[-1].step), EvalPoint(tail[-1].step))
        told = "  ".join(f"{number(row.held_out, '.2f')} at {row.step}" for row in tail)
        rows.append(("held out", f"{told}{error(point.exact_error)}{doubt(point)}"))
    named = state.named_evals
    most = EVALUATIONS[tall]
    for one in named[:most]:
        rows.append(("evaluation", f"{one.name}: {_evaluation(one)}"))
    if len(named) > most:
        rows.append(("", f"and {len(named) - most} more evaluations: shoal status"))
    if tall and (under_way := evaluating(state)):
        rows.append(("evaluating", under_way))
    if lost := unscored(state):
        rows.append(("unscored", Text(lost, style="yellow")))
    if said_caught := caught(state):
        rows.append(("caught", Text(said_caught, style="yellow")))
    if state.audits.why or (tall and state.audits.checked):
        rows.append(("audits", Text(audits(state), style="yellow" if state.audits.why else "")))
    newest = state.last.staleness if state.last else None
    now = "" if newest is None else f"{newest:.0f} now, "
    rows.append(("staleness", f"{now}{staleness(state)}"))
    if said_speed := speed(state):
        rows.append(("pace", said_speed))
    if tall and (said_capacity := capacity(state)):
        rows.append(("capacity", said_capacity))
    if said_spent := spent(state):
        rows.append(("cost", said_spent))
    here = " in this life" if state.in_this_life else ""  # of which epoch is in the page's title
    each = f"{human_bytes(state.delta_bytes_mean)} a delta" if state.delta_bytes_mean else ""
    sent = f"{human_bytes(state.learner_egress_bytes)} sent, {human_bytes(state.peer_bytes)} by nodes{here}"
    rows.append(("weights", joined((counted(state.versions_published, "version"), sent, each))))
    return [(name, Text(what) if isinstance(what, str) else what) for name, what in rows]


def _evaluation(one: NamedEvaluation) -> str:
    """The newest result, and a few before it."""
    *before, last = one.points
    few = [*before[:1], *before[-2:]] if len(before) > 3 else before
    then = "  ".join(f"{number(p.exact, '.2f')} at {p.step}" for p in few)
    return joined((f"{eval_point(last)} at {last.step}", f"before: {then}" if then else ""), "; ")


def _progress(state: RunState, width: int) -> RenderableType:
    left = state.left_s
    here = " in this life" if state.in_this_life else ""
    said = f"{state.done} of {state.steps}, {human_seconds(state.seconds)}{here}"
    said += f", {human_seconds(left)} left" if left else ", done" if state.finished else ""
    bar = Table.grid(padding=(0, 1, 0, 0))
    length = max(6, min(MOST_CURVE, width - len(said) - 2))
    bar.add_row(ProgressBar(total=max(1, state.steps), completed=state.done, width=length), Text(said))
    return bar


def _events(state: RunState, width: int, most: int) -> list[Text]:
    return [
        Text(
            plain_text(f"{time.strftime('%H:%M:%S', time.localtime(event.time))} {event.brief}", width),
            style=EVENT_STYLES.get(event.level, "dim"), no_wrap=True, overflow="ellipsis",
        )
        for event in state.events[-most:]
    ]  # fmt: skip


def sparkline(values: Sequence[float], most: int = MOST_CURVE) -> str:
    """`values` as at most so many bars: from 0 to 1 where they lie there, else from the least to the largest. Where there are
    more values, means of neighbours."""
    most = max(1, most)
    if len(values) > most:
        cuts = [i * len(values) // most for i in range(most + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    span: Any = (high - low) or 1.0
    return "".join(BARS[min(len(BARS) - 1, max(0, int((v - low) / span * len(BARS))))] for v in values)
