"""Who ends first, and where the others are by then: the arrivals of a step's sequences. Pure; must not know torch or tasks.

A group runs on one node. A node takes a time for each token, drawn once a group; a group is whole with its longest sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

SPREAD = 0.5
"""Standard deviation of the logarithm of a node's time for a token: the slowest of twenty is some five times the fastest."""


def paces(count: int, rng: Random) -> list[float]:
    """Time for a token, a group each."""
    return [math.exp(rng.gauss(0.0, SPREAD)) for _ in range(count)]


def first_to_end(lengths: Sequence[Sequence[int]], pace: Sequence[float], keep: int) -> list[int]:
    """The numbers of the `keep` groups that end first, in order of their numbers. `lengths`: tokens of each group's sequences."""
    ends = [speed * max(group) for group, speed in zip(lengths, pace, strict=True)]
    return sorted(sorted(range(len(ends)), key=lambda i: (ends[i], i))[:keep])


def cut_at(lengths: Sequence[Sequence[int]], pace: Sequence[float], share: float) -> list[list[int]]:
    """Tokens of each sequence when all but `share` of them have ended: those that run are cut there, after one token at least."""
    ends = sorted(speed * n for group, speed in zip(lengths, pace, strict=True) for n in group)
    when = ends[max(0, math.ceil(len(ends) * (1 - share)) - 1)]
    return [[min(n, max(1, int(when / speed + 1e-9))) for n in group] for group, speed in zip(lengths, pace, strict=True)]
