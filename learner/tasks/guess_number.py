"""A built-in game of several turns: guess a number by hints. Must not know torch, tokens or who runs the game.

Numbers are single symbols, 0-9 and then a-z, so that a model of a few hundred thousand parameters can learn their order. The
prompt is always "?", so nothing but the hints tells a number, and there is nothing to hold out. Each number comes once in a round
of `numbers` prompts. A small model is slow to learn that "<" and ">" leave an interval: `guess_digits` is the game for one.
"""

from __future__ import annotations

import string
from collections.abc import Sequence

from learner.tasks.letters_and_sums import draw
from learner.tasks.port import EnvironmentSource, Prompt, Score, Task
from learner.tasks.rounds import secret_of
from p2p.errors import UsageError

SYMBOLS = string.digits + string.ascii_lowercase
LOWER, HIGHER = "<", ">"


class GuessNumberTask(Task):
    """ "?" -> "8", "<" -> "4", ">" -> "6": found. By halving, 16 numbers take 4 guesses or 5; a blind guesser finds 28 %."""

    name = "guess_number"

    def __init__(self, seed: int, numbers: int = 16, guesses: int = 5) -> None:
        if not 2 <= numbers <= len(SYMBOLS):
            raise UsageError(f"task guess_number: numbers = {numbers} is not within 2..{len(SYMBOLS)}")
        if not 1 <= guesses <= 20:
            raise UsageError(f"task guess_number: guesses = {guesses} is not within 1..20")
        self.seed, self.numbers, self.guesses = seed, numbers, guesses
        options = {"numbers": numbers, "guesses": guesses}
        self.environment = EnvironmentSource("learner.environments.guess_number:GuessNumber", options)

    def prompt(self, index: int) -> Prompt:
        return Prompt(index, "?", {"secret": self._secret("train", index)})

    def held_out(self, index: int) -> Prompt:
        return Prompt(index, "?", {"secret": self._secret("held-out", index)}, held_out=True)

    def _secret(self, stream: str, index: int) -> int:
        return secret_of(index, self.numbers, "guess", stream, seed=self.seed)

    def score(self, prompt: Prompt, completion: str) -> Score:
        """Of a first turn alone: whether it is right at once."""
        right = completion == SYMBOLS[prompt.entry["secret"]]
        return Score(float(right), right)

    def solution(self, prompt: Prompt) -> str:
        return SYMBOLS[prompt.entry["secret"]]

    def transcript(self, prompt: Prompt) -> Sequence[str]:
        """A player who does not listen: it teaches to write one symbol a turn, and no more."""
        secret, said = prompt.entry["secret"], list[str]()
        for turn in range(self.guesses):
            guess = draw(self.seed, "guess", "blind", prompt.index, turn) % self.numbers
            said.append(SYMBOLS[guess])
            if guess == secret or turn == self.guesses - 1:
                break
            said.append(LOWER if secret < guess else HIGHER)
        return said

    def characters(self) -> Sequence[str]:
        return (*SYMBOLS[: self.numbers], "?", LOWER, HIGHER)
