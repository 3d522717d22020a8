"""Which engines there are in a simulated pool, how fast, and when they are there. Pure.

An engine's coefficients follow from two published numbers of its GPU (memory bandwidth and dense bf16 operations) and of the
model (parameters, bytes of KV a token), by the roofline: a decoding step reads the weights or computes on them, and reads the
context. """

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from learner.dispatch.throughput import Throughput
from netem.networks.availability import balanced_stays

BANDWIDTH_SHARE = 0.7
"""Of the data sheet's, that decoding kernels reach."""

DECODE_SHARE = 0.5
PREFILL_SHARE = 0.5
"""Of the data sheet's operations."""

OVERHEAD_S = 0.004
"""Of each step: scheduling, sampling, launches."""

MEMORY_SHARE = 0.9
"""Of a GPU's memory that the engine uses, weights and KV."""


@dataclass(frozen=True, slots=True)
class Served:
    """A model as engines hold it: bf16."""

    name: str
    parameters: float
    kv_bytes: float
    """of one token of context"""


QWEN3_8B = Served("Qwen3-8B", 8.2e9, 2 * 36 * 8 * 128 * 2)
"""36 layers, 8 KV heads of 128, keys and values, bf16: its published config."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A GPU by its data sheet."""

    name: str
    bandwidth: float
    """bytes/s"""
    operations: float
    """dense bf16/s"""
    memory: float
    """bytes"""

    def throughput(self, model: Served) -> Throughput:
        read = self.bandwidth * BANDWIDTH_SHARE
        weights = 2 * model.parameters
        return Throughput(model.kv_bytes / read, weights / read, weights / (self.operations * DECODE_SHARE), OVERHEAD_S)

    def prefill_s(self, model: Served) -> float:
        """Seconds a token of prompt."""
        return 2 * model.parameters / (self.operations * PREFILL_SHARE)

    def context(self, model: Served) -> int:
        """Tokens of KV that fit beside the weights."""
        return max(0, int((self.memory * MEMORY_SHARE - 2 * model.parameters) / model.kv_bytes))


KINDS = {
    kind.name: kind
    for kind in (
        Kind("H100-SXM", 3.35e12, 989e12, 80e9),
        Kind("A100-80G", 2.04e12, 312e12, 80e9),
        Kind("L40S", 0.864e12, 362e12, 48e9),
        Kind("RTX4090", 1.008e12, 165e12, 24e9),
    )
}


@dataclass(frozen=True, slots=True)
class Seat:
    """One node: its kind, and the intervals (seconds) in which it is there."""

    name: str
    kind: Kind
    there: tuple[tuple[float, float], ...] = ((0.0, float("inf")),)


def fleet(counts: dict[str, int]) -> tuple[Seat, ...]:
    """So many of each kind, always there."""
    return tuple(Seat(f"{name}-{i}", KINDS[name]) for name, count in counts.items() for i in range(count))


def preemptible(
    seats: Sequence[Seat], mean_up_s: float, mean_down_s: float, horizon_s: float, seed: int, steady: Sequence[str] = ()
) -> tuple[Seat, ...]:
    """The same seats coming and going: exponential times there and away (`steady` kinds stay)."""
    rng = np.random.default_rng(seed)
    out = []
    for seat in seats:
        if seat.kind.name in steady:
            out.append(seat)
            continue
        there = balanced_stays(mean_up_s, mean_down_s, horizon_s, rng)
        out.append(Seat(seat.name, seat.kind, tuple(there)))
    return tuple(out)
