"""report.html: a run on one page that needs nothing else. The curve first, then nodes, cost and faults; then all the rest.

A view of a `RunState`, with the plots of metrics.jsonl and a few of samples.jsonl; must not know processes or the network.
"""

from __future__ import annotations

import html
import json
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.resources import files
from itertools import chain
from pathlib import Path

from learner.run_dir import OLDER_SAMPLES, SAMPLES_FILE
from learner.status.facts import (
    Fact,
    audits,
    capacity,
    caught,
    episodes,
    evaluation_facts,
    held_out,
    how_far,
    node_columns,
    nodes_title,
    ran,
    reward,
    run_facts,
    speed,
    spent,
    staleness,
    trajectories,
    unscored,
)
from learner.status.plots import EVAL, Plot, draw_plots
from learner.status.run_state import NodeRow, RunState
from learner.status.sample_rows import MOST_SAMPLE, SampleRow, SampleTurn
from learner.status.steps import read_metrics, surviving
from learner.status.words import counted, joined, number, plain_text
from p2p.errors import UsageError

PAGE = "report.html"
"""The page's name in a run's directory."""

SAMPLES = 3
"""Of the run's first samples and of its last so many are on the page: enough to see what the model learned to write."""

MOST_NODES = 64
"""Nodes that have a row: more make a page that nobody reads, and summary.json has them all."""

OPEN_LINES = 8
"""Lines of a list that are shown; a longer one is folded."""

OPEN_TURNS = 12
"""Turns of a sample that are shown; the others are folded."""

FIRST, COST = ("learning",), ("cost", "capacity")
"""Plots that stand at the top, and under the cost; the others come further down."""

TAUGHT = ("parts", "episodes", "ends")
"""Plots that come right after the first."""


