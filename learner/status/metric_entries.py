"""What the catalogue of metrics says of a number, and of numbers that are read together. Pure; must not know which there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Writer = Literal["trainer", "head", "evaluation"]
"""Whose numbers they are: a trainer's (ours, or your own), the head's, which adds them to each line, or an evaluation's, which
has a line of its own."""

Kind = Literal["gauge", "counter", "info"]
"""As Prometheus has them: a gauge goes up and down, a counter only up while the learner runs, an info is text in labels."""

UNITS = (
    "tokens_per_second", "usd_per_hour", "seconds", "bytes", "tokens", "steps", "nats", "ratio", "usd",
)  # fmt: skip
"""Units that names on /metrics end in: base units, as Prometheus wants them; those first that end in another. A ratio is 1 for
all of it, usd are US dollars."""

OTHER = "other"
"""Value of a label whose own value is none of those in the catalogue, so that labels stay bounded."""


@dataclass(frozen=True, slots=True)
class MetricEntry:
    """One number, or one that a label splits."""

    what: str
    """its meaning, in sentences"""
    key: str = ""
    """in metrics.jsonl; "" when it is not there. A * at its end stands for any further text, which becomes the label's value"""
    name: str = ""
    """on /metrics, unit included, without a counter's `_total`; "" when it is not there"""
    kind: Kind = "gauge"
    path: str = ""
    """of the value on /status, dotted, where the newest line of metrics.jsonl is not what /metrics shows"""
    label: str = ""
    values: tuple[str, ...] = ()
    """that the label may have; others count as OTHER. Without them it may have any, up to a bound"""
    key_unit: str = ""
    """where no name ends in it"""

    @property
    def unit(self) -> str:
        """The end of its name: one of UNITS, or "" for a number without one."""
        return next((unit for unit in UNITS if self.name.endswith(f"_{unit}")), self.key_unit)

    @property
    def series(self) -> str:
        """Its name in a query; an info's and a counter's have a suffix."""
        return self.name + {"counter": "_total", "info": "_info", "gauge": ""}[self.kind] if self.name else ""

    @property
    def is_family(self) -> bool:
        """Whether its key stands for many."""
        return self.key.endswith("*")


@dataclass(frozen=True, slots=True)
class MetricSection:
    """Numbers that are read together."""

    title: str
    by: Writer
    what: str
    entries: tuple[MetricEntry, ...]


def line(key: str, name: str, what: str) -> MetricEntry:
    """A key of metrics.jsonl, whose newest value /metrics shows under `name`."""
    return MetricEntry(what, key=key, name=name)


def now(path: str, name: str, what: str, *, kind: Kind = "gauge") -> MetricEntry:
    """What /metrics shows as it is at the moment of the scrape."""
    return MetricEntry(what, name=name, path=path, kind=kind)
