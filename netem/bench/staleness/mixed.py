"""Numbers of 3 to 10 digits to reverse: a task whose answers differ in length, and are harder the longer they are. For what
favours short answers. Must not know torch."""

from __future__ import annotations

from learner.tasks.letters_and_sums import Problem, TextTask

SHORTEST, LONGEST = 3, 10
"""Digits, each number of them as often."""


class MixedTask(TextTask):
    """ "7391>" -> "1937". """

    name, digits_range, letters = "mixed", (LONGEST, LONGEST), "0123456789>"

    def __init__(self, seed: int, digits: int = LONGEST) -> None:
        super().__init__(seed, digits)

    def problem(self, bits: int) -> Problem:
        digits = SHORTEST + (bits >> 40) % (LONGEST - SHORTEST + 1)
        text = f"{bits % 10**digits:0{digits}d}"
        return Problem(f"{text}>", text[::-1])
