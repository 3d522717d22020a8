"""One node of the pool: what it costs, what it was seen to make, what it is wanted for. Pure; told the time.

Must not know the others, nor why it is active.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from learner.economy.rates import Estimate
from p2p.protocol.prices import State, Terms

SAMPLE_S = 3.0
"""Over so long a node's tokens are counted as one observation."""

SPREADS = 5
"""How long versions take to reach a node is the median of so many."""

FULL = 0.9
"""A node that holds this share of its capacity has all the work that it can take."""

PROMISE = 0.8
"""What is believed of the rate that a node's fitted throughput promises for more sequences than it has had. Where capacity is
ample nobody is ever full, and what nodes deliver only adds up to what the learner takes: without such a word of what they could
do, none could ever be let go."""

REACH = 2.0
"""And at most so many times what it has delivered: a fit says little of loads far from those it has seen. Those that stay when
one is let go deliver more, and so on, until they are full."""

MOSTLY = 0.5
"""A node that was full so much of the time is judged by what it delivered, and by nothing else."""

LATELY = 0.1
"""Weight of a sample in how full a node was of late."""

FREE = Terms(0.0)


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
    """tokens per second that its fitted throughput promises for all its capacity; 0: not known"""


@dataclass
class PricedNode:
    name: str
    terms: Terms = FREE
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
    """it was asked to generate, or its price is our own word: from then on its idle time costs, too"""
    received: int = 0
    """bytes that it says came from other nodes"""
    sent: int = 0
    sent_before: int | None = None
    """what its count of bytes began with: it may be older than the link"""
    spreads: deque[float] = field(default_factory=lambda: deque(maxlen=SPREADS))

    @property
    def costs(self) -> bool:
        return self.terms.usd_per_hour > 0 or self.terms.usd_per_gb > 0

    @property
    def hourly(self) -> float:
        """Dollars an hour, as it is now."""
        return self.terms.usd_per_hour if self.state == "active" else self.idle_hourly

    @property
    def idle_hourly(self) -> float:
        return self.terms.idle_usd_per_hour if self.hired else 0.0

    def counted(self, sent_bytes: int, others_received: int) -> int:
        """Bytes that it has sent since it joined: by its own word, as far as others got any, and never fewer than before."""
        if self.sent_before is None:
            self.sent_before = sent_bytes
        self.sent = max(self.sent, min(sent_bytes - self.sent_before, others_received))
        return self.sent

    def look(self, s: Seen, now: float) -> tuple[float, int, bool] | None:
        """(seconds, tokens accepted, whether it had all the work it could take) of a sample of its rate, when one is over."""
        if s.ready and not self.ready:
            self.ready_at = now
            self.caught_up_s = self.caught_up_s or max(now - self.joined, 1e-3)
        self.ready, self.full_rate = s.ready, s.full_rate
        full = s.ready and self.state == "active" and s.load >= FULL * s.capacity > 0
        self.busy = self.busy and full
        if now - self.sampled < SAMPLE_S:
            return None
        sample = (now - self.sampled, self.accepted, self.busy) if s.ready and self.state == "active" else None
        if sample is not None:
            self.fullness += LATELY * (self.busy - self.fullness)
        self.accepted, self.sampled, self.busy = 0, now, full
        return sample

    def estimate(self, delivered: Estimate) -> Estimate:
        """What it makes, or would if it had all the work that it can take, having `delivered` that."""
        promised = min(PROMISE * self.full_rate, REACH * delivered.mean) if self.fullness < MOSTLY else 0.0
        if promised <= delivered.mean:
            return delivered
        return Estimate(promised, max(delivered.sd, (1 - PROMISE) * promised), delivered.known)
