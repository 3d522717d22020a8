"""How long a group takes to generate when nothing is in its way, from when its tokens came. Pure; told the time.

From reservation to the last token would be the wrong time for the capacity model (`economy.demand`): work is reserved steps
ahead, so most of that is waiting for its turn, and a pool with more than enough would seem too slow. What counts is how long
the longest member took from its first token to its last, and what passes in any case before a first token: the least that any
group lately had to wait for one. Must not know nodes or what tokens are.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from learner.rollouts.group import parse_request

RECENT = 128
"""Groups that are looked back on."""


@dataclass(slots=True)
class _GroupTimes:
    opened: float
    first: float | None = None
    began: dict[int, float] = field(default_factory=dict)
    """member -> when its first token came"""
    longest: float = 0.0


@dataclass
class Durations:
    """Sequences are named by their request ids, "group.member.attempt"."""

    _groups: dict[int, _GroupTimes] = field(default_factory=dict, init=False)
    _longest: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT), init=False)
    _starts: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT), init=False)

    def opened(self, group_id: int, now: float) -> None:
        """It was reserved."""
        self._groups[group_id] = _GroupTimes(now)

    def began(self, request_id: str, now: float) -> None:
        """The first token of a completion came. What is not known, of an earlier epoch or aborted, is passed over."""
        name = parse_request(request_id)
        group = self._groups.get(name.group_id) if name else None
        if name and group is not None:
            group.began.setdefault(name.member, now)
            group.first = now if group.first is None else group.first

    def ended(self, request_id: str, now: float) -> None:
        """Its last token came, or it was interrupted: of several calls the last one counts."""
        name = parse_request(request_id)
        group = self._groups.get(name.group_id) if name else None
        if name and group is not None and name.member in group.began:
            group.longest = max(group.longest, now - group.began[name.member])

    def whole(self, group_id: int) -> None:
        """All that it needs has ended."""
        group = self._groups.pop(group_id, None)
        if group is not None and group.first is not None:
            self._longest.append(group.longest)
            self._starts.append(group.first - group.opened)

    def dropped(self, group_id: int) -> None:
        self._groups.pop(group_id, None)

    @property
    def generation_s(self) -> float:
        """0 before any group was whole."""
        return median(self._longest) + min(self._starts) if self._longest else 0.0
