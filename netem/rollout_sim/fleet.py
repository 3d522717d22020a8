"""The engines of a simulated pool: how fast they are, and when they are there. Pure.

An engine's coefficients follow from two published numbers of its GPU (memory bandwidth and dense bf16 operations) and of the
model (parameters, bytes of KV a token), by the roofline: a decoding step reads the weights or computes on them, and reads the
context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from pydantic import Field

from learner.dispatch.throughput import Throughput
from learner.section import Section
from netem.networks.availability import balanced_stays

BANDWIDTH_SHARE = 0.7
"""Share of the data sheet's memory bandwidth that decoding kernels reach. Assumed; good kernels reach 0.6 to 0.8."""

DECODE_SHARE = 0.5
"""Share of the data sheet's dense operations that decoding reaches where it is bound by them. Assumed."""

PREFILL_SHARE = 0.5
"""Share of the data sheet's dense operations that prefill reaches. Assumed."""

OVERHEAD_S = 0.004
"""Seconds of each decoding step for scheduling, sampling and launches. Assumed."""

MEMORY_SHARE = 0.9
"""Share of a GPU's memory that the engine uses for weights and KV: vLLM's default."""


class Served(Section):
    """A model as engines hold it, in bf16. Qwen3-8B unless given, from its published config: 36 layers, 8 KV heads of 128 values,
    keys and values, 2 bytes each."""

    name: str = "Qwen3-8B"
    """Name, for tables."""
    parameters: float = Field(default=8.2e9, gt=0)
    """Number of parameters."""
    kv_bytes: float = Field(default=2.0 * 36 * 8 * 128 * 2, gt=0)
    """Bytes of keys and values of one token of context."""


QWEN3_8B = Served()
"""The model of the benchmark."""


class FullEngine(NamedTuple):
    """An engine that never lacks work."""

    sequences: int
    """that run at once"""
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class EngineKind:
    """What an engine of a kind can do with a model."""

    model: Throughput
    prefill_s: float
    """seconds of prefill a token"""
    room: int
    """tokens of KV that fit"""
    limit: int
    """most sequences at once"""

    def full(self, held: float) -> FullEngine:
        """What it does when it never lacks work; `held`: tokens of context of a sequence."""
        n = max(1, min(self.limit, int(self.room / held)))
        return FullEngine(n, self.model.rate(n, n * held))


@dataclass(frozen=True, slots=True)
class Kind:
    """A GPU by its data sheet."""

    name: str
    bandwidth: float
    """of its memory, bytes per second"""
    operations: float
    """dense bf16 operations per second"""
    memory: float
    """bytes of memory"""

    def throughput(self, model: Served) -> Throughput:
        """Coefficients of a decoding step, by the roofline."""
        read = self.bandwidth * BANDWIDTH_SHARE
        weights = 2 * model.parameters
        return Throughput(model.kv_bytes / read, weights / read, weights / (self.operations * DECODE_SHARE), OVERHEAD_S)

    def prefill_s(self, model: Served) -> float:
        """Seconds of prefill a token."""
        return 2 * model.parameters / (self.operations * PREFILL_SHARE)

    def context(self, model: Served) -> int:
        """Tokens of KV that fit beside the weights."""
        return max(0, int((self.memory * MEMORY_SHARE - 2 * model.parameters) / model.kv_bytes))

    def engine(self, model: Served, limit: int) -> EngineKind:
        """The engine of such a GPU, which runs at most `limit` sequences at once."""
        return EngineKind(self.throughput(model), self.prefill_s(model), self.context(model), limit)


KINDS = {
    kind.name: kind
    for kind in (
        Kind("H100-SXM", 3.35e12, 989e12, 80e9),
        Kind("A100-80G", 2.04e12, 312e12, 80e9),
        Kind("L40S", 0.864e12, 362e12, 48e9),
        Kind("RTX4090", 1.008e12, 165e12, 24e9),
    )
}
"""GPUs of the benchmark's fleets, with the numbers of their data sheets."""


@dataclass(frozen=True, slots=True)
class Seat:
    """One node: its kind, and the intervals (from, to) in simulated seconds in which it is there."""

    name: str
    kind: Kind
    there: tuple[tuple[float, float], ...] = ((0.0, float("inf")),)


def fleet(counts: dict[str, int]) -> tuple[Seat, ...]:
    """So many nodes of each kind of `KINDS`, always there."""
    return tuple(Seat(f"{name}-{i}", KINDS[name]) for name, count in counts.items() for i in range(count))


def preemptible(
    seats: Sequence[Seat], *, mean_up_s: float, mean_down_s: float, horizon_s: float, seed: int, steady: Sequence[str] = ()
) -> tuple[Seat, ...]:
    """The same nodes coming and going until `horizon_s`, with exponential times there and away. Kinds named in `steady` stay."""
    rng = np.random.default_rng(seed)
    stays = lambda: tuple(balanced_stays(mean_up_s, mean_down_s, horizon_s, rng))
    return tuple(seat if seat.kind.name in steady else replace(seat, there=stays()) for seat in seats)