def write_report(
    run_dir: Path, state: RunState, *, page: Path | None = None, extra: Sequence[Fact] = (), faults: Sequence[str] = (),
    happened: Sequence[str] = (),
) -> Path:  # fmt: skip
    """Write the report of the run in `run_dir`, at `page` if that is given; returns its path. `extra` facts, `faults` and what
    `happened` are those that only whoever started the run knows of. UsageError when it cannot be written."""
    page = page or run_dir / PAGE
    lines = read_metrics(run_dir / "metrics.jsonl")
    rows = surviving(lines)
    try:
        plots = draw_plots(lines, rows, bound=state.max_staleness or None)
        samples = some_samples(run_dir) or list(state.samples)[-SAMPLES:]
        parts = _page(state, plots, samples, extra=extra, faults=[*state.faults, *faults], happened=happened)
        page.write_text("\n".join(parts) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write the report {page}: {error.strerror}") from None
    return page


def some_samples(run_dir: Path) -> list[SampleRow]:
    """The first samples that a run still has and the last; [] when there is none. Lines that are cut or foreign are left out."""
    first: list[SampleRow] = []
    last: deque[SampleRow] = deque(maxlen=SAMPLES)
    for sample in chain(_samples_in(run_dir / OLDER_SAMPLES), _samples_in(run_dir / SAMPLES_FILE)):
        (first if len(first) < SAMPLES else last).append(sample)
    return [*first, *last]


def _samples_in(path: Path) -> Iterator[SampleRow]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                with suppress(ValueError):
                    yield SampleRow.model_validate(json.loads(line))
    except FileNotFoundError:
        return


def _page(
    state: RunState, plots: Sequence[Plot], samples: Sequence[SampleRow], *, extra: Sequence[Fact], faults: Sequence[str],
    happened: Sequence[str],
) -> list[str]:  # fmt: skip
    title = f"Shoal run {state.run}"
    done = f"{'finished' if state.finished else 'not finished'}: {how_far(state)} steps"
    by_name = {plot.name: plot for plot in plots}
    found = [plot for plot in plots if plot.name.startswith(EVAL)]
    taught = [plot for plot in plots if plot.name in TAUGHT]
    rest = [plot for plot in plots if plot.name not in FIRST + COST + TAUGHT and plot not in found]
    style = files(__package__).joinpath("report.css").read_text(encoding="utf-8")
    return [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        f'<meta name=viewport content="width=device-width, initial-scale=1"><title>{_e(title)}</title><style>{style}</style>',
        f"<h1>{_e(title)}</h1><p class=dim>{_e(joined((done, ran(state) if state.seconds else '')))}</p>",
        *(f"<p class=fault>{_e(fault)}</p>" for fault in faults),
        f"<section class=grid>{_figures(by_name, FIRST)}<div>{_facts(_first_facts(state))}</div></section>",
        *([f"<section class=grid>{''.join(map(_figure, taught))}</section>"] if taught else []),
        *_evaluations(state, found),
        *_nodes(state),
        *_cost(state, by_name),
        *_faults(state, faults),
        *([f"<h2>How it ran</h2><section class=grid>{''.join(map(_figure, rest))}</section>"] if rest else []),
        *_samples(samples),
        f"<h2>Numbers</h2>{_facts([*run_facts(state), *extra])}",
        *_list("What happened", happened),
        *_list("Log", [f"{time.strftime('%H:%M:%S', time.localtime(e.time))} {e.brief}" for e in state.events]),
    ]


def _first_facts(state: RunState) -> list[Fact]:
    """What somebody wants to know first."""
    learned = state.first_and_last("exact")
    from_to = f"{learned.first:.1%} → {learned.last:.1%} (first and last tenth)" if learned else ""
    facts = (
        Fact("exact", from_to), Fact("held out", held_out(state)), Fact("reward", reward(state)),
        Fact("episodes", episodes(state)), Fact("pace", speed(state)), Fact("unscored", unscored(state)),
        Fact("caught", caught(state)), Fact("audits", audits(state)),
        Fact("staleness", staleness(state)), Fact("nodes", nodes_title(state)), Fact("cost", spent(state)),
        Fact("checkpoint", state.checkpoint),
    )  # fmt: skip
    return [fact for fact in facts if fact.text]


def _evaluations(state: RunState, plots: Sequence[Plot]) -> list[str]:
    if not plots:
        return []
    told = _facts([*(Fact(name, text) for name, text in (("held out", held_out(state)),) if text), *evaluation_facts(state)])
    return [f"<h2>Evaluations</h2>{told}<section class=grid>{''.join(map(_figure, plots))}</section>"]


def _nodes(state: RunState) -> list[str]:
    if not state.nodes:
        return []
    columns = node_columns(state)
    why = any(node.why_active for node in state.nodes)
    kind = lambda column: " class=n" if column.numeric else ""
    head = "".join(f"<th{kind(c)}>{_e(c.title)}" for c in columns) + ("<th>generated because" if why else "")
    rows = []
    for node in state.nodes[:MOST_NODES]:
        cells = [
            f'<td class="{"head" if i == 0 else "n" if c.numeric else ""}" data-label="{_e(c.title)}">{_e(c.cell(node))}</td>'
            for i, c in enumerate(columns)
        ]
        if why:
            cells.append(f'<td class=wide data-label="because">{_e(_because(node))}</td>')
        rows.append(f"<tr{'' if node.alive else ' class=dim'}>{''.join(cells)}</tr>")
    body = f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"
    more = f"<p class=dim>and {len(state.nodes) - MOST_NODES} more</p>" if len(state.nodes) > MOST_NODES else ""
    return [f"<h2>Nodes</h2><p class=dim>{_e(nodes_title(state))}</p><table class=nodes>{body}</table>{more}"]


def _because(node: NodeRow) -> str:
    return node.why_active or ("it costs nothing" if not node.usd_per_hour else "it did not")


def _cost(state: RunState, plots: dict[str, Plot]) -> list[str]:
    facts = [f for f in (Fact("spent", spent(state)), Fact("capacity", capacity(state))) if f.text]
    figures = _figures(plots, COST)
    if not facts and not figures:
        return []
    figures = f"<section class=grid>{figures}</section>" if figures else ""
    return [f"<h2>Cost</h2>{_facts(facts)}{figures}", *_list("Who generates, and why", state.pool.changes, "h3")]


def _faults(state: RunState, faults: Sequence[str]) -> list[str]:
    gone = [f"{n.name} is gone: {n.reason or 'its link was closed'}" for n in state.nodes if not n.alive]
    said = [*faults, *state.reports, *gone]
    if not said and state.left:
        return []
    if not said:
        return [f"<h2>Faults</h2><p>None: no refusal, no node lost. {_e(trajectories(state))}.</p>"]
    became = trajectories(state)
    return [*_list("Faults", said), *([f"<p class=dim>trajectories: {_e(became)}</p>"] if became else [])]


def _samples(samples: Sequence[SampleRow]) -> list[str]:
    if not samples:
        return []
    parts = ["<h2>Samples</h2>"]
    for s in samples:
        spans = joined(f"{counted(span.tokens, 'token')} by {span.node} under {span.version}" for span in s.made)
        of_reward = joined(f"{name} {value:.3g}" for name, value in s.parts.items())
        facts = joined((f"step {s.step}", f"reward {number(s.reward, '.3g')}", of_reward, s.ended, spans))
        parts.append(f"<p class=dim>{_e(facts)}</p><pre>{_e(s.prompt)}</pre>")
        if not s.turns:
            parts.append(f"<pre>{_e(s.completion)}</pre>")
            continue
        shown = "".join(map(_turn, s.turns[:OPEN_TURNS]))
        if more := s.turns[OPEN_TURNS:]:
            shown += f"<details><summary>{len(more)} more</summary>{''.join(map(_turn, more))}</details>"
        parts.append(f"<div class=turns>{shown}</div>")
    return parts


def _turn(turn: SampleTurn) -> str:
    calls = "".join(f"<p class=call>calls <b>{_e(call.name)}</b>({_e(call.arguments)})</p>" for call in turn.calls)
    who = "model" if turn.by == "model" else "environment"
    mark = f'<span class=dim>{who}, {counted(turn.tokens, "token")}</span>'
    return f"<div class={who}>{mark}<div><pre>{_e(turn.text)}</pre>{calls}</div></div>"


def _facts(facts: Iterable[Fact]) -> str:
    rows = "".join(f"<tr><th>{_e(fact.name)}</th><td>{_e(fact.text)}</td></tr>" for fact in facts)
    return f"<table class=facts>{rows}</table>" if rows else ""


def _list(title: str, lines: Sequence[str], tag: str = "h2") -> list[str]:
    if not lines:
        return []
    items = f"<ul>{''.join(f'<li>{_e(line)}</li>' for line in lines)}</ul>"
    if len(lines) > OPEN_LINES:
        items = f"<details><summary>{len(lines)} lines</summary>{items}</details>"
    return [f"<{tag}>{_e(title)}</{tag}>{items}"]


def _figures(plots: dict[str, Plot], names: Sequence[str]) -> str:
    return "".join(_figure(plots[name]) for name in names if name in plots)


def _figure(plot: Plot) -> str:
    keys = "".join(f'<span><i class="{key.kind} {key.colour}"></i>{_e(key.label)}</span> ' for key in plot.keys)
    caption = f"<figcaption>{_e(plot.caption)}</figcaption>"
    return f"<figure><h3>{_e(plot.title)}</h3><p class=keys>{keys}</p>{plot.svg}{caption}</figure>"


def _e(text: str) -> str:
    return html.escape(plain_text(text, MOST_SAMPLE, lines=True)).replace(" %", "&nbsp;%")
