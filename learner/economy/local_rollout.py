"""How long the learner's local engine generates at the start of a step, while the pool is under the rule. Pure.

RLBoost's controller (arXiv 2510.19225), fed by the two idle times of a step: the trainer's, waiting for work, and the remote
nodes', waiting for room. Who waits less is given less to do; with every count of nodes that was seen it remembers where it
was, so that a pool that shrinks and grows again finds its balance at once. Must not know rates, prices or who the nodes are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

ETA = 3.0
"""RLBoost's: a third of the imbalance is corrected a step."""

FLOOR_S = 5.0
"""RLBoost's: less than that is not worth switching the engine on for."""


@dataclass
class LocalRollout:
    turn_s: float = 0.0
    """to generate in the next step"""
    floor_s: float = FLOOR_S
    most_s: float = math.inf
    """generating a whole step alone takes no longer"""
    memory: dict[int, float] = field(default_factory=dict, init=False)
    """nodes -> seconds"""
    _nodes: int | None = field(default=None, init=False, repr=False)

    def stepped(
        self, trainer_wait_s: float, remote_wait_s: float, nodes: int, *, holds: bool = False, changed: bool = False
    ) -> float:
        """After a step: how long to generate in the next, for which there are `nodes`. `holds`: the capacity rule does
        without (then it may be 0); `changed`: nodes came or went during the step, though there are as many now."""
        seconds = self.turn_s + (trainer_wait_s - remote_wait_s) / ETA
        if not math.isfinite(seconds):
            seconds = self.turn_s
        seconds = min(self.most_s, max(0.0, seconds))
        if seconds < self.floor_s:
            seconds = 0.0 if holds else min(self.floor_s, self.most_s)
        if self._nodes in (None, nodes) and not changed:
            self.memory[nodes] = seconds
        elif nodes in self.memory:
            seconds = self.memory[nodes]
        self._nodes, self.turn_s = nodes, seconds
        return seconds
