"""Which node gets which sequence, and how many new groups to open. Pure: a view of the nodes in, a plan out.

Must not know the network, the ledger's buffers or token values. `choose` is called whenever something moved (a node
joined, a sequence ended, a version was installed); between two calls its caller applies the whole plan.

Three decisions are strategies, so that a throughput model, a length predictor or a long-tail split can replace them one
by one: the order of requests, the cost of putting one more sequence on a node, and how many a node may hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from statistics import median

from p2p.version import Version

OVERSUBSCRIPTION = 0.25
"""Sequences a node may hold beyond its capacity, as a share of it (at least one): the next ones are already there when
a slot frees, so a round trip to the learner idles no slot. More would only queue work out of reach of other nodes."""

SPEED_RANGE = (0.25, 4.0)
"""A node's measured rate per sequence counts at most so far from the median: short samples mislead."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node as the head sees it now, commands in flight included."""

    peer: str
    version: Version
    """installed and serving"""
    running: int
    waiting: int
    """sent to it and not yet decoding"""
    capacity: int
    """sequences it can decode at once"""
    tokens_per_s: float = 0.0
    """over all its sequences; 0 when not yet measured or idle"""
    live: bool = True
    draining: bool = False
    """finishes what it has, gets nothing new"""

    @property
    def load(self) -> int:
        return self.running + self.waiting


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence that waits for a node."""

    request_id: str
    group_id: int
    reserved: Version
    """the version its group was reserved at: how stale it is"""
    min_version: Version
    """a node must be at or past it: `reserved`, or the last span's version once tokens exist"""
    tokens: int = 0
    """completion tokens it already has (the prefix to prefill)"""
    expected_tokens: int = 0
    """completion tokens it will probably still make; 0 when nobody knows"""
    attempt: int = 0
    """0 the first time; more after a node was lost or refused it"""
    avoid: frozenset[str] = frozenset()
    """peers that failed it before: used only when no other node could ever take it"""


@dataclass(frozen=True, slots=True)
class Opening:
    """Reserve and open up to `groups` new groups at `version`."""

    version: Version
    groups: int


@dataclass(frozen=True, slots=True)
class Plan:
    assign: tuple[tuple[str, str], ...] = ()
    """(request_id, peer), in the order to send"""
    open: tuple[Opening, ...] = ()
    """freshest version first"""
    held: Mapping[str, str] = field(default_factory=dict)
    """request_id -> why it got no node"""


Order = Callable[[Request], tuple]
Cost = Callable[[NodeView, int, float], float]
Limit = Callable[[NodeView], int]


def stalest_first(request: Request) -> tuple:
    """Re-dispatched before fresh (they hold up a group that others work on), then stalest, then longest expected."""
    return (request.attempt == 0, request.reserved, -request.expected_tokens, -request.tokens, request.group_id)


def fill_cost(node: NodeView, load: int, speed: float) -> float:
    """How full the node would be with one more sequence, a fast node counting as a larger one."""
    return (load + 1) / (node.capacity * speed)


def oversubscribed(node: NodeView) -> int:
    """Sequences the node may hold, running and waiting."""
    return node.capacity + max(1, math.ceil(node.capacity * OVERSUBSCRIPTION))


def speeds(nodes: Sequence[NodeView]) -> dict[str, float]:
    """Each node's tokens per second and sequence, relative to the median of the nodes that have a measurement.

    A node without one (it just joined, or idles) counts as typical: it must not be starved for having been idle.
    """
    rates = {n.peer: n.tokens_per_s / n.running for n in nodes if n.running > 0 and n.tokens_per_s > 0}
    typical = median(rates.values()) if rates else 1.0
    low, high = SPEED_RANGE
    return {n.peer: min(high, max(low, rates.get(n.peer, typical) / typical)) for n in nodes}


@dataclass(frozen=True)
class Dispatcher:
    """The strategies in force, and the one decision made with them."""

    samples: int
    """sequences in a group"""
    order: Order = stalest_first
    cost: Cost = fill_cost
    limit: Limit = oversubscribed

    def choose(
        self, nodes: Iterable[NodeView], pending: Iterable[Request], room: Callable[[Version], int] = lambda _: 0
    ) -> Plan:
        """Place what can be placed, then say how many groups to open for the places left over.

        `room(version)` is how many groups the ledger would grant at that version now. A request is held when no node
        with a free place is at its `min_version`. A new group is counted against the nodes at its version: its members
        may later run on any node at or past it. Groups are opened until no place is empty, so the last one may overhang
        by up to `samples - 1` members that wait here: a node smaller than a group would otherwise never get one.
        """
        usable = [n for n in nodes if n.live and not n.draining and n.capacity > 0]
        speed = speeds(usable)
        load = {n.peer: n.load for n in usable}
        if len(load) != len(usable):
            raise ValueError("two nodes with one peer id")

        # One heap of free nodes for each installed version: versions are few, so a placement costs a few heap tops and
        # not a walk over all nodes, and the simulator's ten thousand nodes are no trouble.
        nodes_at: dict[Version, list[NodeView]] = {}
        for n in usable:
            nodes_at.setdefault(n.version, []).append(n)
        by_peer = {n.peer: n for n in usable}

        def entry(n: NodeView) -> tuple[float, float, str]:
            return (self.cost(n, load[n.peer], speed[n.peer]), -speed[n.peer], n.peer)

        heaps = {v: [entry(n) for n in group if load[n.peer] < self.limit(n)] for v, group in nodes_at.items()}
        for heap in heaps.values():
            heapify(heap)

        assign: list[tuple[str, str]] = []
        held: dict[str, str] = {}
        for request in sorted(pending, key=self.order):
            able = [v for v in nodes_at if v >= request.min_version]
            # A broken node fails fast, so it is always the least loaded: without this one node could use up a whole
            # failure budget.
            avoid = request.avoid
            if avoid and all(n.peer in avoid for v in able for n in nodes_at[v]):
                avoid = frozenset()
            if avoid:
                tops = [(min(free), v) for v in able if (free := [e for e in heaps[v] if e[2] not in avoid])]
            else:
                tops = [(heaps[v][0], v) for v in able if heaps[v]]
            if not tops:
                what = "a free place" if able else f"version {request.min_version} or newer"
                held[request.request_id] = f"none of {len(usable)} nodes has {what}"
                continue
            top, version = min(tops)
            heap, node = heaps[version], by_peer[top[2]]
            load[node.peer] += 1
            assign.append((request.request_id, node.peer))
            if heap[0] == top:
                heappop(heap)
            else:
                heap.remove(top)
                heapify(heap)
            if load[node.peer] < self.limit(node):
                heappush(heap, entry(node))

        free_at: dict[Version, int] = {}
        for n in usable:
            places = self.limit(n) - load[n.peer]
            if places > 0:
                free_at[n.version] = free_at.get(n.version, 0) + places
        openings: list[Opening] = []
        opened = 0
        for version in sorted(free_at, reverse=True):
            # Reservations of this very plan are not in the ledger yet. What was opened at fresher versions takes room
            # that these could use as well, so all of it counts.
            groups = min(math.ceil(free_at[version] / self.samples), max(0, room(version) - opened))
            if groups > 0:
                openings.append(Opening(version, groups))
                opened += groups
        return Plan(tuple(assign), tuple(openings), held)
