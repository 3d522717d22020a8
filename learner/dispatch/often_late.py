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

from p2p.forgetting import forget_oldest, renewed

RECENT, LATELY_S = 64, 600.0
"""What happened counts for e times less after so many sequences more of the node, and after so many seconds."""

TIMES = 1.5
"""So many times a node must have been late: once is chance, and twice is forgotten after three minutes."""

WORSE, SELDOM, KNOWN = 3.0, 1 / 64, 4.0
"""So many times as often as the best of the others, and as so seldom, it must be late. With whom it is compared has ended so many
sequences."""

LIKELY = 16.0
"""Sequences that were not late count for each node beside what was seen, where it is foretold what will be: of few the share is
chance."""

LATER = 2.0
"""So many times later is what is late of the others when they are alone: with fewer tries less is known, and what is silent is
left where it is for longer (`rollouts.hold_ups`)."""


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
        record.late, record.lost_s = record.late + 1.0, record.lost_s + lost_s

    def ended(self, node: str, now: float) -> None:
        """It ended one as asked."""
        self._record(node, now).ended += 1.0

    def in_the_way(self, places: Mapping[str, float], usual_s: float, step: int, now: float) -> frozenset[str]:
        """Those without which a step of so many sequences is made sooner. `places`: how many sequences each node makes at a time;
        each takes `usual_s`."""
        known = {node: record.fade(now) for node in places if (record := self._of.get(node)) is not None}
        allowed = WORSE * max(SELDOM, min((r.at_most for r in known.values() if r.ended >= KNOWN), default=1.0))
        often = frozenset(node for node, r in known.items() if r.late >= TIMES and r.share >= allowed)
        if not often:
            return often
        lost_s = sum(r.lost_s for r in known.values()) / sum(r.late for r in known.values())

        def step_s(of: Mapping[str, float], lost_s: float) -> float:
            """How long the step takes these."""
            total = sum(of.values())
            share = sum(known[node].likely * many for node, many in of.items() if node in known) / total
            return usual_s * max(1.0, step / total) + lost_s * (1.0 - (1.0 - share) ** step)

        others = {node: many for node, many in places.items() if node not in often}
        # What one of the others is late with goes to another of them: one alone is never left.
        return often if len(others) > 1 and step_s(others, LATER * lost_s) < step_s(places, lost_s) else frozenset()

    def _record(self, node: str, now: float) -> _Record:
        record = self._of.setdefault(node, _Record(now)).fade(now, 1)
        renewed(self._of, node)
        forget_oldest(self._of)
        return record
