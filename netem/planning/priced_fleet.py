"""The fleet of a scenario or of `shoal plan`: kinds with prices, rates, links and availability. A CSV or rows in, nodes out.

A node's speed follows from the data sheet of its GPUs (netem.rollout_sim.fleet), or is a measured number of tokens per second.
Nodes are always there, or come and go by exponential times, or as many of a kind are there as a trace file says.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from pydantic import Field, model_validator

from learner.dispatch.throughput import Throughput
from learner.section import Section, check_section
from netem.networks.availability import balanced_stays
from netem.planning.keys import nearest_column
from netem.rollout_sim.fleet import KINDS, MEMORY_SHARE, EngineKind, Kind, Served
from p2p.errors import UsageError

GPUS = {
    **KINDS,
    "H800": Kind("H800", 3.35e12, 989e12, 80e9),
    "H20": Kind("H20", 4.0e12, 148e12, 96e9),
    "RTX5090": Kind("RTX5090", 1.79e12, 209e12, 32e9),
}
"""GPUs by name, with the numbers of their data sheets: memory bandwidth, dense bf16 operations a second, memory."""

TENSOR_SHARE = 0.85
"""Share of its GPUs' summed speed that an engine over several of them reaches. A guess: all-reduces over NVLink take the rest."""

SEQUENCES_A_GPU = 256
"""Most sequences that an engine runs at once for each of its GPUs; vLLM's usual max_num_seqs."""


class NodeKind(Section):
    """One kind of node: its price, speed, links and availability."""

    kind: str = Field(min_length=1)
    """Name of the kind."""
    count: int = Field(default=1, ge=1, le=100_000)
    """Nodes of this kind."""
    usd_per_hour: float = Field(ge=0)
    """Price in $ an hour while a node is active."""
    idle_usd_per_hour: float | None = Field(default=None, ge=0)
    """Price in $ an hour while a node is warm or asleep. Unless given it is 0: what is not needed is not rented."""
    gpu: str = ""
    """GPU, by the name of its data sheet."""
    gpus: int = Field(default=1, ge=1)
    """GPUs of a node; they are one engine."""
    tokens_per_s: float = Field(default=0.0, ge=0)
    """Measured tokens per second of a full node, instead of `gpu`."""
    sequences: int = Field(default=32, ge=1)
    """With `tokens_per_s`: sequences that a node runs at once."""
    down_mbit: float = Field(default=1000.0, gt=0)
    """Downlink in Mbit/s."""
    up_mbit: float = Field(default=200.0, ge=0)
    """Uplink in Mbit/s."""
    availability: str = "always"
    """When nodes are there: "always", "exponential UP_S DOWN_S" (mean seconds there and away), or "trace FILE"."""

    @model_validator(mode="after")
    def _speed(self) -> NodeKind:
        if bool(self.gpu) == bool(self.tokens_per_s):
            raise ValueError(f"{self.kind}: give gpu or tokens_per_s, one of them")
        if self.gpu and self.gpu not in GPUS:
            raise ValueError(f"{self.kind}: no GPU {self.gpu!r}: {', '.join(GPUS)}")
        word, *rest = self.availability.split() or [""]
        if (word, len(rest)) not in (("always", 0), ("exponential", 2), ("trace", 1)):
            raise ValueError(f"{self.kind}: availability {self.availability!r}: always, exponential UP_S DOWN_S, or trace FILE")
        if word == "exponential" and not all(_positive(text) for text in rest):
            raise ValueError(f"{self.kind}: availability {self.availability!r}: two numbers of seconds above 0")
        return self

    @property
    def share_there(self) -> float:
        """Share of the time that a node is there in the mean. 1 for a trace, whose mean the row does not say."""
        word, *rest = self.availability.split()
        return float(rest[0]) / (float(rest[0]) + float(rest[1])) if word == "exponential" else 1.0

    def engine(self, model: Served) -> EngineKind:
        """The engine of one such node with that model. Where the speed was measured, each sequence is made at its part of the
        measured rate, whatever the context, and memory is no limit. UsageError where the model does not fit."""
        if not self.gpu:
            rate = self.tokens_per_s / self.sequences
            return EngineKind(Throughput(0.0, 1.0 / rate, 0.0, 0.0), 0.0, 1 << 40, self.sequences)
        return engine_of(self.gpu, self.gpus, model)


