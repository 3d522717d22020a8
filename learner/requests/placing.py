"""Which node gets which sequence of evaluation and serving, and how many places their classes may hold. Pure.

Training fills every place that the nodes have, and a little more. So a class is not given what training leaves, but a share:
within it a sequence goes to a node whatever training holds there, and training, which counts everything that a node holds, sends
the less to that node. Of a node that may not hold as much as it can, requests take as many places as it may hold. Must not know
tokens, the network or how a place is taken back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from learner.dispatch.node_table import NodeTable, NodeView
from learner.requests.book import RequestBook
from learner.requests.port import RequestClass
from learner.requests.sequence import RequestSequence
from p2p.version import Version

PLACEMENTS_A_LOOK = 256
"""Sequences that are placed at one look: each costs some vector operations over the nodes, which at a thousand of them is a
hundredth of a second for all."""


class Placement(NamedTuple):
    """A waiting sequence goes to a node."""

    sequence: RequestSequence
    peer: str


@dataclass(frozen=True)
class RequestPlaces:
    """Places by class. `shares` is what each may hold of all places while training wants them."""

    shares: Mapping[RequestClass, float]
    training_wants: bool = True
    """else all places are there for requests"""
    places: int = field(default=0)
    """that the nodes have, all together"""
    nodes: int = 0
    spared: frozenset[str] = frozenset()
    """nodes to which training sends nothing, since they hold a newer version back: what requests hold there costs training no
    place and counts for no share, and the sooner it is done the sooner they are back"""

    def own(self, request_class: RequestClass) -> int:
        """Places that are the class's whatever the others do: one at least, unless its share is 0."""
        share = self.shares[request_class]
        return max(1, int(share * self.places)) if share and self.places else 0

    def pinned_nodes(self, request_class: RequestClass) -> int:
        """Nodes that may hold a newer version back for this class: its share of them, one at least."""
        return max(1, int(self.shares[request_class] * self.nodes))

    def allowed(self, request_class: RequestClass, book: RequestBook) -> int:
        """Places that the class may hold now."""
        if self.training_wants:
            return self.own(request_class)
        others = [c for c in self.shares if c != request_class and (book.waits(c) or book.holding(c))]
        return max(self.own(request_class), self.places - sum(self.own(c) for c in others))


def places_of(node: NodeView) -> int:
    """What of the node's places counts: its capacity is its own word, and a stranger may hold few."""
    return node.capacity if node.limit is None else min(node.capacity, node.limit)


def usable(node: NodeView) -> bool:
    """Whether it counts among the places: it is at work, if it may get nothing new just now."""
    return node.capacity > 0 and (not node.draining or node.holds_back)


def served(nodes: Sequence[NodeView]) -> set[Version]:
    """Versions that nodes serve."""
    return {n.version for n in nodes if usable(n)}


def count_places(nodes: Sequence[NodeView], shares: Mapping[RequestClass, float], training_wants: bool) -> RequestPlaces:
    """The places of these nodes."""
    those = [n for n in nodes if usable(n)]
    spared = frozenset(n.peer for n in those if n.holds_back)
    return RequestPlaces(shares, training_wants, sum(map(places_of, those)), len(those), spared)


def place(nodes: Sequence[NodeView], book: RequestBook, places: RequestPlaces) -> list[Placement]:
    """At most PLACEMENTS_A_LOOK sequences that wait, each with its node. The caller assigns all of them."""
    if not any(book.waits(c) for c in places.shares):
        return []
    table = _Table([n for n in nodes if n.live and usable(n)], book, places)
    found: list[Placement] = []
    for request_class in places.shares:
        room = places.allowed(request_class, book) - book.holding(request_class, places.spared)
        nowhere: set[tuple[Version | None, Version, bool]] = set()
        for sequence in book.waiting(request_class) if (room > 0 or places.spared) and table.nodes else ():
            wanted = sequence.ask.exact_version, sequence.least, room > 0
            if wanted in nowhere:
                continue
            i = table.best(sequence, spared_alone=room <= 0)
            if i is None:
                nowhere.add(wanted)
                continue
            table.put(i, sequence)
            found.append(Placement(sequence, table.nodes[i].peer))
            room -= table.nodes[i].peer not in places.spared
            if len(found) == PLACEMENTS_A_LOOK:
                return found
            if room <= 0 and not places.spared:
                break
    return found


class _Table:
    """The nodes, and what has been put on them so far."""

    def __init__(self, nodes: list[NodeView], book: RequestBook, places: RequestPlaces) -> None:
        self.nodes, self._places = nodes, places
        self._table = NodeTable(nodes)
        self._open = np.array([not n.draining for n in nodes], bool)
        self._spared = np.array([n.peer in places.spared for n in nodes], bool)
        self._capacity = np.array([places_of(n) for n in nodes], np.int64)
        self._held = np.array([book.load(n.peer) for n in nodes], np.int64)
        self._at: dict[Version, np.ndarray] = {}
        """version -> bool: which serve it"""
        for i, n in enumerate(nodes):
            self._at.setdefault(n.version, np.zeros(len(nodes), bool))[i] = True
        index = {n.peer: i for i, n in enumerate(nodes)}
        self._pinned = {c: np.zeros(len(nodes), bool) for c in places.shares}
        """class -> which nodes hold requests of it for one exact version"""
        elsewhere: dict[RequestClass, set[str]] = {c: set() for c in places.shares}
        for s in book.held():
            if s.ask.exact_version is not None:
                if s.node in index:
                    self._pinned[s.ask.request_class][index[s.node]] = True
                else:
                    elsewhere[s.ask.request_class].add(s.node)
        self._pinned_elsewhere = {c: len(peers) for c, peers in elsewhere.items()}
        """class -> how many nodes that take nothing now hold such requests"""

    def best(self, sequence: RequestSequence, *, spared_alone: bool = False) -> int | None:
        """The node for it; None when none may take it now. `spared_alone`: one of those that training sends nothing to."""
        exact, of = sequence.ask.exact_version, sequence.ask.request_class
        if exact is None:
            able = self._open & self._table.able(sequence.least)
        else:  # a node that holds a newer version back takes what names the very version that it serves
            able = self._at.get(exact, np.zeros(len(self.nodes), bool))
        free = able & (self._held < self._capacity)
        if spared_alone:
            free &= self._spared
        avoid = self._table.listed(frozenset(sequence.failed_on))
        if (able & ~avoid).any():
            free &= ~avoid
        if sequence.failed_on:
            free = self._table.for_another_try(free, sequence.attempt)
        if exact is not None:
            pinned = self._pinned[of]
            # As few as do it: those that hold such work already, and another only while the class may have one more.
            if (free & pinned).any() or int(pinned.sum()) + self._pinned_elsewhere[of] >= self._places.pinned_nodes(of):
                free &= pinned
        if not free.any():
            return None
        return int(np.argmin(np.where(free, self._table.fill(), np.inf)))

    def put(self, i: int, sequence: RequestSequence) -> None:
        self._table.put(i, float(sequence.context), sequence.growth, 0.0)
        self._held[i] += 1
        if sequence.ask.exact_version is not None:
            self._pinned[sequence.ask.request_class][i] = True
