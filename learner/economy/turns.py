"""Whose turn it is on the learner's device: its local engine's, or the trainer's. Pure; told the time.

A step begins with the engine's turn, as long as `LocalRollout` says (RLBoost, arXiv 2510.19225: partial responses are
generated on the training cluster, then handed over). What is ours: it ends early when the learner could not use more, it does
not end while nobody else generates and the step's groups are not whole, and it comes back in mid-step when everybody else left.
Must not know what is generated, nor how an engine is told.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from learner.economy.local_rollout import LocalRollout


@dataclass
class Turns:
    """Told what happens, it says whose turn it is."""

    local_rollout: LocalRollout
    on: bool = field(default=False, init=False)
    """it is the engine's turn"""
    why: str = field(default="", init=False)
    over: bool = field(default=False, init=False)
    """training is complete, and the device the engine's for good"""
    generated_s: float = field(default=0.0, init=False)
    """seconds of this step that the engine generated"""
    waited_s: float = field(default=0.0, init=False)
    """seconds that the trainer waited in this step for groups, when it was its turn"""
    remote_wait_s: float = field(default=0.0, init=False)
    """mean seconds that a remote node waited in this step for the learner"""
    _until: float = field(default=-math.inf, init=False)
    _looked: float | None = field(default=None, init=False)
    _nodes: frozenset[str] = field(default=frozenset(), init=False)
    _changed: bool = field(default=False, init=False)

    def begin(self, now: float, remote: Collection[str]) -> None:
        """A step begins, with these nodes generating elsewhere."""
        self.generated_s = self.waited_s = self.remote_wait_s = 0.0
        self._until = now + self.local_rollout.turn_s if self.local_rollout.turn_s > 0 else -math.inf
        self._nodes, self._changed = frozenset(remote), False

    def look(
        self, now: float, *, able: bool, remote: Collection[str], whole: bool, plenty: bool, waits: bool, idle: float = 0.0
    ) -> bool:
        """Whether it is the engine's turn. `able`: it serves a version; `remote`: who generates elsewhere; `whole`: the step's
        groups are all there; `plenty`: the learner could not use more than is under way; `waits`: the trainer has nothing
        to do; `idle`: share of the remote nodes that wait for the learner."""
        since = now - self._looked if self._looked is not None else 0.0
        self._looked = now
        self.generated_s += since if self.on else 0.0
        self.remote_wait_s += idle * since
        self._changed = self._changed or self._nodes != frozenset(remote)
        alone = not remote and not whole and (self.on or waits or now < self._until)
        self.on = able and (self.over or (not plenty and (now < self._until or alone)))
        if self.on and self.over:
            self.why = "training is complete"
        elif self.on:
            self.why = "nobody else generates" if alone else f"{self.local_rollout.turn_s:.1f} s at the beginning of each step"
        else:
            self._until = -math.inf  # the trainer begins: what opens up later is the others'
        return self.on

    def waited(self, seconds: float) -> None:
        """The trainer had its turn, and waited so long for groups."""
        self.waited_s += seconds

    def stepped(self, *, holds: bool) -> float:
        """The step is over; seconds of the engine's next turn. `holds`: the others are enough by the capacity rule."""
        return self.local_rollout.stepped(
            self.waited_s, self.remote_wait_s, len(self._nodes), holds=holds or self.remote_wait_s > 0, changed=self._changed
        )
