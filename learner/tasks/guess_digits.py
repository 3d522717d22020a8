"""A built-in game of several turns: guess digits by hints that say which are right. Must not know torch, tokens or who runs it.

A hint repeats the guess and has letters in place of the digits that are wrong, so to listen is to copy digits, and to write
something else where a letter stands. Small transformers learn that soon, for each place looks at one place of the last hint. The
supervised warm-up teaches no more than to write guesses at random and what hints look like; but that already makes a model look
at the place it needs, since every hint ends with "?", and is so as far from the next guess as the guess is from its hint. With
"_" for all that is wrong, and no "?", seventy steps of rewards changed nothing.

The prompt is always "?", so nothing but the hints tells the secret, and there is nothing to hold out. Each secret comes once in a
round of symbols ** digits prompts.
"""

from __future__ import annotations

import string
from collections.abc import Sequence

from learner.tasks.letters_and_sums import draw
from learner.tasks.port import EnvironmentSource, Prompt, Score, Task
from learner.tasks.rounds import secret_of
from p2p.errors import UsageError

WRONG = string.ascii_lowercase[: len(string.digits)]
"""What stands in a hint for the digits that are wrong."""

ASK = "?"
"""The prompt, and the end of each hint."""

MOST_SECRETS = 10_000
"""Secrets there may be: each prompt sorts them all."""


def hint(guess: str, secret: str) -> str:
    """The guess, with a letter in place of each digit that is not the secret's, and ASK."""
    return "".join(g if g == s else WRONG[int(g)] for g, s in zip(guess, secret, strict=True)) + ASK


class GuessDigitsTask(Task):
    """ "?" -> "021", "a2b?" -> "120", "12a?" -> "122": found. Who copies what is right, and elsewhere writes what was not tried,
    needs `symbols` guesses at most. One who guesses at random finds 17 % of the secrets in 5 guesses, one who copies what is
    right 65 %, and one who besides avoids what was wrong the last time 88 %."""

    name = "guess_digits"

    def __init__(self, seed: int, digits: int = 3, symbols: int = 3, guesses: int = 5) -> None:
        if not 1 <= digits <= 8:
            raise UsageError(f"task guess_digits: digits = {digits} is not within 1..8")
        if not 2 <= symbols <= len(string.digits):
            raise UsageError(f"task guess_digits: symbols = {symbols} is not within 2..{len(string.digits)}")
        if not 1 <= guesses <= 20:
            raise UsageError(f"task guess_digits: guesses = {guesses} is not within 1..20")
        if symbols**digits > MOST_SECRETS:
            raise UsageError(f"task guess_digits: {symbols} symbols ** {digits} digits are more than {MOST_SECRETS} secrets")
        self.seed, self.digits, self.symbols, self.guesses = seed, digits, string.digits[:symbols], guesses
        options = {"symbols": self.symbols, "guesses": guesses}
        self.environment = EnvironmentSource("learner.environments.guess_digits:GuessDigits", options)

    def prompt(self, index: int) -> Prompt:
        return Prompt(index, ASK, {"secret": self._secret("train", index)})

    def held_out(self, index: int) -> Prompt:
        return Prompt(index, ASK, {"secret": self._secret("held-out", index)}, held_out=True)

    def _secret(self, stream: str, index: int) -> str:
        return self._written(secret_of(index, len(self.symbols) ** self.digits, "digits", stream, seed=self.seed))

    def _written(self, number: int) -> str:
        """A number below symbols ** digits as digits, the last one first."""
        base = len(self.symbols)
        return "".join(self.symbols[number // base**place % base] for place in range(self.digits))

    def score(self, prompt: Prompt, completion: str) -> Score:
        """Of a first turn alone: whether it is right at once."""
        right = completion == prompt.entry["secret"]
        return Score(float(right), right)

    def solution(self, prompt: Prompt) -> str:
        return str(prompt.entry["secret"])

    def transcript(self, prompt: Prompt) -> Sequence[str]:
        """A player who does not listen: it teaches to write so many digits a turn, and no more."""
        secret, said = self.solution(prompt), list[str]()
        for turn in range(self.guesses):
            guess = self._written(draw(self.seed, "digits", "blind", prompt.index, turn) % len(self.symbols) ** self.digits)
            said.append(guess)
            if guess == secret or turn == self.guesses - 1:
                break
            said.append(hint(guess, secret))
        return said

    def characters(self) -> Sequence[str]:
        return (*self.symbols, *WRONG[: len(self.symbols)], ASK)
