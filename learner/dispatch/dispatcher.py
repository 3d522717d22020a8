"""Which node gets which sequence, and how many new groups to open. Pure: views of the nodes in, a plan out.

Must not know the network, the ledger's buffers or token values. `choose` is called whenever something moved (a node
joined, a sequence ended, a version was installed); between two calls its caller applies the whole plan. `migrate` says what to
move between nodes that live. Each strategy can be switched off (`Strategies`), so that its worth can be measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from learner.dispatch.node_table import SAME, NodeTable, NodeView
from learner.section import Section
from p2p.version import Version

__all__ = ["Assignment", "DispatchPlan", "Dispatcher", "NodeView", "Opening", "Strategies", "WaitingSequence"]


@dataclass(frozen=True, slots=True)
class WaitingSequence:
    """One sequence that waits for a node."""

    request_id: str
    group_id: int
    reserved: Version
    """the version its group was reserved at: how stale it is"""
    min_version: Version
    """a node must be at or past it: `reserved`, or the last span's version once tokens exist"""
    tokens: int = 0
    """completion tokens that it already has, which are to be prefilled"""
    expected_tokens: int = 0
    """completion tokens that it will probably still make; 0 when that is not known"""
    attempt: int = 0
    """0 the first time; more after a node was lost or refused it"""
    avoid: frozenset[str] = frozenset()
    """peers that failed it before: used only when no other node could ever take it"""
    prompt_tokens: int = 0
    need: float = 0.0
    """tokens per second with which it ends in time for the learner; 0 when there is no hurry or that is not known"""
    prefer: str = ""
    """the peer that may still hold its keys and values: taken before any other where it may take it now; "": none"""

    @property
    def context(self) -> int:
        """Tokens that it holds on the node that takes it."""
        return self.prompt_tokens + self.tokens


class Assignment(NamedTuple):
    """A waiting sequence goes to a node."""

    request_id: str
    peer: str


@dataclass(frozen=True, slots=True)
class Opening:
    """Reserve and open up to `groups` new groups at `version`."""

    version: Version
    groups: int


@dataclass(frozen=True, slots=True)
class DispatchPlan:
    """What `choose` decided; the caller applies all of it."""

    assign: tuple[Assignment, ...] = ()
    """in the order to send"""
    open: tuple[Opening, ...] = ()
    """freshest version first"""


class Strategies(Section):
    """Strategies of the dispatcher, to be switched off to see what each is worth (`shoal bench rollouts`)."""

    gain: bool = True
    """A sequence goes to the node whose throughput grows most (StaleFlow, arXiv 2601.12784), else to the emptiest."""
    longest_first: bool = True
    """Of equally stale sequences, those expected to be longest go first (StreamRL, arXiv 2504.15930)."""
    # StreamRL: long ones to fast nodes at a small batch. With `migration` it gains nothing, and where capacity is scarce it
    # costs, since which sequences are long shows only later.
    pace: bool = False
    """Instead of `gain`: a sequence goes to the node where it is fastest, unless it slows down urgent ones there."""
    # The most urgent move first. The last member of a group bounds a run far more than tokens per second do.
    give_way: bool = True
    """Nodes get nothing while quicker ones would make all that may be in flight before they had made one (Lin and Kumar 1984)."""
    migration: bool = True
    """Running sequences move to nodes where they are enough faster to pay for the move (RLBoost, arXiv 2510.19225)."""


USUAL_STRATEGIES = Strategies()
"""What the dispatcher goes by unless the configuration says otherwise."""


