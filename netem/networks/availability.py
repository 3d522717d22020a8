"""When nodes are there and when away: alternating random times. Pure; the random numbers are the caller's.

One for the simulators (`stays`, in the long run's balance from the beginning) and for real processes (`spot_moves`: all there at
the beginning, none gone before it can have joined).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

SHORTEST = 0.2
"""Of the mean, in `spot_moves`: a node that is gone before it has joined says nothing."""


def stays(
    up_s: float, down_s: float, horizon_s: float, draw: Callable[[float], float], at: float = 0.0
) -> list[tuple[float, float]]:
    """The (from, until) in which one node is there, the first from `at`, as long as they begin before `horizon_s`. `draw` makes
    a time of its mean."""
    there = []
    while at < horizon_s:
        until = at + draw(up_s)
        there.append((at, until))
        at = until + draw(down_s)
    return there


def balanced_stays(up_s: float, down_s: float, horizon_s: float, rng: np.random.Generator) -> list[tuple[float, float]]:
    """`stays` of exponential times, with a first look at any moment: the node may be away then."""
    away = rng.random() > up_s / (up_s + down_s)
    draw = lambda mean: float(rng.exponential(mean))
    return stays(up_s, down_s, horizon_s, draw, draw(down_s) if away else 0.0)


@dataclass(frozen=True, slots=True)
class FleetChange:
    at: float
    """seconds from the beginning"""
    seat: int
    comes: bool
    notice: bool = False
    """it goes with a SIGTERM beforehand, as clouds send it; else at once"""


def spot_moves(seats: int, up_s: float, down_s: float, horizon_s: float, seed: int) -> list[FleetChange]:
    """Comings and goings in order of time, all there at the beginning: exponential times above SHORTEST. Every other departure
    of a seat has notice."""
    moves = []
    for seat in range(seats):
        rng = random.Random(f"{seed}.{seat}")
        draw = lambda mean, rng=rng: SHORTEST * mean + rng.expovariate(1 / ((1 - SHORTEST) * mean))
        for i, (since, until) in enumerate(stays(up_s, down_s, horizon_s, draw)):
            moves.append(FleetChange(since, seat, comes=True))
            if until < horizon_s:
                moves.append(FleetChange(until, seat, comes=False, notice=(i + seat) % 2 == 0))
    return sorted(moves, key=lambda move: (move.at, move.seat))
