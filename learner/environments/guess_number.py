"""The built-in game: guess a number by hints. Must not know tokens or processes; `learner/tasks/guess_number.py` is its task."""

from __future__ import annotations

from typing import Any

from learner.environments.environment import Done, Environment, ModelTurn, Reply
from learner.tasks.guess_number import HIGHER, LOWER, SYMBOLS

LATER = 0.05
"""What each guess beyond the first costs of a reward of 1: enough to prefer fewer, and a success always beats a failure."""


class GuessNumber(Environment):
    """The model writes one symbol; the answer is "<" when the number is lower and ">" when it is higher."""

    def __init__(self, guesses: int) -> None:
        self.guesses = guesses
        self.secret = 0

    def begin(self, row: Any, seed: int) -> None:
        self.secret = int(row["secret"])

    async def respond(self, turn: ModelTurn) -> Reply:
        """A hint, or the end: found, no guess at all, or one guess too many."""
        guess = SYMBOLS.find(turn.text) if len(turn.text) == 1 else -1
        if guess == self.secret:
            return Done(1.0 - LATER * turn.number, exact=True)
        if guess < 0 or turn.number + 1 >= self.guesses:
            return Done(0.0)
        return LOWER if self.secret < guess else HIGHER