@dataclass(frozen=True)
class Dispatcher:
    """The strategies in force, and the decisions made with them."""

    samples: int
    """sequences in a group"""
    strategies: Strategies = USUAL_STRATEGIES

    def order(self, request: WaitingSequence) -> tuple:
        """Re-dispatched before fresh (they hold up a group that others work on), then stalest, then longest expected."""
        longest = -request.expected_tokens if self.strategies.longest_first else 0
        return (request.attempt == 0, request.reserved, longest, -request.tokens, request.group_id)

    def choose(
        self, nodes: Iterable[NodeView], pending: Iterable[WaitingSequence], room: Callable[[Version], int] = lambda _: 0,
        prompt_tokens: float = 0.0, expected_tokens: float = 0.0,
    ) -> DispatchPlan:  # fmt: skip
        """Place what can be placed, then say how many groups to open for the places left over.

        `room(version)` is how many groups the ledger would grant at that version now; `prompt_tokens` and `expected_tokens` are
        what a new sequence probably holds and makes. A request is held when no node with a free place is at its `min_version`.
        A new group is counted against the nodes at its version: its members may later run on any node at or past it. Groups are
        opened until no place is empty, so the last one may overhang by up to `samples - 1` members that wait here: a node
        smaller than a group would otherwise never get one. """
        usable = [n for n in nodes if n.live and not n.draining and n.capacity > 0]
        if len({n.peer for n in usable}) != len(usable):
            raise ValueError("two nodes with one peer id")
        table = NodeTable(usable)
        assign: list[Assignment] = []
        full: set[Version] = set()
        for request in sorted(pending, key=self.order):
            if request.min_version in full:
                continue
            i = self._place(table, request)
            if i is None:
                if not (table.able(request.min_version) & (table.load < table.limit)).any():
                    full.add(request.min_version)  # whatever else is asked of such nodes
                continue
            table.put(i, request.context, request.expected_tokens, request.need)
            assign.append(Assignment(request.request_id, usable[i].peer))
        return DispatchPlan(tuple(assign), self._open(table, room, prompt_tokens, expected_tokens))

    def _place(self, table: NodeTable, request: WaitingSequence) -> int | None:
        """The node for it; None when no node may take it now."""
        able = table.able(request.min_version)
        # A broken node fails fast, so it is always the least loaded: without this one node could use up a whole failure
        # budget.
        avoid = table.listed(request.avoid)
        if not (able & ~avoid).any():
            # Not by what others may hold just now: who fails at once would have a sequence until its budget is gone.
            avoid[:] = False
        free = able & ~avoid & table.free(request.context, request.expected_tokens)
        quicker = ~table.gives_way
        if not request.attempt and (free & table.tries).any():
            free = free & table.tries
        elif (free & quicker).any():
            free = free & quicker
        if request.avoid:
            free = table.for_another_try(free, request.attempt)
        held = free & table.listed(frozenset({request.prefer})) if request.prefer else free
        if held is not free and held.any():
            return int(held.argmax())
        return self._best(table, free, request.context, request.need, request.expected_tokens) if free.any() else None

    def _best(self, table: NodeTable, free: np.ndarray, context: float, need: float, expected: float) -> int | None:
        if self.strategies.pace:
            after = table.pace(1, context)
            free = free & table.harmless(context, expected, need)
            if not free.any():
                return None
            free = free & (after >= (1 - SAME) * after[free].max())
        elif self.strategies.gain:
            gain = np.where(free, table.gain(context), -np.inf)
            free = free & (gain >= gain.max() - SAME * abs(gain.max()))
        return int(np.argmin(np.where(free, table.fill(), np.inf)))

    def _open(self, table: NodeTable, room: Callable[[Version], int], context: float, growth: float) -> tuple[Opening, ...]:
        """For each version, freshest first, groups for the places that are left at it."""
        free: dict[Version, int] = {}
        for i, count in enumerate(table.count(context, growth, self.strategies.pace).tolist()):
            if count > 0:
                version = table.nodes[i].version
                free[version] = free.get(version, 0) + count
        openings: list[Opening] = []
        opened = 0
        for version in sorted(free, reverse=True):
            # Reservations of this very plan are not in the ledger yet. What was opened at fresher versions takes room
            # that these could use as well, so all of it counts.
            groups = min(math.ceil(free[version] / self.samples), max(0, room(version) - opened))
            if groups > 0:
                openings.append(Opening(version, groups))
                opened += groups
        return tuple(openings)
