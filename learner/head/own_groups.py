"""Prompts that the auditor answers itself, to measure: the run's own, with seeds that nobody else knows.

Must not know what is measured, or processes.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable

from learner.audit.claims import OwnGroup

AT_ONCE = 8
"""Groups that one request has."""

log = logging.getLogger("shoal.audit")


class OwnGroups:
    """`prompt(index)`: token ids of the run's prompts, taken from `first` on. `members` of each."""

    def __init__(self, prompt: Callable[[int], tuple[int, ...]], first: int, members: int) -> None:
        self._prompt, self._next, self._members = prompt, first, members

    def next(self) -> list[OwnGroup]:
        """Some that were not asked for before. A prompt that cannot be made is left out: a run that comes to it says so too."""
        first, made = self._next, list[OwnGroup]()
        self._next += AT_ONCE
        for index in range(first, self._next):
            try:
                prompt_ids = self._prompt(index)
            except Exception as error:  # a task is anybody's program, and the run may never come to this prompt
                log.info("the auditor answers prompt %d not: %s: %s", index, type(error).__name__, error)
                continue
            if prompt_ids:
                made.append(OwnGroup(prompt_ids, tuple(secrets.randbits(63) for _ in range(self._members))))
        return made
