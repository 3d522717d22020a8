"""The group-level simulator's view of lengths and of kinds of node: a node is a server of whole groups. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from netem.planning.cost_scenario import CostScenario
from netem.planning.priced_fleet import EngineKind

SQUEEZED = 2
"""Groups beyond its slots that a node takes when they are in a hurry; all groups there get slower."""

BLOCK = 4096
"""Groups whose lengths are drawn at one time: numpy is fast on many."""


class GroupLengths(NamedTuple):
    """Tokens of one group."""

    longest: float
    """of its longest member"""
    tokens: float
    """of all members"""


class DrawnLengths:
    """Lengths of one group after the other, from the scenario's seed."""

    def __init__(self, scenario: CostScenario) -> None:
        self.workload = scenario.workload
        self._rng = np.random.default_rng((scenario.file.seed, 77))
        self._left: list[tuple[float, float]] = []

    def draw(self) -> GroupLengths:
        """The next group's."""
        if not self._left:
            lengths = self.block(BLOCK)
            self._left = list(zip(lengths.max(axis=1).tolist(), lengths.sum(axis=1).tolist(), strict=True))
        return GroupLengths(*self._left.pop())

    def block(self, count: int) -> np.ndarray:
        """The next `count` groups: (groups, samples), tokens of each member."""
        w = self.workload
        means = math.log(w.median) + w.between * self._rng.standard_normal(count)
        logs = means[:, None] + w.within * self._rng.standard_normal((count, w.samples))
        return np.clip(np.exp(logs), 8, w.most).astype(np.int64).astype(float)


@dataclass(frozen=True)
class Servers:
    """A kind of node as a server of groups."""

    slots: int
    """groups that a full node runs at once"""
    full: float
    """tokens per second that a full node makes"""
    paces: tuple[float, ...]
    """tokens per second that a group's longest member makes, by groups under way"""
    rates: tuple[float, ...]
    """tokens per second that it makes, by groups under way"""
    gains: tuple[float, ...]
    """tokens per second that one group more adds, by groups under way"""
    recompute_s: float
    """seconds that it takes to compute the keys and values of everything that runs on a full node"""

    @classmethod
    def of(cls, engine: EngineKind, lengths: np.ndarray, prompt: int, samples: int) -> Servers:
        """`engine` on a workload whose lengths are an array of (groups, samples); `prompt`: tokens of a prompt."""
        held = prompt + float((lengths**2).sum() / lengths.sum()) / 2
        sequences, full = engine.full(held)
        at_once = samples * float(lengths.mean() / lengths.max(axis=1).mean())
        slots = max(1, round(sequences / at_once))
        running = [min(1.0, busy / slots) * sequences for busy in range(slots + SQUEEZED + 1)]
        rates = [engine.model.rate(n, n * held) for n in running]
        paces = [0.0, *(rate / (busy * at_once) for busy, rate in enumerate(rates) if busy)]
        gains = [b - a for a, b in pairwise(rates)]
        recompute_s = engine.prefill_s * sequences * held
        return cls(slots, full, tuple(paces), rates=tuple(rates), gains=tuple(gains), recompute_s=recompute_s)


@dataclass(slots=True)
class SimGroup:
    """A group under way, or one that waits for a node."""

    version: int
    since: float
    """when it was reserved"""
    longest: float
    """tokens that its longest member still had to make when it began on its node"""
    tokens: float
    """tokens of all its members"""
    end: float = 0.0
    """when it ends, on its node's clock"""


@dataclass(slots=True)
class SimNode:
    """Its clock counts the tokens that each running sequence makes; a group ends `longest` of them after it began."""

    row: int
    groups: dict[int, SimGroup] = field(default_factory=dict)
    on: bool = False
    stamp: int = 0
    """number of the one event of this node that counts"""
    clock: float = 0.0
    at: float = 0.0
    """time up to which the clock and `made` are right"""
    stall: float = 0.0
    """seconds until it decodes again, a version holding it up"""
    paid: float = 0.0
    """seconds of its row's debts that it has taken notice of"""
    made: float = 0.0
    """tokens made so far"""
