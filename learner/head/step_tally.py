"""What the groups of one optimizer step were: the parts of their rewards, and their episodes. Pure.

The head counts them as it hands them to the trainer, so a trainer of the user's own has these numbers too. Must not know sockets,
files or torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from learner.trajectory import Group, Trajectory
from p2p.printable import cleaned

MOST_PARTS = 32
"""Parts of a reward that have a metric: a user's code names them, and may name ever new ones."""

MOST_NAME = 60
"""Characters of a part's name in its metric."""

OVER = ("length", "turns", "time")
"""Limits that end an episode (`EpisodeEnd.over`)."""

TAKEN = ("mean", "std")
"""What follows `reward/` in metrics of the whole reward: no part has these names."""


def part_name(name: str) -> str:
    """The name of a part in its metric's key: cleaned, bounded, and none of the whole reward's."""
    plain = cleaned(" ".join(name.split()))[:MOST_NAME]
    return f"{plain or 'unnamed'} (part)" if not plain or plain in TAKEN else plain


class StepTally:
    """The groups of one step."""

    def __init__(self) -> None:
        self._parts: dict[str, list[float]] = {}
        """name -> sum and count"""
        self._turns: list[int] = []
        """of each episode: turns of the model"""
        self._ends: Counter[str] = Counter()
        self._calls = self._errors = 0

    def add(self, groups: Iterable[Group]) -> None:
        """Count these groups too."""
        for group in groups:
            for trajectory in group.trajectories:
                self._add_parts(trajectory)
                if trajectory.end is not None or trajectory.given:
                    self._add_episode(trajectory)

    def metrics(self) -> dict[str, float]:
        """What metrics.jsonl has of the step; nothing of parts where rewards have none, or of episodes where there were none."""
        found = {f"reward/{name}": total / count for name, (total, count) in self._parts.items()}
        if not self._turns:
            return found
        n = len(self._turns)
        found |= {"episodes/turns_mean": sum(self._turns) / n, "episodes/turns_max": float(max(self._turns))}
        if known := sum(self._ends.values()):
            found |= {f"episodes/over_{why}": self._ends[why] / known for why in ("done", *OVER)}
        if self._calls:
            found |= {"episodes/tool_calls": self._calls / n, "episodes/tool_errors": self._errors / self._calls}
        return found

    def _add_parts(self, trajectory: Trajectory) -> None:
        for name, value in trajectory.parts.items():
            key = part_name(str(name))
            if not math.isfinite(value) or (key not in self._parts and len(self._parts) >= MOST_PARTS):
                continue
            known = self._parts.setdefault(key, [0.0, 0])
            known[0] += value
            known[1] += 1

    def _add_episode(self, trajectory: Trajectory) -> None:
        answered = len(trajectory.given)
        ends_given = bool(answered) and trajectory.given[-1].stop == len(trajectory.completion_ids)
        self._turns.append(answered + (not ends_given))
        if trajectory.end is not None:
            self._ends[trajectory.end.over if trajectory.end.over in OVER else "done"] += 1
            self._calls += trajectory.end.calls
            self._errors += trajectory.end.errors
