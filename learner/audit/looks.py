"""What was checked of completions that still go on, so that no token is bet on twice. Pure.

Must not know why they were looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from learner.audit.parts import MadePart
from p2p.version import Version

MOST_LOOKS = 65_536
"""Completions that are remembered at once. When there are more, nothing further is looked at before it has ended: were the oldest
forgotten, their tokens would be judged again."""

LIVE_GROUPS = 16_384
"""Groups behind the newest one from which on those that are remembered are given-up ones: they are forgotten when room is
wanted."""


class LookKey(NamedTuple):
    """A completion."""

    group_id: int
    seed: int


class _Run(NamedTuple):
    """Where a node's tokens under one version begin."""

    first: int
    node: str
    version: Version


@dataclass(slots=True)
class _Look:
    length: int = 0
    """tokens of the completion when it was looked at last"""
    stops: dict[_Run, int] = field(default_factory=dict)
    """up to where each run was given to be checked"""


class Looks:
    """Of the completions of one learner's life."""

    def __init__(self) -> None:
        self._of: dict[LookKey, _Look] = {}
        self._newest = 0

    def __len__(self) -> int:
        return len(self._of)

    def due(self, key: LookKey, length: int, long_from: float) -> bool:
        """Whether a completion of so many tokens is looked at (again): when it has twice as many as the last time, or became long
        since. So it is read some three times at the most, however long it becomes."""
        look = self._of.get(key)
        if look is None:
            return length > 0 and self._has_room(key.group_id)
        return length >= 2 * look.length or look.length < long_from <= length

    def looked(self, key: LookKey, length: int, parts: Iterable[MadePart]) -> None:
        """It had so many tokens, and these of them are to be checked."""
        look = self._of.setdefault(key, _Look())
        look.length = length
        for part in parts:
            new = _Run(part.first, part.node, part.version)
            goes_on = (run for run, stop in look.stops.items() if (stop, run.node, run.version) == new)
            look.stops[next(goes_on, new)] = part.stop

    def behind(self, key: LookKey, made: Sequence[MadePart]) -> list[MadePart]:
        """Of a completion's parts, what was not looked at."""
        look = self._of.get(key)
        return list(made) if look is None else list(self._behind(look, made))

    def _behind(self, look: _Look, made: Sequence[MadePart]) -> Iterator[MadePart]:
        for part in made:
            first = min(look.stops.get(_Run(part.first, part.node, part.version), part.first), part.stop)
            if first < part.stop:
                yield part._replace(first=first)

    def not_checked(self, key: LookKey, parts: Iterable[MadePart]) -> None:
        """These were to be checked, and were not after all."""
        look = self._of.get(key)
        if look is not None:
            for part in parts:
                upto = (part.stop, part.node, part.version)
                look.stops |= {run: part.first for run, stop in look.stops.items() if (stop, run.node, run.version) == upto}

    def ended(self, key: LookKey) -> None:
        """It is over: what was not looked at is checked as others are."""
        self._of.pop(key, None)

    def remade(self, node: str) -> None:
        """What this node makes under way is made again: other tokens stand at its places."""
        for look in self._of.values():
            kept = {run: stop for run, stop in look.stops.items() if run.node != node}
            if len(kept) < len(look.stops):
                look.stops, look.length = kept, 0

    def _has_room(self, group_id: int) -> bool:
        self._newest = max(self._newest, group_id)
        if len(self._of) >= MOST_LOOKS:
            self._of = {key: look for key, look in self._of.items() if key.group_id > self._newest - LIVE_GROUPS}
        return len(self._of) < MOST_LOOKS
