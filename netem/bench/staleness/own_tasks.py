"""Tasks that only the study has. Must not know torch."""

from __future__ import annotations

from learner.tasks.letters_and_sums import Problem, TextTask

SHORTEST, LONGEST = 3, 10
"""Digits, each number of them as often."""


SORTED = 6
"""Digits to sort."""


class MixedTask(TextTask):
    """ "7391>" -> "1937": numbers of 3 to 10 digits to reverse. Answers differ in length, and are harder the longer they are:
    for what favours short answers."""

    name, digits_range, letters = "mixed", (LONGEST, LONGEST), "0123456789>"

    def __init__(self, seed: int, digits: int = LONGEST) -> None:
        super().__init__(seed, digits)

    def problem(self, bits: int) -> Problem:
        digits = SHORTEST + (bits >> 40) % (LONGEST - SHORTEST + 1)
        text = f"{bits % 10**digits:0{digits}d}"
        return Problem(f"{text}>", text[::-1])


class SortTask(TextTask):
    """ "739148=" -> "134789": what is right at a place depends on all digits, and not on one of them as in "reverse"."""

    name, digits_range, letters = "sort", (SORTED, SORTED), "0123456789="

    def __init__(self, seed: int, digits: int = SORTED) -> None:
        super().__init__(seed, digits)

    def problem(self, bits: int) -> Problem:
        text = f"{bits % 10**SORTED:0{SORTED}d}"
        return Problem(f"{text}=", "".join(sorted(text)))
