"""Nodes that are late again and again, silent or slow for a moment, and whether a step is sooner without them. Pure, told the
time.

One such sequence is nobody's fault, and what is moved early costs a step little. But a step takes as long as its last sequence:
of sixteen, one in ten of which is late, one nearly always is. So those that are late much more often than the others are left out
where the others would make a step sooner alone. Must not know what was done with sequences, or whose fault it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from p2p.forgetting import forget_oldest, renewed

ONE_S = 1.0
"""Seconds in which a node is late once: an engine that pauses holds up all that it has."""

RECENT, LATELY_S = 64, 300.0
"""What happened counts for e times less after so many sequences more of the node, and after so many seconds."""

TIMES = 1.5
"""So many times a node must have been late: once is chance, and twice is forgotten after a minute and a half."""

WORSE, SELDOM, KNOWN = 3.0, 1 / 64, 4.0
"""So many times as often as the best of the others, and as so seldom, a node must be late, or hold up what it is given
(`rollouts.hold_ups`): pauses that all have are nobody's fault. With whom it is compared has ended so many sequences lately."""

LIKELY = 16.0
"""Sequences that were not late count for each node beside what was seen, where it is foretold what will be: of few the share is
chance."""

LATER = 2.0
"""So many times later is what is late of the others when they are alone: with fewer tries less is known, and what is silent is
left where it is for longer (`rollouts.hold_ups`)."""


class Making(NamedTuple):
    """What a node can make."""

    places: int
    """sequences at a time, one at the least"""
    usual_s: float
    """seconds that a usual one takes it"""


@dataclass(slots=True)
class _Record:
    """Of one node, of late."""

    at: float
    """the time for which the numbers are true; they fade"""
    late: float = 0.0
    """sequences"""
    lost_s: float = 0.0
    """seconds by which they were, in all"""
    ended: float = 0.0
    late_at: float = -math.inf
    """when it was late last"""
    last_s: float = 0.0
    """by how much"""

    def fade(self, now: float, sequences: int = 0) -> _Record:
        share = math.exp(min(0.0, self.at - now) / LATELY_S - sequences / RECENT)
        self.at = max(self.at, now)
        self.late, self.lost_s, self.ended = self.late * share, self.lost_s * share, self.ended * share
        return self

    @property
    def share(self) -> float:
        """Of what it was given, what was late."""
        return self.late / (self.late + self.ended + 1.0)

    @property
    def likely(self) -> float:
        """Of what it will be given, what will be late."""
        return self.late / (self.late + self.ended + LIKELY)

    @property
    def at_most(self) -> float:
        """The same, where it may be small by chance."""
        return (self.late + 1.0) / (self.late + self.ended + 1.0)


class OftenLate:
    """By node."""

    def __init__(self) -> None:
        self._of: dict[str, _Record] = {}

    def late(self, node: str, lost_s: float, now: float) -> None:
        """A sequence was moved from it early, that came so much later than is usual."""
        record = self._record(node, now)
        if again := now - record.late_at < ONE_S:
            lost_s = max(0.0, lost_s - record.last_s)
        else:
            record.late_at, record.last_s = now, 0.0
        record.late, record.lost_s, record.last_s = record.late + (not again), record.lost_s + lost_s, record.last_s + lost_s

    def ended(self, node: str, now: float) -> None:
        """It ended one as asked."""
        self._record(node, now).ended += 1.0

    def in_the_way(self, nodes: Mapping[str, Making], step: int, now: float) -> frozenset[str]:
        """Those of the nodes without which a step of so many sequences is made sooner."""
        known = {node: record for node in nodes if (record := self._of.get(node)) is not None}
        if all(record.late < TIMES for record in known.values()):  # it is asked some ten times a second, of a thousand nodes
            return frozenset()
        for record in known.values():
            record.fade(now)
        allowed = WORSE * max(SELDOM, min((r.at_most for r in known.values() if r.ended >= KNOWN), default=1.0))
        often = frozenset(node for node, r in known.items() if r.late >= TIMES and r.share >= allowed)
        others = {node: making for node, making in nodes.items() if node not in often}
        # What one of the others is late with goes to another of them: one alone is never left.
        if not often or len(others) < 2:
            return frozenset()
        lost_s = median(r.lost_s / r.late for r in known.values() if r.late)
        alone = self._step_s(others, step, LATER * lost_s)
        return often if alone < self._step_s(nodes, step, lost_s) else frozenset()

    def _step_s(self, nodes: Mapping[str, Making], step: int, lost_s: float) -> float:
        """How long a step of so many sequences takes these: as long as the quickest of them need that make it soonest, and if one
        of the sequences is late, which may be at any of them, `lost_s` more."""
        soonest, rate, late = math.inf, 0.0, 0.0
        for node, making in sorted(nodes.items(), key=lambda one: one[1].usual_s):
            record, more = self._of.get(node), making.places / making.usual_s
            rate += more
            late += more * record.likely if record is not None else 0.0
            soonest = min(soonest, max(making.usual_s, step / rate))
        return soonest + lost_s * (1.0 - (1.0 - late / rate) ** step)

    def _record(self, node: str, now: float) -> _Record:
        record = self._of.setdefault(node, _Record(now)).fade(now, 1)
        renewed(self._of, node)
        forget_oldest(self._of)
        return record
