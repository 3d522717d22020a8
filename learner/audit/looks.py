"""What was checked of completions that still go on, so that no token is bet on twice. Pure.

What was looked at is known by where it stands, who made it under which version, and what it says: a completion that is cut back
and made again has other tokens there, or the very same. Must not know why something was looked at.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from learner.audit.parts import MadePart

MOST_LOOKS = 65_536
"""Completions that are remembered at once. When there are more, nothing further is looked at before it has ended: were some
forgotten, their tokens would be judged again."""

LIVE_GROUPS = 16_384
"""Groups behind the newest one from which on those that are remembered are given-up ones: they are forgotten when room is
wanted."""

FIRST_LOOK = 8
"""Tokens from which on a completion is looked at at all: each look reads its prompt again."""

GROWN, GROWN_ON_ALERT = 2.0, 1.5
"""Times as many tokens as at the last look a completion has at the next one. All of its looks together read twice or three times
what it has, and its prompt each time."""


class LookKey(NamedTuple):
    """A completion."""

    group_id: int
    seed: int


class _Seen(NamedTuple):
    part: MadePart
    digest: bytes
    """of its tokens"""


@dataclass(slots=True)
class _Look:
    length: int = 0
    """tokens of the completion when it was looked at last"""
    seen: list[_Seen] = field(default_factory=list)
    """what was given to be checked"""


class Looks:
    """Of the completions of one learner's life."""

    def __init__(self) -> None:
        self._groups: dict[int, dict[int, _Look]] = {}
        self._count = self._newest = self._pruned = 0

    def __len__(self) -> int:
        return self._count

    def due(self, key: LookKey, length: int, long_from: float, grown: float = GROWN) -> bool:
        """Whether a completion of so many tokens is looked at (again): when it has `grown` times as many as the last time, or
        became long since."""
        look = self._of(key)
        if look is None:
            return length >= FIRST_LOOK and self._has_room(key.group_id)
        return length >= max(FIRST_LOOK, grown * look.length) or look.length < long_from <= length

    def looked(self, key: LookKey, ids: Sequence[int], parts: Iterable[MadePart]) -> None:
        """It had these tokens, and these parts of them are to be checked."""
        look = self._of(key)
        if look is None:
            look = self._groups.setdefault(key.group_id, {})[key.seed] = _Look()
            self._count += 1
        look.length = len(ids)
        look.seen += [_Seen(part, _digest(ids, part)) for part in parts]

    def behind(self, key: LookKey, ids: Sequence[int], made: Sequence[MadePart]) -> list[MadePart]:
        """Of a completion's parts, what was not looked at: pieces of them."""
        look = self._of(key)
        if look is None or not look.seen:
            return list(made)
        look.seen = [seen for seen in look.seen if _digest(ids, seen.part) == seen.digest]
        return [piece for part in made for piece in _without(part, look.seen)]

    def not_checked(self, key: LookKey, parts: Iterable[MadePart]) -> None:
        """These were to be checked, and were not after all."""
        look, lost = self._of(key), set(parts)
        if look is not None:
            look.seen = [seen for seen in look.seen if seen.part not in lost]
            look.length = 0

    def remade(self, node: str) -> None:
        """What this node makes under way is made again: it is looked at soon."""
        for looks in self._groups.values():
            for look in looks.values():
                if any(seen.part.node == node for seen in look.seen):
                    look.length = 0

    def ended(self, group_id: int) -> None:
        """All of this group are over: what was not looked at is checked as others are."""
        self._count -= len(self._groups.pop(group_id, ()))

    def _of(self, key: LookKey) -> _Look | None:
        return self._groups.get(key.group_id, {}).get(key.seed)

    def _has_room(self, group_id: int) -> bool:
        self._newest = max(self._newest, group_id)
        if self._count >= MOST_LOOKS and self._newest > self._pruned:
            self._pruned = self._newest + LIVE_GROUPS // 64  # not for each completion that finds no room
            for old in [group for group in self._groups if group <= self._newest - LIVE_GROUPS]:
                self.ended(old)
        return self._count < MOST_LOOKS


def _digest(ids: Sequence[int], part: MadePart) -> bytes:
    tokens = np.array(ids[part.first : part.stop], np.int64)
    return hashlib.blake2b(tokens.tobytes(), digest_size=16).digest()


def _without(part: MadePart, seen: Iterable[_Seen]) -> Iterator[MadePart]:
    """The pieces of a part that no look of the same node's tokens under the same version had."""
    first = part.first
    same = (one.part for one in seen if (one.part.node, one.part.version) == (part.node, part.version))
    for one in sorted(same, key=lambda one: one.first):
        if first < min(one.first, part.stop):
            yield part._replace(first=first, stop=min(one.first, part.stop))
        first = max(first, one.stop)
    if first < part.stop:
        yield part._replace(first=first)
