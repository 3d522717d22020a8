"""report.html: a run's numbers and plots in one file that needs nothing else.

Reads metrics.jsonl and the result; must not know processes or the network.
"""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from learner.status.view import dollars, human_bytes, human_seconds, short_peer
from netem.demo.spot import describe_spot
from netem.plots import draw_plots
from p2p.errors import UsageError

NUMBERS: tuple[tuple[str, str, str], ...] = (
    ("ok", "all checks passed", "yes"),
    ("recipe", "recipe", "text"),
    ("steps", "optimizer steps", "count"),
    ("seconds", "wall time", "seconds"),
    ("epoch", "learner starts (epochs)", "count"),
    ("reward_first", "sampled exact match, first tenth of the steps", "share"),
    ("reward_last", "sampled exact match, last tenth of the steps", "share"),
    ("eval_first", "held-out exact match (greedy), before", "share"),
    ("eval_last", "held-out exact match (greedy), after", "share"),
    ("versions_published", "versions published", "count"),
    ("anchor_bytes", "whole model on the wire", "bytes"),
    ("delta_bytes_mean", "delta on the wire, mean", "bytes"),
    ("delta_density_mean", "values a delta changes, mean", "share"),
    ("learner_egress_ratio", "copies of a version sent by the learner, mean", "ratio"),
    ("max_staleness_seen", "largest staleness trained on (steps)", "count"),
    ("max_staleness", "staleness bound (steps)", "count"),
    ("usd_spent", "spent", "dollars"),
    ("usd_per_step", "a step, mean", "dollars"),
    ("usd_per_mtok", "a million tokens that were trained on", "dollars"),
    ("pss_peak_bytes", "peak memory of all processes (PSS)", "bytes"),
)
"""Key, what it is called, how it is written."""

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1c2530 }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
table { border-collapse: collapse; margin: .6rem 0 } th, td { padding: .25rem .9rem .25rem 0; text-align: left }
tr { border-bottom: 1px solid #e3e7eb } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
img { max-width: 100%; height: auto } .fault { color: #b00020; font-weight: 600 } .dim { color: #6b7785 }
figure { margin: 1.4rem 0 } figcaption { color: #4a5663 } .scroll { overflow-x: auto }
"""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; a line that a crash cut short is left out. [] when there is no file."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    lines = []
    for raw in text.splitlines():
        try:
            line = json.loads(raw)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines


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


def write_report(run_dir: Path, result: Mapping[str, Any]) -> Path:
    """Plots under `run_dir`/plots and `run_dir`/report.html with them inside; returns the page's path.

    The metrics are those of the run in `run_dir`/run. Missing fields leave their plot or row out. UsageError when the report
    cannot be written.
    """
    lines = read_metrics(run_dir / "run" / "metrics.jsonl")
    try:
        plots = draw_plots(lines, surviving(lines), run_dir / "plots", bound=result.get("max_staleness"))
        page = run_dir / "report.html"
        page.write_text(_page(result, plots), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write the report in {run_dir}: {error.strerror}") from None
    return page


def _page(result: Mapping[str, Any], plots: Sequence[tuple[Path, str, str]]) -> str:
    title = f"Shoal run{' ' + str(result['run']) if result.get('run') else ''}"
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE}</style>",
        f"<h1>{html.escape(title)}</h1>",
        *(f"<p class=fault>{html.escape(str(fault))}</p>" for fault in result.get("faults") or ()),
        _numbers(result),
        _nodes(result.get("nodes") or ()),
    ]
    for key, heading in (("activation", "Who generates, and why"), ("events", "What happened")):
        if lines := result.get(key):
            items = "".join(f"<li>{html.escape(str(line))}</li>" for line in lines)
            parts.append(f"<h2>{heading}</h2><ul>{items}</ul>")
    if plots:
        parts.append("<h2>Plots</h2>")
    for path, name, caption in plots:
        data = base64.b64encode(path.read_bytes()).decode()
        parts.append(
            f'<figure><img alt="{html.escape(name)}" src="data:image/png;base64,{data}">'
            f"<figcaption>{html.escape(caption)}</figcaption></figure>"
        )
    return "\n".join(parts) + "\n</html>\n"


def _numbers(result: Mapping[str, Any]) -> str:
    rows = [(title, _written(result[key], kind)) for key, title, kind in NUMBERS if result.get(key) is not None]
    tally = result.get("trajectories") or {}
    if tally:
        aborted = tally.get("aborted") or {}
        why = f" ({', '.join(f'{n} {reason}' for reason, n in aborted.items())})" if aborted else ""
        rows += [
            ("trajectories reserved", f"{tally.get('reserved', 0):,}"),
            ("trajectories trained on", f"{tally.get('consumed', 0):,}"),
            ("trajectories aborted", f"{sum(aborted.values()):,}{why}"),
            ("trajectories under way at the end", f"{tally.get('outstanding', 0):,}"),
            ("trajectories lost", f"{tally.get('lost', 0):,}"),
        ]
    if spot := result.get("spot"):
        rows.append(("nodes came and went", describe_spot(spot)))
    body = "".join(f"<tr><td>{html.escape(t)}</td><td class=n>{html.escape(text)}</td></tr>" for t, text in rows)
    return f"<h2>Numbers</h2><table>{body}</table>"


def _written(value: Any, kind: str) -> str:
    if kind == "yes":
        return "yes" if value else "NO"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    match kind:
        case "dollars":
            return dollars(value)
        case "seconds":
            return human_seconds(value)
        case "bytes":
            return human_bytes(value)
        case "share":
            return f"{value:.1%}"
        case "ratio":
            return f"{value:.2f}"
        case _:
            return f"{value:,}"


def _nodes(nodes: Sequence[Mapping[str, Any]]) -> str:
    if not nodes:
        return ""
    head = "<tr><th>node<th>peer<th>state<th class=n>version<th>digest<th class=n>tokens<th class=n>from the learner"
    head += "<th class=n>from peers<th class=n>pause"
    priced = any(n.get("usd_per_hour") or n.get("usd") for n in nodes)
    head += "<th class=n>$/h<th class=n>$<th>generated because</tr>" if priced else "</tr>"
    rows = []
    for node in nodes:
        alive = bool(node.get("alive"))
        cells = [
            str(node.get("name", "")), short_peer(str(node.get("peer", ""))), "alive" if alive else "gone",
            str(node.get("version", "–")), "ok" if node.get("digest_ok") else "–", f"{node.get('tokens', 0):,}",
            human_bytes(node.get("bytes_from_learner", 0)), human_bytes(node.get("bytes_from_peers", 0)),
            f"{1000 * node['pause_s']:.1f} ms" if "pause_s" in node else "–",
        ]  # fmt: skip
        if priced:
            why = node.get("why_active", "") or "it did not"
            cells += [f"{node.get('usd_per_hour', 0):.3g}", dollars(node.get("usd", 0)), why]
        numeric = {3, 5, 6, 7, 8, 9, 10}
        row = "".join(f"<td{' class=n' if i in numeric else ''}>{html.escape(c)}</td>" for i, c in enumerate(cells))
        rows.append(f"<tr{'' if alive else ' class=dim'}>{row}</tr>")
    return f"<h2>Nodes</h2><div class=scroll><table>{head}{''.join(rows)}</table></div>"