def engine_of(gpu: str, gpus: int, model: Served, memory_share: float = MEMORY_SHARE) -> EngineKind:
    """An engine over `gpus` GPUs of a kind that may use `memory_share` of their memory. UsageError for an unknown GPU, and when
    the model does not fit."""
    if gpu not in GPUS:
        raise UsageError(f"no GPU {gpu!r}: {', '.join(GPUS)}")
    one, share = GPUS[gpu], gpus * (TENSOR_SHARE if gpus > 1 else 1.0)
    memory = one.memory * gpus * (memory_share / MEMORY_SHARE)
    kind = replace(one, bandwidth=one.bandwidth * share, operations=one.operations * share, memory=memory)
    engine = kind.engine(model, SEQUENCES_A_GPU * gpus)
    if engine.room < 1000:
        raise UsageError(f"{model.name} does not fit into {gpus} x {gpu}: {engine.room} tokens of KV beside its weights")
    return engine


@dataclass(frozen=True, slots=True)
class FleetNode:
    name: str
    row: int
    """of the fleet's rows"""
    there: tuple[tuple[float, float], ...]


def nodes_of(rows: Sequence[NodeKind], folder: Path, horizon_s: float, seed: int) -> list[FleetNode]:
    """Every node with the intervals in which it is there, up to `horizon_s`."""
    out = []
    for index, row in enumerate(rows):
        word, *rest = row.availability.split()
        trace = read_trace(folder / rest[0]) if word == "trace" else []
        rng = np.random.default_rng((seed, index))
        for i in range(row.count):
            if word == "always":
                there: list[tuple[float, float]] = [(0.0, math.inf)]
            elif word == "exponential":
                there = balanced_stays(float(rest[0]), float(rest[1]), horizon_s, rng)
            else:
                there = _above(trace, i)
            out.append(FleetNode(f"{row.kind}-{i}" if row.count > 1 else row.kind, index, tuple(there)))
    return out


def rows_of_csv(path: Path) -> list[NodeKind]:
    """The kinds of node in a CSV. UsageError names the file, the row and the column."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"fleet {path}: {getattr(error, 'strerror', None) or error}") from None
    reader = csv.DictReader(line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#"))
    for name in filter(None, map(str.strip, reader.fieldnames or ())):
        if name not in NodeKind.model_fields:
            raise UsageError(f"fleet {path}: {name}: unknown column{nearest_column(NodeKind, name)}")
    rows = []
    for number, line in enumerate(reader, start=1):
        where = f"fleet {path}, row {number}"
        if None in line or None in line.values():
            raise UsageError(f"{where}: {len(reader.fieldnames or ())} columns are named, and it has more or fewer")
        cells = {name.strip(): cell.strip() for name, cell in line.items()}
        values = {name: _number(where, name, cell) for name, cell in cells.items() if cell}
        rows.append(check_section(NodeKind, values, where, unknown="unknown column"))
    if not rows:
        raise UsageError(f"fleet {path}: no rows")
    return rows


def read_trace(path: Path) -> list[tuple[float, int]]:
    """(second, nodes there from then on) from a CSV of `seconds,nodes`. UsageError names the file."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip() and line.strip()[0] != "#"]
        steps = [(float(a), int(b)) for a, b in (line.split(",") for line in lines if not line.startswith("seconds"))]
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UsageError(f"trace {path}: {getattr(error, 'strerror', None) or error}") from None
    times = [at for at, _ in steps]
    if not steps or times != sorted(set(times)) or times[0] < 0 or any(n < 0 for _, n in steps):
        raise UsageError(f"trace {path}: lines of seconds,nodes with rising times from 0 or later")
    return steps


def _above(trace: Sequence[tuple[float, int]], i: int) -> list[tuple[float, float]]:
    """When more than `i` nodes are there."""
    there: list[tuple[float, float]] = []
    since: float | None = None
    for at, count in trace:
        if count > i and since is None:
            since = at
        elif count <= i and since is not None:
            there.append((since, at))
            since = None
    return [*there, (since, math.inf)] if since is not None else there


def _positive(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


def _number(where: str, column: str, cell: str) -> object:
    """A cell as its column has it: a number, or text."""
    field = NodeKind.model_fields.get(column)
    kind = field.annotation if field is not None else str
    try:
        return int(cell) if kind is int else float(cell) if kind in (float, float | None) else cell
    except ValueError:
        raise UsageError(f"{where}: {column}: {cell!r} is no number") from None
