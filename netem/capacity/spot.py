"""When spot nodes come and go: a trace from mean times there and away. Pure; random by seed."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Move:
    at: float
    """seconds from the beginning"""
    seat: int
    comes: bool
    notice: bool = False
    """it goes with a SIGTERM beforehand, as clouds send it; else at once"""


def trace(seats: int, up_s: float, down_s: float, horizon_s: float, seed: int) -> list[Move]:
    """Each seat is there and away for exponential times, of which the shortest (a fifth of the mean) are left out: a node that
    is gone before it has joined says nothing. Every other one gets notice. In order of time; all are there at the beginning."""
    moves = []
    for seat in range(seats):
        rng = random.Random(f"{seed}.{seat}")
        at, there, notice = 0.0, False, bool(seat % 2)
        while at < horizon_s:
            there = not there
            notice = not notice if not there else notice
            moves.append(Move(at, seat, there, notice and not there))
            mean = up_s if there else down_s
            at += 0.2 * mean + rng.expovariate(1 / (0.8 * mean))
    return sorted(moves, key=lambda move: (move.at, move.seat))
