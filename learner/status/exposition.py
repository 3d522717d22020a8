"""/metrics: the status page's numbers as Prometheus has them, by the catalogue. Pure: a status in, text out.

Labels are bounded: nothing is told by node, since nodes are many. Must not know HTTP or the head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder

from learner.status.catalogue import NODE_STATES, SECTIONS, find_entry
from learner.status.metric_entries import OTHER, MetricEntry
from learner.status.run_state import NodeRow
from p2p.printable import cleaned

MOST_OPEN = 100
"""Keys that a family with open names shows, so that a trainer which logs under ever new names cannot fill a Prometheus."""

MOST_LABEL = 100
"""Characters of such a key that become the label's value."""

STATE_FIELDS = ("alive", "ready", "draining", "rests", "activity")
"""Fields of a node that its state rests on: the others need not be checked at each scrape, for each of many nodes."""


@dataclass(frozen=True, slots=True)
class MetricsText:
    """An answer to a scrape."""

    body: bytes
    content_type: str


def metrics_text(status: Mapping[str, Any], accept: str = "") -> MetricsText:
    """What `/metrics` answers: OpenMetrics when the request's `accept` header asks for it, else Prometheus' text format."""

    class Snapshot:
        def collect(self) -> Iterator[Metric]:
            return families(status)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Snapshot())  # type: ignore[arg-type]
    try:
        encode, content_type = choose_encoder(accept)
    except (TypeError, ValueError):  # the client stumbles over a version that is no number
        encode, content_type = choose_encoder("")
    return MetricsText(bytes(encode(registry)), content_type)


def families(status: Mapping[str, Any]) -> Iterator[Metric]:
    """A family for each entry of the catalogue that `status` has a number for."""
    line: Mapping[str, Any] = status.get("metrics") or {}
    now = {**status, **_derived(status)}
    for section in SECTIONS:
        for entry in section.entries:
            if not entry.name:
                continue
            if entry.is_family:
                value: Any = {key: line[key] for key in sorted(line) if find_entry(key) == entry}
            else:
                value = _at(now, entry.path) if entry.path else line.get(entry.key)
            family = Metric(entry.name, f"{section.title}: {entry.what}", entry.kind, entry.unit)
            for labels, sample in _samples(entry, value):
                family.add_sample(entry.series, labels, sample)
            if family.samples:
                yield family


def node_counts(nodes: list[Mapping[str, Any]]) -> dict[str, int]:
    """Nodes by `NodeRow.state`, of which "active" is "generating" here; every state is there, so that a series does not come
    and go."""
    counts = dict.fromkeys(NODE_STATES, 0)
    for node in nodes:
        state = NodeRow.model_validate({field: node.get(field) for field in STATE_FIELDS}).state
        counts[state if state in NODE_STATES else "generating"] += 1
    return counts


def _derived(status: Mapping[str, Any]) -> dict[str, Any]:
    """What the status page does not have as one number."""
    nodes = list(status.get("nodes") or [])
    out: dict[str, Any] = {
        "nodes_by_state": node_counts(nodes),
        "node_tokens_per_s": math.fsum(_number(n.get("tokens_per_s")) or 0.0 for n in nodes if n.get("alive")),
    }
    if status.get("version"):
        out["published_step"] = int(str(status["version"]).rpartition(".")[2])
    return out


def _at(values: Any, path: str) -> Any:
    for name in path.split("."):
        values = values.get(name) if isinstance(values, Mapping) else None
    return values


def _samples(entry: MetricEntry, value: Any) -> Iterator[tuple[dict[str, str], float]]:
    if entry.kind == "info":
        if value:
            yield {entry.label: str(value)}, 1.0
    elif entry.is_family:
        prefix = len(entry.key) - 1
        shown = {_cleaned(key[prefix:]): number for key in value if (number := _number(value[key])) is not None}
        for name in list(shown)[:MOST_OPEN]:
            yield {entry.label: name}, shown[name]
    elif entry.label:
        counts = dict.fromkeys(entry.values, 0.0)
        for name, count in (value or {}).items():
            known = name if name in entry.values else OTHER
            counts[known] = counts.get(known, 0.0) + (_number(count) or 0.0)
        for name, count in counts.items():
            yield {entry.label: name}, count
    elif (number := _number(value)) is not None:
        yield {}, number


def _number(value: Any) -> float | None:
    try:
        return float(value) if isinstance(value, (int, float)) else None
    except OverflowError:
        return math.inf


def _cleaned(text: str) -> str:
    return cleaned(text)[:MOST_LABEL]
