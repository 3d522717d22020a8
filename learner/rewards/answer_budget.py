"""How long an answer may compute, so that with all that belongs to it its scorer is free again after the deadline. Pure.

Answers that loop for ever come by the hundred, and each has its own process: forked, killed, reaped, told about, on a machine
that may be busy. If that came on top of the deadline, n of them would hold a scorer for longer than n deadlines.
"""

from __future__ import annotations

AIM = 0.96
"""Share of the deadline that an answer and all that belongs to it are to take: the rest is for the way to the next answer."""

LEAST = 0.5
"""Share of the deadline that an answer has at the least, however busy the machine."""

UP, DOWN = 0.5, 0.1
"""How much of a difference is learned at once, of an overhead that grew and of one that shrank: better early than late."""


class AnswerBudget:
    """Of one scorer, with a deadline of `limit_s` seconds an answer."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s, self._overhead_s = limit_s, 0.0

    @property
    def answer_s(self) -> float:
        """Seconds that the next answer may compute."""
        return max(LEAST * self._limit_s, AIM * self._limit_s - self._overhead_s)

    def ran_out(self, answer_s: float, elapsed_s: float) -> None:
        """An answer used all of its `answer_s`, and its scorer was free again after `elapsed_s`."""
        change = max(0.0, elapsed_s - answer_s) - self._overhead_s
        self._overhead_s += change * (UP if change > 0 else DOWN)
