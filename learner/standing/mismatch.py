"""Whose tokens do not fit the trainer's own pass: an outlier among the nodes. Pure.

mismatch_kl is KL(mu || pi) of what a node says it drew from against what the trainer computes (k3, nats a token). It is never 0:
versions are some steps old, and engines round. So a node is compared with the others and not with a number. What it finds is
gross: another model, made-up log probabilities, copied answers. Who is a little off is `learner.audit`'s business. Must not know
versions, nor what follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

from p2p.forgetting import forget_oldest, renewed

ENOUGH = 256.0
"""Tokens of a node before it is judged, and before others are judged by it."""

MEMORY = 4096.0
"""Tokens of a node that count: those before are forgotten."""

FACTOR = 5.0
"""Times the others' median that makes an outlier: staleness differs between nodes, by a factor of two or three."""

FLOOR, FLOOR_OF_STEP = 0.5, 0.1
"""Nats a token below which nobody is an outlier, and for each step of staleness that the run allows, where that is more: a slow
honest node's tokens may all be as old as that, and the others' none. Honest tokens of exactly 6, 16 and 32 steps had 0.25, 0.7
and 0.75 at the most, by objective (bench/staleness.md)."""

ALONE = 4.0
"""Nats a token above which a node is an outlier even with nobody to compare it with: more than chance tokens have."""


@dataclass
class MismatchWatch:
    """Sums by node, of late, of the MOST_NODES that were trained on last. `max_staleness`: the run's bound, in steps."""

    max_staleness: int = 0
    _nodes: dict[str, tuple[float, float]] = field(default_factory=dict, init=False, repr=False)
    """peer -> (tokens, sum of mismatch)"""
    seen: dict[str, int] = field(default_factory=dict, init=False)
    """tokens of each node that were trained on, in all"""

    def add(self, step: Mapping[str, tuple[int, float]]) -> None:
        """One step's: peer -> (tokens, sum of their mismatch, in nats)."""
        for peer, (tokens, mismatch) in step.items():
            before, total = self._nodes.get(peer, (0.0, 0.0))
            keep = min(1.0, max(0.0, MEMORY - tokens) / before) if before else 0.0
            self._nodes[peer] = (before * keep + tokens, total * keep + mismatch)
            self.seen[peer] = self.seen.get(peer, 0) + tokens
            renewed(self._nodes, peer)
        for peer in forget_oldest(self._nodes):
            del self.seen[peer]

    def forget(self, peer: str) -> None:
        """It is gone, or begins anew."""
        self._nodes.pop(peer, None)
        self.seen.pop(peer, None)

    def mean(self, peer: str) -> float:
        """Nats a token; 0 of a node that nothing is known of."""
        tokens, mismatch = self._nodes.get(peer, (0.0, 0.0))
        return mismatch / tokens if tokens else 0.0

    def outliers(self, credible: Callable[[str], bool]) -> dict[str, str]:
        """Peer -> why, for those whose tokens do not fit, by comparison with other credible nodes."""
        known = {peer: self.mean(peer) for peer, (tokens, _) in self._nodes.items() if tokens >= ENOUGH}
        found, floor = {}, max(FLOOR, FLOOR_OF_STEP * self.max_staleness)
        for peer, mean in known.items():
            others = [m for p, m in known.items() if p != peer and credible(p)]
            usual = median(others) if others else None
            if mean > (max(ALONE, floor) if usual is None else max(floor, FACTOR * usual)):
                than = f"{usual:.3g} of the others" if usual is not None else "nobody to compare it with"
                found[peer] = f"its tokens do not fit the model: mismatch {mean:.3g} nats a token, {than}"
        return found
