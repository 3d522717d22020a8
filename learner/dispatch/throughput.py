"""How fast an engine decodes, as a function of what it runs: the model, and its fit to what nodes report. Pure.

StaleFlow's form (arXiv 2601.12784, section 5): with n running sequences that hold KV context tokens in all, one decoding step
takes

    step_s = k1 * KV + max(k2, k3 * n) + k4

seconds: reading the context, then reading the weights or computing on them, whichever is slower, and what is paid always. Must
not know nodes' names or what is generated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

KEPT_OBSERVATIONS = 64
"""Observations of one engine that are kept. Beyond so many the oldest goes; 64 cover the loads that one engine sees."""

MIN_OBSERVATIONS = 4
"""Observations before the first fit: one for each coefficient."""

REFIT_AFTER = 8
"""New observations before the next fit. A fit takes some 0.3 ms, and a head has a thousand engines."""

CREDIBLE_RATE = (1e-3, 1e5)
"""Lowest and highest tokens per second of one sequence that a report may come to. A report is a stranger's word, and numbers
beyond any engine's would overflow the arithmetic."""

LOAD_STEP = math.log(1.3)
"""Loads whose logarithms fall into one step of this width count as the same load, so the newer observation replaces the older."""

KNEES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)
"""Numbers of sequences at which k3 * n may begin to exceed k2. Each is tried and the best is kept: given the knee, the fit is
linear."""


@dataclass(frozen=True, slots=True)
class Throughput:
    """Coefficients in seconds: k1 a context token, k2 and k4 a step, k3 a sequence."""

    k1: float
    k2: float
    k3: float
    k4: float

    def step_s(self, running: float, context: float) -> float:
        """Seconds for one token of each of `running` sequences that hold `context` tokens together."""
        return self.k1 * context + max(self.k2, self.k3 * running) + self.k4

    def pace(self, running: float, context: float) -> float:
        """Tokens per second that each of them makes."""
        return 1.0 / self.step_s(running, context)

    def rate(self, running: float, context: float) -> float:
        """Tokens per second that all of them make."""
        return running / self.step_s(running, context) if running > 0 else 0.0

    def gain(self, running: float, context: float, more: float) -> float:
        """Tokens per second that one sequence more, holding `more` tokens, adds. Negative where it costs more than it makes."""
        return self.rate(running + 1, context + more) - self.rate(running, context)


@dataclass
class Fit:
    """One engine's model, learned from (running, context, tokens per second) as the node reports them."""

    _seen: dict[tuple[int, int], tuple[float, float, float]] = field(default_factory=dict, init=False, repr=False)
    """(load, context as powers of 1.3) -> the latest observation there: a long time at one load must not push out the others"""
    _model: Throughput | None = field(default=None, init=False, repr=False)
    _new: int = field(default=0, init=False, repr=False)
    """observations since the last fit"""

    def observe(self, running: float, context: float, tokens_per_s: float) -> None:
        """The engine made `tokens_per_s` while `running` sequences held `context` tokens together. A report without work or
        tokens, or with an incredible rate, is ignored."""
        if running < 1 or context < 0 or not CREDIBLE_RATE[0] <= tokens_per_s / running <= CREDIBLE_RATE[1]:
            return
        key = int(math.log(running) / LOAD_STEP), int(math.log(context + 1) / LOAD_STEP)
        self._seen.pop(key, None)
        self._seen[key] = running, context, running / tokens_per_s
        if len(self._seen) > KEPT_OBSERVATIONS:
            del self._seen[next(iter(self._seen))]
        self._new += 1

    @property
    def model(self) -> Throughput | None:
        """None until there is enough to go by."""
        if len(self._seen) >= MIN_OBSERVATIONS and self._new >= (1 if self._model is None else REFIT_AFTER):
            self._model, self._new = fit(list(self._seen.values())), 0
        return self._model


def fit(observations: Sequence[tuple[float, float, float]]) -> Throughput:
    """The model nearest to (running, context, step seconds) in relative error, no coefficient below zero.

    Given the knee k2 / k3, a step is linear in (1, excess over the knee, context): least squares for each knee, weighted so
    that a fast step counts as much as a slow one. k2 and k4 cannot be told apart but for the knee.

    The result is the same on every machine. Knees beyond what was seen fit equally well, so a last bit decides between them,
    and that would be the order in which a BLAS kernel chosen for the processor adds up. So all sums here run in the
    observations' order.
    """
    running, context, step = np.array(observations, np.float64).T[:, :, None]
    knees = np.array(KNEES, np.float64)
    above = np.maximum(running - knees, 0.0)
    columns = np.stack([np.ones_like(above), above, np.broadcast_to(context, above.shape)]) / step
    """(coefficient, observation, knee)"""
    scale = np.maximum(columns.max(axis=(1, 2)), 1e-300)
    best: tuple[float, Throughput] | None = None
    # No coefficient below zero: the best over the subsets of columns, the first always there, whose solution is not.
    for subset in ((0, 1, 2), (0, 1), (0, 2), (0,)):
        part = [columns[i] / scale[i] for i in subset]
        found = np.zeros((3, len(knees)))
        for i, solved in zip(subset, _least_squares(part), strict=True):
            found[i] = solved / scale[i]
        fitted = columns[0] * found[0] + columns[1] * found[1] + columns[2] * found[2]
        errors = _sum(np.abs(fitted - 1.0)) / len(step)
        a, b, c = found
        legal = (found >= 0).all(axis=0) & (b * knees <= a) & (a > 0)
        k = int(np.argmin(np.where(legal, errors, np.inf)))
        if legal[k] and (best is None or errors[k] < best[0] - 1e-4):
            best = float(errors[k]), Throughput(*map(float, (c[k], b[k] * knees[k], b[k], a[k] - b[k] * knees[k])))
    return best[1] if best is not None else Throughput(0.0, 0.0, 0.0, float(_sum(step)[0]) / len(step))


def _sum(values: np.ndarray) -> np.ndarray:
    """Over the first axis, in its order: unlike np.sum and a BLAS, a running sum has no other."""
    return np.cumsum(values, axis=0)[-1]


def _least_squares(columns: Sequence[np.ndarray]) -> list[np.ndarray]:
    """One array (knee) a column: the coefficients with which the columns, each (observation, knee), add up to 1 most nearly.

    By Gaussian elimination of the normal equations, all knees at once. They are positive definite, the ridge of 1e-9 included,
    so no pivots are sought.
    """
    n, size = len(columns), len(columns[0])
    rows = [[_sum(one * other) for other in columns] + [_sum(one)] for one in columns]
    for i in range(n):
        rows[i][i] = rows[i][i] + 1e-9 * size
    for i in range(n):
        for below in rows[i + 1 :]:
            factor = below[i] / rows[i][i]
            below[i:] = [b - factor * a for a, b in zip(rows[i][i:], below[i:], strict=True)]
    found: list[np.ndarray] = []
    for i in reversed(range(n)):
        left = rows[i][n]
        for j, solved in zip(range(n - 1, i, -1), found, strict=True):
            left = left - rows[i][j] * solved
        found.append(left / rows[i][i])
    return found[::-1]
