"""The built-in string tasks: reverse digits, add numbers. Must not know torch or how a prompt is tokenized.

Training and held-out problems are disjoint by construction: the hash of a problem's text puts it in one class of 16,
class 0 is held out, and each stream draws again until the problem falls on its side.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from learner.tasks.port import Prompt, Score, Task
from p2p.errors import UsageError

HELD_OUT_CLASSES = 16
"""One problem in 16 is held out: few enough to leave most for training, enough to measure with."""


def draw(seed: int, *key: object) -> int:
    """64 bits that depend only on (seed, key): the same in every process, whatever PYTHONHASHSEED says."""
    text = "/".join(str(part) for part in (seed, *key))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def is_held_out(text: str) -> bool:
    return hashlib.blake2b(text.encode(), digest_size=4, person=b"held-out").digest()[0] % HELD_OUT_CLASSES == 0


class Problem(NamedTuple):
    """One problem as text."""

    text: str
    answer: str


class TextTask(Task):
    """A prompt with one right answer. Reward: 0.5 if exact + 0.5 * the fraction of the answer's positions right."""

    digits_range: tuple[int, int]
    """least and most digits of a number"""
    letters: str
    """all characters of problems and answers"""

    def __init__(self, seed: int, digits: int) -> None:
        least, most = self.digits_range
        if not least <= digits <= most:
            raise UsageError(f"task {self.name}: digits = {digits} is not within {least}..{most}")
        self.seed, self.digits = seed, digits

    def problem(self, bits: int) -> Problem:
        """The problem made from 64 uniform bits."""
        raise NotImplementedError

    def prompt(self, index: int) -> Prompt:
        return self._draw("train", index, held_out=False)

    def held_out(self, index: int) -> Prompt:
        return self._draw("held-out", index, held_out=True)

    def _draw(self, stream: str, index: int, held_out: bool) -> Prompt:
        attempt = 0
        while True:
            text, answer = self.problem(draw(self.seed, self.name, stream, index, attempt))
            if is_held_out(text) is held_out:
                return Prompt(index, text, answer, held_out=held_out)
            attempt += 1

    def score(self, prompt: Prompt, completion: str) -> Score:
        """See `Task.score`; the class says how the reward is made."""
        right: str = prompt.entry
        exact = completion == right
        places = sum(a == b for a, b in zip(completion, right, strict=False))
        return Score(0.5 * exact + 0.5 * places / len(right), exact)

    def solution(self, prompt: Prompt) -> str:
        return str(prompt.entry)

    def characters(self) -> Sequence[str]:
        return tuple(self.letters)


class ReverseTask(TextTask):
    """ "739120>" -> "021937". """

    name, digits_range, letters = "reverse", (3, 18), "0123456789>"

    def __init__(self, seed: int, digits: int = 6) -> None:
        super().__init__(seed, digits)

    def problem(self, bits: int) -> Problem:
        digits = f"{bits % 10**self.digits:0{self.digits}d}"
        return Problem(f"{digits}>", digits[::-1])


class AddTask(TextTask):
    """ "12+34=" -> "46"; operands below 10**digits. """

    name, digits_range, letters = "add", (2, 9), "0123456789+="

    def __init__(self, seed: int, digits: int = 2) -> None:
        super().__init__(seed, digits)

    def problem(self, bits: int) -> Problem:
        a, b = bits % 10**self.digits, (bits >> 32) % 10**self.digits
        return Problem(f"{a}+{b}=", str(a + b))
