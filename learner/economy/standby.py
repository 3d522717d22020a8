"""Whether a node that is not needed stays warm or sleeps. Pure.

A warm node gets every version and can work at once; one that sleeps costs a catch-up when it is needed. Nodes leave every now
and then, so the k-th spare is needed after about k departures. It stays warm while the versions until then cost less than one
catch-up. Neither costs anything: then it is warm. Must not know why a node is not needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from learner.economy.candidates import ASLEEP, WARM, Candidate
from p2p.protocol.prices import State

PRIOR_S = 3600.0
"""Seconds in which one departure is assumed before any was seen."""

HYSTERESIS = 1.5
"""A node changes between warm and asleep only where the other state is so many times cheaper."""


@dataclass
class Standby:
    """Counts departures, and places the nodes that are not active."""

    departures: int = field(default=0, init=False)
    _watched_s: float = field(default=0.0, init=False, repr=False)
    _now: float = field(default=-math.inf, init=False, repr=False)

    def proceed(self, now: float, departures: int) -> None:
        """Time passes until `now`; so many active nodes left since the last call."""
        if self._now > -math.inf:
            self._watched_s += max(0.0, now - self._now)
        self._now = max(now, self._now)
        self.departures += departures

    def needed_in_s(self, k: int) -> float:
        """Seconds until the k-th spare node is needed, the first being 1."""
        return k * (self._watched_s + PRIOR_S) / (self.departures + 1)

    def choose(self, spares: Sequence[Candidate], version_s: float, known: frozenset[str] | set[str]) -> dict[str, State]:
        """Peer -> "warm" or "asleep", for those that are not active, the first to be called first; a version comes every
        `version_s`. `known` were placed before, and change only for a good reason."""
        out: dict[str, State] = {}
        for k, c in enumerate(spares, 1):
            versions = self.needed_in_s(k) / version_s if version_s > 0 else math.inf
            stay = c.version_usd * versions if c.version_usd > 0 else 0.0
            if c.peer not in known or c.state not in (WARM, ASLEEP):
                mind = 1.0
            else:
                mind = HYSTERESIS if c.state == WARM else 1 / HYSTERESIS
            out[c.peer] = WARM if stay <= c.catch_up_usd * mind else ASLEEP
        return out
