"""The built-in game: guess digits by hints. Must not know tokens or processes; `learner/tasks/guess_digits.py` is its task."""

from __future__ import annotations

from typing import Any

from learner.environments.environment import Done, Environment, ModelTurn, Reply
from learner.tasks.guess_digits import hint

FOUND = 0.5
"""Reward of a secret that is found with the first guess."""

LATER = 0.25
"""Share of FOUND that the last guess costs, and those before it a share of that: enough to prefer fewer."""

HEEDED = 0.5
"""Reward of a player whose guesses all agree with the hints before them; of a share of their places, that share. It cannot be
had without playing well: who heeds every hint finds the secret. Without it a player learns from lucky games alone."""


class GuessDigits(Environment):
    """The model writes as many digits as the secret has; the answer says which of them are right."""

    def __init__(self, symbols: str, guesses: int) -> None:
        self.symbols, self.guesses = symbols, guesses
        self.secret = ""
        self.tried: list[set[str]] = []
        """of each place, what was written there"""
        self.places = self.heeded = 0
        """of the guesses after the first hint: how many, and how many agree with the hints before them"""

    def begin(self, row: Any, seed: int) -> None:
        self.secret = str(row["secret"])
        self.tried = [set() for _ in self.secret]

    async def respond(self, turn: ModelTurn) -> Reply:
        """A hint, or the end: found, no guess at all, or one guess too many."""
        guess = turn.text
        if len(guess) != len(self.secret) or not set(guess) <= set(self.symbols):
            return Done({"found": 0.0, "heeded": 0.0}, exact=False)
        self._read(guess, first=turn.number == 0)
        found = guess == self.secret
        if not found and turn.number + 1 < self.guesses:
            return hint(guess, self.secret)
        heeded = self.heeded / self.places if self.places else 1.0
        worth = FOUND * (1.0 - LATER * turn.number / self.guesses)
        return Done({"found": worth if found else 0.0, "heeded": HEEDED * heeded}, exact=found)

    def _read(self, guess: str, first: bool) -> None:
        for written, right, tried in zip(guess, self.secret, self.tried, strict=True):
            if not first:
                self.places += 1
                self.heeded += written == right if right in tried else written not in tried
            tried.add(written)
