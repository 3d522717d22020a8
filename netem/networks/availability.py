"""When nodes are present and when away: alternating random times. Pure; the random numbers are the caller's.

`balanced_stays` is for the simulators: from the beginning a node is away with its long-run probability. `spot_moves` is for real
processes: all nodes are present at the beginning, and none leaves before it can have joined.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

SHORTEST = 0.2
"""Shortest time in `spot_moves`, as a share of the mean: a node that leaves before it has joined would measure nothing."""


def stays(
    up_s: float, down_s: float, horizon_s: float, draw: Callable[[float], float], at: float = 0.0
) -> list[tuple[float, float]]:
    """The (from, until) spans in seconds during which one node is present. The first begins at `at`, the last before `horizon_s`.
    `draw(mean)` gives a random time with that mean."""
    there = []
    while at < horizon_s:
        until = at + draw(up_s)
        there.append((at, until))
        at = until + draw(down_s)
    return there


def balanced_stays(up_s: float, down_s: float, horizon_s: float, rng: np.random.Generator) -> list[tuple[float, float]]:
    """`stays` with exponential times, of a process that began long ago: the node may be away at time 0."""
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
    """whether it gets a SIGTERM before it is killed, as clouds send it"""


def spot_moves(seats: int, up_s: float, down_s: float, horizon_s: float, seed: int) -> list[FleetChange]:
    """Arrivals and departures of `seats` nodes in order of time. All are present at the beginning; times are exponential above
    SHORTEST of their mean. Every other departure of a seat has notice."""
    moves = []
    for seat in range(seats):
        rng = random.Random(f"{seed}.{seat}")
        draw = lambda mean, rng=rng: SHORTEST * mean + rng.expovariate(1 / ((1 - SHORTEST) * mean))
        for i, (since, until) in enumerate(stays(up_s, down_s, horizon_s, draw)):
            moves.append(FleetChange(since, seat, comes=True))
            if until < horizon_s:
                moves.append(FleetChange(until, seat, comes=False, notice=(i + seat) % 2 == 0))
    return sorted(moves, key=lambda move: (move.at, move.seat))
