"""Simulated time: what is to happen when, one thing after another. Every simulator is one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf


@dataclass
class Timeline:
    """Of what is to happen at one time, what was said first happens first."""

    now: float = field(default=0.0, init=False)
    """seconds"""
    stopped_by: KeyboardInterrupt | None = field(default=None, init=False)
    """who sets it ends the simulation between two events, so that its account is whole"""
    _plans: list[tuple[float, int, Callable[..., object], tuple[object, ...]]] = field(default_factory=list, init=False)
    """heap of (time, count, action, its arguments)"""
    _count: int = field(default=0, init=False)

    def at(self, when: float, action: Callable[..., object], *arguments: object) -> None:
        """Do something at a simulated time, now if that has passed."""
        self._count += 1
        heappush(self._plans, (max(self.now, when), self._count, action, arguments))

    def after(self, seconds: float, action: Callable[..., object], *arguments: object) -> None:
        """Do something so many simulated seconds from now."""
        self.at(self.now + seconds, action, *arguments)

    @property
    def next_at(self) -> float:
        """When the next thing happens; inf when nothing will."""
        return self._plans[0][0] if self._plans else inf

    def next(self) -> None:
        """Go to the next thing and let it happen. `stopped_by` is raised instead, once it is set."""
        if self.stopped_by is not None:
            raise self.stopped_by
        self.now, _, action, arguments = heappop(self._plans)
        action(*arguments)
