"""Prompts that the auditor answers itself, to measure: the run's own, with seeds that nobody else knows. Must not know audits."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from learner.audit.claims import OwnGroup
from p2p.errors import UsageError

AT_ONCE = 16
"""Groups that one request has: of answers of 64 tokens or more as many as count, of shorter ones fewer."""


class OwnGroups:
    """`prompt(index)`: token ids of the run's prompts; from `first` on they are those that it asks next. `members` of each."""

    def __init__(self, prompt: Callable[[int], tuple[int, ...]], first: int, members: int) -> None:
        self._prompt, self._next, self._members = prompt, first, members

    def next(self) -> list[OwnGroup]:
        """Some that were not asked for before. A prompt that cannot be made is left out: the run says so when it comes to it."""
        made = []
        for index in range(self._next, self._next + AT_ONCE):
            try:
                made.append(OwnGroup(self._prompt(index), tuple(secrets.randbits(63) for _ in range(self._members))))
            except UsageError:
                continue
        self._next += AT_ONCE
        return made
