"""The nodes as one table: what each could take, what it would gain, how fast its sequences would be. Pure; it decides nothing.

Columns over the nodes, so that one look at ten thousand of them is a few vector operations. Must not know groups, ledgers or
the network.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import ArrayLike

from learner.dispatch.throughput import Throughput
from p2p.version import Version

OVERSUBSCRIPTION = 0.25
"""Sequences a node may hold beyond its capacity, as a share of it (at least one): the next ones are already there when
a slot frees, so a round trip to the learner idles no slot. More would only queue work out of reach of other nodes
(RLBoost's delayed dispatch, arXiv 2510.19225)."""

SPEED_RANGE = (0.25, 4.0)
"""A node whose throughput is not fitted yet counts by its rate per sequence over the median, within these bounds: short samples
mislead."""

FILL = 0.95
"""Share of a node's KV memory up to which it gets more sequences, where it says how large its memory is."""

MAX_NEED = 0.45
"""What an urgent sequence needs counts at most as this share of the pace that it would have alone on the node: a node is never
emptied for one sequence."""

MAX_SHARED_NEED = 0.3
"""The same share where the sequence that comes is as urgent as those that are there: they must share."""

TRIED, DELIVERING = 2, 0.5
"""What so many nodes failed, while many are silent, goes to who delivered lately at least so many times what the best did."""

NEXT_TO_NOTHING = 1e-9
"""Tokens that count as delivered lately by a node that was late, while nodes hold the trainer up: what is tried again goes to
others first."""

SAME = 0.01
"""Gains that differ by less than this share count as equal, and the emptier node is taken."""


@dataclass(slots=True)
class NodeView:
    """A node as the head sees it now, commands in flight included. Nobody changes one. It is not frozen since that takes four
    times as long to make, and some thousands are made a second."""

    peer: str
    version: Version
    """installed and serving"""
    running: int
    waiting: int
    """sequences sent to it and not yet decoding"""
    capacity: int
    """sequences it can decode at once"""
    tokens_per_s: float = 0.0
    """over all its sequences; 0 when not yet measured or idle"""
    live: bool = True
    draining: bool = False
    """finishes what it has, gets nothing new"""
    holds_back: bool = False
    """it does so only until it commits a newer version, and takes what names the very version that it serves"""
    model: Throughput | None = None
    """None until it is fitted"""
    context: float = 0.0
    """tokens that its sequences hold, prompts included"""
    growth: float = 0.0
    """tokens that they will probably still make"""
    room: float = 0.0
    """tokens of KV that it can hold; 0 when it does not say"""
    need: float = 0.0
    """tokens per second that the most pressed of its sequences needs (`WaitingSequence.need`)"""
    limit: int | None = None
    """most sequences that it may hold, whatever it can decode; None: as many as it can, and some that wait there"""
    credible: bool = True
    """its word counts"""
    delivers: float = 0.0
    """tokens that came from it lately, while silent nodes hold the trainer up; 0: not gone by"""
    unheard_s: float = 0.0
    """seconds since it last said how it is"""
    gives_way: bool = False
    """quicker ones would make sooner what it holds (`giving_way`): it gets what they have no places for"""
    tries: bool = False
    """it gives way, and gets one sequence all the same, to show how quick it is now"""

    @property
    def load(self) -> int:
        """Sequences with it."""
        return self.running + self.waiting


def peak(context: ArrayLike, growth: ArrayLike) -> np.ndarray:
    """The most tokens that sequences will probably hold at one time, which hold `context` now and will make `growth` more.

    Let in by what they hold at first, sequences grow until the memory is full, and an engine then throws KV away that it has to
    make anew. But they do not all come to their ends together: while some still grow, others leave. With what each will still
    make spread evenly from nothing to twice its mean, the share s of that from now they hold (1 - s) (context + 2 s growth), at
    the most (2 growth + context)^2 / (8 growth): context and half of `growth` while they are young, `context` alone from where
    they hold twice of what they will still make. """
    context, growth = np.maximum(context, 0.0), np.maximum(growth, 0.0)
    grows = 2 * growth > context
    each = np.where(grows, growth, 1.0)
    return np.where(grows, (2 * each + context) * ((2 * each + context) / (8 * each)), context)


def oversubscribed(node: NodeView) -> int:
    """Most sequences that the node may hold, running and waiting."""
    able = node.capacity + max(1, math.ceil(node.capacity * OVERSUBSCRIPTION))
    return able if node.limit is None else min(able, node.limit)


def speeds(nodes: Sequence[NodeView]) -> dict[str, float]:
    """Each node's tokens per second and sequence, relative to the median of the nodes that have a measurement.

    A node without one (it just joined, or idles) counts as typical: it must not be starved for having been idle.
    """
    rates = {n.peer: n.tokens_per_s / n.running for n in nodes if n.running > 0 and n.tokens_per_s > 0}
    typical = median(rates.values()) if rates else 1.0
    low, high = SPEED_RANGE
    return {n.peer: min(high, max(low, rates.get(n.peer, typical) / typical)) for n in nodes}


def models(nodes: Sequence[NodeView]) -> list[Throughput]:
    """Each node's, or a guess: the rate per sequence of `speeds`, half of it when the node is full. With that, nodes fill
    evenly, a fast one counting as a larger one."""
    fitted = [n.model.pace(1, 0) for n in nodes if n.model is not None]
    unit = median(fitted) if fitted else 1.0
    speed = speeds([n for n in nodes if n.model is None])
    out = []
    for n in nodes:
        if n.model is not None:
            out.append(n.model)
        else:
            step = 1.0 / (unit * speed.get(n.peer, 1.0))
            out.append(Throughput(0.0, 0.0, step / max(1, n.capacity), step))
    return out


class NodeTable:
    """The usable nodes and what has been put on them so far."""

    def __init__(self, nodes: Sequence[NodeView]) -> None:
        self.nodes = nodes
        found = models(nodes)
        column = lambda values: np.array(list(values), np.float64)
        self._k1, self._k2 = column(m.k1 for m in found), column(m.k2 for m in found)
        self._k3, self._k4 = column(m.k3 for m in found), column(m.k4 for m in found)
        self.load, self.limit = column(n.load for n in nodes), column(oversubscribed(n) for n in nodes)
        self.credible = np.array([n.credible for n in nodes], bool)
        """whose word counts"""
        self.gives_way = np.array([n.gives_way for n in nodes], bool)
        self.tries = np.array([n.tries for n in nodes], bool)
        self._delivers, self._capacity = column(n.delivers for n in nodes), column(n.capacity for n in nodes)
        self.context = column(n.context for n in nodes)
        self.growth = column(n.growth for n in nodes)
        self._room = column(n.room * FILL if n.room else np.inf for n in nodes)
        known = np.array([n.model is not None for n in nodes], bool)
        self.fastest = float(np.max(MAX_NEED * self.alone(0.0)[known], initial=0.0))
        """tokens per second: no sequence can need more than it could be given. 0, and so no need, while no node's speed is
        known"""
        self.need = np.minimum(column(n.need for n in nodes), self.fastest)
        self._versions = sorted({n.version for n in nodes})
        self._at = np.array([self._versions.index(n.version) for n in nodes], np.int64)
        self._index = {n.peer: i for i, n in enumerate(nodes)}

    def able(self, least: Version) -> np.ndarray:
        """bool: which are at `least` or newer."""
        first = next((i for i, v in enumerate(self._versions) if v >= least), len(self._versions))
        return self._at >= first

    def free(self, context: float, growth: float) -> np.ndarray:
        """bool: which have a place for one more sequence that holds `context` tokens and will probably make `growth` more."""
        # Whatever it holds, a node with nothing to do takes one: nobody else might.
        fits = peak(self.context + context, self.growth + growth) <= self._room
        return (self.load < self.limit) & (fits | (self.load == 0))

    def harmless(self, context: float, growth: float, need: float) -> np.ndarray:
        """bool: which one sequence more, that needs so many tokens per second, would not slow too far for those there."""
        # What is as pressed as they are shares with them; what is not must leave them their pace.
        reach = np.where(need >= self.need / 2, MAX_SHARED_NEED, MAX_NEED) if need > 0 else MAX_NEED
        return self.pace(1, context) >= np.minimum(self.need, reach * self.alone(context + growth / 2))

    def count(self, context: float, growth: float, pace: bool) -> np.ndarray:
        """int64: how many new sequences like this each has places for; with `pace`, without slowing what is pressed there."""
        most = self._fit(context, growth)
        if pace:
            target = np.minimum(self.need, MAX_NEED * self.alone(context))
            with np.errstate(divide="ignore", invalid="ignore"):
                spare = 1.0 / target - self._k4 - self._k1 * self.context
                each = self._k1 * context
                by_weights = np.where(each > 0, (spare - self._k2) / each, np.where(spare >= self._k2, np.inf, 0))
                by_work = (spare - self._k3 * self.load) / (each + self._k3)
                fast = np.where(each + self._k3 > 0, np.minimum(by_weights, by_work), by_weights)
            most = np.where(target > 0, np.minimum(most, np.floor(fast)), most)
        # Whatever it holds, a node with nothing to do takes one: nobody else might.
        return np.maximum(most, (self.load == 0) & (self.limit > 0)).astype(np.int64)

    def _fit(self, context: float, growth: float) -> np.ndarray:
        """How many new sequences fit, each by itself: the most n whose peak is within the room."""
        low, high = np.zeros(len(self.nodes)), np.maximum(self.limit - self.load, 0.0)
        for _ in range(int(high.max(initial=0.0)).bit_length()):
            middle = np.ceil((low + high) / 2)
            fits = peak(self.context + middle * context, self.growth + middle * growth) <= self._room
            low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1)
        return low

    def for_another_try(self, free: np.ndarray, attempt: int) -> np.ndarray:
        """bool: of these, those that are to have what another failed. Whose word counts, where there is one, else what one
        stranger held up goes to the next. While many are silent, what two have failed goes to who delivers and can decode it at
        once; what one has goes to anybody, since it is so that the silent are found."""
        if (free & self.credible).any():
            free = free & self.credible
        late = (0 < self._delivers) & (self._delivers <= NEXT_TO_NOTHING)
        if (free & ~late).any():
            free = free & ~late
        idle = free & (self.load < self._capacity)
        most = self._delivers[idle].max(initial=0.0)
        return idle & (self._delivers >= DELIVERING * most) if most and attempt >= TRIED else free

    def listed(self, peers: frozenset[str]) -> np.ndarray:
        """bool: which are these."""
        out = np.zeros(len(self.nodes), bool)
        out[[self._index[p] for p in peers if p in self._index]] = True
        return out

    def pace(self, more: float = 1.0, context: float = 0.0) -> np.ndarray:
        """Tokens per second of each sequence, with `more` of them that hold `context` tokens."""
        n = np.maximum(self.load + more, 1.0)
        return 1.0 / (self._k1 * (self.context + context) + np.maximum(self._k2, self._k3 * n) + self._k4)

    def alone(self, context: float) -> np.ndarray:
        """Tokens per second that one sequence would make with nothing beside it."""
        return 1.0 / (self._k1 * context + np.maximum(self._k2, self._k3) + self._k4)

    def gain(self, context: float) -> np.ndarray:
        """Tokens per second that one sequence more adds."""
        return (self.load + 1) * self.pace(1, context) - self.load * self.pace(0)

    def fill(self) -> np.ndarray:
        """How full each would be with one more: of its places, or of its memory where that is scarcer."""
        capacity = np.maximum(1.0, np.array([n.capacity for n in self.nodes], np.float64))
        held = np.where(np.isfinite(self._room), peak(self.context, self.growth) / self._room, 0.0)
        return np.maximum((self.load + 1) / capacity, held)

    def put(self, i: int, context: float, growth: float, need: float, sequences: int = 1) -> None:
        """`sequences` more on the i-th, that hold so much together (negative: fewer)."""
        self.load[i] += sequences
        self.context[i] += context
        self.growth[i] += growth
        self.need[i] = max(self.need[i], min(need, self.fastest))
