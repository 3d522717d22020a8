"""Traces of spot nodes from published statistics, where the original cannot be had: births and deaths with the published mean.
Pure.

    python -m netem.planning.traces MEAN MOST UP_S SECONDS SEED > trace.csv
"""

from __future__ import annotations

import sys

import numpy as np

PART_S = 5000.0
"""Seconds of a part of the trace. The mean holds in each part, so that a few hours of the trace show it as well."""

TOLERANCE = 0.03
"""A part whose mean differs from the asked one by more than this share is drawn anew."""

MAX_DRAWS = 100_000
"""Draws of one part before it is given up: then the asked mean is out of reach."""


def spot_trace(mean: float, most: int, up_s: float, seconds: float, seed: int) -> list[tuple[float, int]]:
    """(second, nodes there from then on), for `seconds` seconds. Each of `most` nodes stays `up_s` seconds in the mean and
    returns at the rate with which `mean` nodes are there. ValueError when no such trace is found."""
    rng = np.random.default_rng(seed)
    trace = [(0.0, round(mean))]
    for start in np.arange(0.0, seconds, PART_S).tolist():
        trace += _part(mean, most, up_s, start=start, end=min(seconds, start + PART_S), before=trace[-1][1], rng=rng)
    return trace


def _part(
    mean: float, most: int, up_s: float, start: float, end: float, before: int, rng: np.random.Generator
) -> list[tuple[float, int]]:
    back = mean / (most - mean) / up_s
    for _ in range(MAX_DRAWS):
        at, count, total = start, before, 0.0
        part: list[tuple[float, int]] = []
        while at < end:
            rate = count / up_s + (most - count) * back
            stay = float(rng.exponential(1 / rate))
            total += count * min(stay, end - at)
            at += stay
            count += -1 if rng.random() < count / up_s / rate else 1
            if at < end:
                part.append((round(at, 1), count))
        if abs(total / (end - start) / mean - 1) < TOLERANCE:
            return part
    raise ValueError(f"no trace from {start} to {end} s has a mean of {mean} of {most}")


if __name__ == "__main__":
    print("seconds,nodes")
    mean, most, up_s, seconds, seed = sys.argv[1:]
    for second, nodes in spot_trace(float(mean), int(most), float(up_s), float(seconds), int(seed)):
        print(f"{second},{nodes}")
