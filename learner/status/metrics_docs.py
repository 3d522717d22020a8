"""docs/metrics.md, made from the catalogue. Pure."""

from __future__ import annotations

from typing import Any

from learner.status.catalogue import SECTIONS, entries
from learner.status.metric_entries import UNITS, MetricEntry

INTRO = """\
# Metrics

<!-- Made by `shoal config metrics`, from learner/status/catalogue.py. -->

A run tells its numbers in two places. `metrics.jsonl` in the run's directory has a line for each step, with the keys of the
first column. `/metrics` on the status port has what the second column names, for Prometheus: the newest line, and the state
of the run at the moment of the scrape. [Monitoring](monitoring.md) says how to scrape it and how to import the Grafana board.

A key may be absent from a line, as its section says; a number that is not finite is `null` in metrics.jsonl and absent from
/metrics. Names end in their unit and counters in `_total`. The units are
UNITS.
A ratio is 1 for all of it; usd are US dollars. A key with `*` stands for any that begins so.

The trainer writes the metrics of sections marked "trainer"; your own trainer writes what it likes. The head adds those marked
"head" to each line, whatever trainer runs. Sections marked "evaluation" are lines of their own.
"""


def metrics_markdown() -> str:
    """The whole page."""
    lines = [INTRO.replace("UNITS", ", ".join(f"`{unit}`" for unit in UNITS))]
    for section in SECTIONS:
        lines += [f"## {section.title} ({section.by})", "", section.what, ""]
        lines += ["| metrics.jsonl | /metrics | Kind | Unit | What it is |", "|---|---|---|---|---|"]
        for entry in section.entries:
            cells = (cell.replace("|", "\\|") for cell in _cells(entry))
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def metrics_rows() -> list[dict[str, Any]]:
    """The same for programs, a row for each metric."""
    return [
        {
            "key": e.key, "name": e.series, "kind": e.kind, "unit": e.unit, "label": e.label, "values": list(e.values),
            "what": e.what,
        }
        for e in entries()
    ]  # fmt: skip


def _cells(entry: MetricEntry) -> tuple[str, ...]:
    name = f"`{entry.series}{{{entry.label}}}`" if entry.label else f"`{entry.series}`"
    return f"`{entry.key}`" if entry.key else "", name if entry.name else "", entry.kind, entry.unit, entry.what
