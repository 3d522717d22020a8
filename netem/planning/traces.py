"""Spot traces by published statistics, where the original is not to be had: births and deaths, and the mean as published. Pure.

    python -m netem.planning.traces MEAN MOST UP_S SECONDS SEED > trace.csv
"""

from __future__ import annotations

import sys

import numpy as np

NEAR = 0.02
"""Of the asked mean, that a drawn trace's may be off; others are drawn anew."""


def spot_trace(mean: float, most: int, up_s: float, seconds: float, seed: int) -> list[tuple[float, int]]:
    """(second, nodes there from then on): each of `most` nodes stays `up_s` in the mean and returns so that `mean` are there; the
    first trace drawn whose mean over `seconds` is that."""
    rng = np.random.default_rng(seed)
    back = mean / (most - mean) / up_s
    for _ in range(10_000):
        at, count, trace, total = 0.0, round(mean), [(0.0, round(mean))], 0.0
        while at < seconds:
            rate = count / up_s + (most - count) * back
            stay = float(rng.exponential(1 / rate))
            total += count * min(stay, seconds - at)
            at += stay
            count += -1 if rng.random() < count / up_s / rate else 1
            if at < seconds:
                trace.append((round(at, 1), count))
        if abs(total / seconds / mean - 1) < NEAR:
            return trace
    raise ValueError(f"no trace of {seconds} s has a mean of {mean} of {most}")


if __name__ == "__main__":
    print("seconds,nodes")
    mean, most, up_s, seconds, seed = sys.argv[1:]
    for second, nodes in spot_trace(float(mean), int(most), float(up_s), float(seconds), int(seed)):
        print(f"{second},{nodes}")
