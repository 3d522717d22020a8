"""One node of the pool: what it costs, what it was seen to make, what it is wanted for. Pure; told the time.

Must not know the others, nor why it is active.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from learner.economy.rates import Estimate
from p2p.protocol.prices import State, Terms

SAMPLE_S = 3.0
"""Seconds over which a node's tokens are counted as one observation."""

KEPT_SPREADS = 5
"""Versions whose times to reach a node are kept; the median counts."""

FULL_SHARE = 0.9
"""A node that holds this share of its capacity counts as having all the work that it can take."""

PREDICTED_SHARE = 0.8
"""Share of the predicted throughput that a node is credited with for more sequences than it has had. Where capacity is ample no
node is ever full, and what nodes deliver only adds up to what the learner takes: without the prediction none could be let go."""

MAX_EXTRAPOLATION = 2.0
"""A node is credited with at most so many times the measured rate: a fit says little of loads far from those it has seen. When a
node is let go the others deliver more, and so on, until they are full."""

MOSTLY_FULL = 0.5
"""A node that was full for this share of its recent samples is judged by what it delivered alone."""

FULLNESS_WEIGHT = 0.1
"""Weight of the latest sample in the share of samples in which a node was full: some ten samples count."""

FREE = Terms(0.0)
"""Terms of a node that costs nothing."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What the head sees of a node now."""

    ready: bool
    """it serves a version of this epoch and is not leaving"""
    load: int
    """sequences with it"""
    capacity: int
    sent_bytes: int = 0
    """payload of the chunks that it sent since it started"""
    full_rate: float = 0.0
    """tokens per second that its fitted throughput predicts for all its capacity; 0: not known"""
    proven: bool = True
    """its word counts"""


class RateSample(NamedTuple):
    """One observation of a node's rate."""

    seconds: float
    accepted: int
    """tokens"""
    busy: bool
    """it had all the work it could take throughout"""


@dataclass
class PricedNode:
    """A node of the pool."""

    name: str
    terms: Terms = FREE
    assigned: Terms | None = None
    """what it costs whatever it says"""
    state: State = "active"
    why: str = ""
    why_active: str = ""
    """of the last time"""
    accepted: int = 0
    """tokens since the last sample"""
    sampled: float = 0.0
    busy: bool = False
    """it had all the work it could take at the last sample, and ever since"""
    fullness: float = 0.0
    """share of its samples of late that were so"""
    full_rate: float = 0.0
    ready: bool = False
    ready_at: float = 0.0
    joined: float = 0.0
    caught_up_s: float = 0.0
    """from its joining until it was ready"""
    offered: bool = False
    """it has said what it costs"""
    hired: bool = False
    """it was asked to generate, or its price is set in the configuration: from then on its idle time costs as well"""
    received: int = 0
    """bytes that it says came from other nodes"""
    sent: int = 0
    sent_before: int | None = None
    """its count of bytes when it joined: the node may be older than the link"""
    spreads: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_SPREADS))

    @property
    def costs(self) -> bool:
        return self.terms.usd_per_hour > 0 or self.terms.usd_per_gb > 0

    @property
    def hourly(self) -> float:
        """Dollars an hour, as it is now."""
        return self.terms.usd_per_hour if self.state == "active" else self.idle_hourly

    @property
    def idle_hourly(self) -> float:
        """Dollars an hour while it is kept waiting; one that named its price and sleeps is not kept."""
        let_go = self.assigned is None and self.state == "asleep"
        return self.terms.idle_usd_per_hour if self.hired and not let_go else 0.0

    def counted(self, sent_bytes: int, others_received: int) -> int:
        """Bytes that it has sent since it joined. Its count is self-reported, so it counts at most for what others say they
        received, and never falls."""
        if self.sent_before is None:
            self.sent_before = sent_bytes
        self.sent = max(self.sent, min(sent_bytes - self.sent_before, others_received))
        return self.sent

    def look(self, s: Seen, now: float) -> RateSample | None:
        """A sample of its rate, when one is over and the node was generating."""
        if s.ready and not self.ready:
            self.ready_at = now
            self.caught_up_s = self.caught_up_s or max(now - self.joined, 1e-3)
        self.ready, self.full_rate = s.ready, s.full_rate
        full = s.ready and self.state == "active" and s.load >= FULL_SHARE * s.capacity > 0
        self.busy = self.busy and full
        if now - self.sampled < SAMPLE_S:
            return None
        sample = RateSample(now - self.sampled, self.accepted, self.busy) if s.ready and self.state == "active" else None
        if sample is not None:
            self.fullness += FULLNESS_WEIGHT * (self.busy - self.fullness)
        self.accepted, self.sampled, self.busy = 0, now, full
        return sample

    def estimate(self, delivered: Estimate) -> Estimate:
        """Its rate if it had all the work that it can take; `delivered`: the rate that was measured."""
        credit = min(PREDICTED_SHARE * self.full_rate, MAX_EXTRAPOLATION * delivered.mean)
        if self.fullness >= MOSTLY_FULL or credit <= delivered.mean:
            return delivered
        return Estimate(credit, max(delivered.sd, (1 - PREDICTED_SHARE) * credit), delivered.known)
