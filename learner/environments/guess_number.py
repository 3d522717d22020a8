"""The built-in game: guess a number by hints. Must not know tokens or processes; `learner/tasks/guess_number.py` is its task."""

from __future__ import annotations

import math
from typing import Any

from learner.environments.environment import Done, Environment, ModelTurn, Reply
from learner.tasks.guess_number import HIGHER, LOWER, SYMBOLS

LATER = 0.25
"""What finding with the last guess costs of a reward of 1, and with those before it a share of that: enough to prefer fewer."""

NARROWED = 0.5
"""Reward of a failure whose hints left one number; one that learned nothing gets 0. Below 1 - LATER: a success always beats it.
Without it a player learns from lucky hits alone."""


class GuessNumber(Environment):
    """The model writes one symbol; the answer is "<" when the number is lower and ">" when it is higher."""

    def __init__(self, numbers: int, guesses: int) -> None:
        self.numbers, self.guesses = numbers, guesses
        self.secret = 0
        self.low, self.high = 0, numbers - 1
        """the numbers that the hints leave"""

    def begin(self, row: Any, seed: int) -> None:
        self.secret = int(row["secret"])

    async def respond(self, turn: ModelTurn) -> Reply:
        """A hint, or the end: found, no guess at all, or one guess too many."""
        guess = SYMBOLS.find(turn.text) if len(turn.text) == 1 else -1
        if guess == self.secret:
            return Done({"found": 1.0 - LATER * turn.number / self.guesses, "narrowed": 0.0}, exact=True)
        if guess < 0:
            return Done({"found": 0.0, "narrowed": 0.0})
        if self.secret < guess:
            self.high = min(self.high, guess - 1)
        else:
            self.low = max(self.low, guess + 1)
        if turn.number + 1 >= self.guesses:
            left = self.high - self.low + 1
            return Done({"found": 0.0, "narrowed": NARROWED * (1 - math.log(left) / math.log(self.numbers))})
        return LOWER if self.secret < guess else HIGHER
