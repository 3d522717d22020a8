"""How fast an engine decodes, as a function of what it runs: the model, and its fit to what nodes report. Pure.

StaleFlow's form (arXiv 2601.12784, section 5): with n running sequences that hold KV context tokens in all, one decoding step
takes

    step_s = k1 * KV + max(k2, k3 * n) + k4

seconds: reading the context, then reading the weights or computing on them, whichever is slower, and what is paid always. Must
not know nodes' names or what is generated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

SAMPLES = 64
"""Observations kept of one engine; a new one replaces the oldest of its own load where there is one (`Fit.observe`)."""

LEAST = 4
"""Observations before a fit is believed."""

REFIT = 8
"""Observations until the next."""

BELIEVED = (1e-3, 1e5)
"""Tokens per second of one sequence that a report may come to. It is a stranger's word: a number beyond any engine's would be
nothing but trouble in the arithmetic."""

KNEES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)
"""Where k3 * n may begin to exceed k2: tried each, the best is kept."""


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
        """Over a while in which `running` sequences held `context` tokens. What says nothing (no work, no tokens) is passed
        over."""
        if running < 1 or context < 0 or not BELIEVED[0] <= tokens_per_s / running <= BELIEVED[1]:
            return
        key = int(np.log(running) / np.log(1.3)), int(np.log(context + 1) / np.log(1.3))
        self._seen.pop(key, None)
        self._seen[key] = running, context, running / tokens_per_s
        if len(self._seen) > SAMPLES:
            del self._seen[next(iter(self._seen))]
        self._new += 1

    @property
    def model(self) -> Throughput | None:
        """None until there is enough to go by."""
        if len(self._seen) >= LEAST and self._new >= (1 if self._model is None else REFIT):
            self._model, self._new = fit(list(self._seen.values())), 0
        return self._model


def fit(observations: Sequence[tuple[float, float, float]]) -> Throughput:
    """The model nearest to (running, context, step seconds) in relative error, no coefficient below zero.

    Given the knee k2 / k3, a step is linear in (1, excess over the knee, context): least squares for each knee, weighted so
    that a fast step counts as much as a slow one. k2 and k4 cannot be told apart but for the knee. """
    running, context, step = np.array(observations, np.float64).T
    knees = np.array(KNEES, np.float64)
    above = np.maximum(running - knees[:, None], 0.0)
    rows = np.stack([np.ones_like(above), above, np.broadcast_to(context, above.shape)], axis=2) / step[:, None]
    scale = np.maximum(np.abs(rows).max(axis=(0, 1)), 1e-300)
    best: tuple[float, Throughput] | None = None
    # No coefficient below zero: the best over the subsets of columns, the first always there, whose solution is not.
    for subset in ((0, 1, 2), (0, 1), (0, 2), (0,)):
        part = rows[:, :, subset] / scale[list(subset)]
        gram = np.swapaxes(part, 1, 2) @ part + 1e-9 * len(step) * np.eye(len(subset))
        found = np.zeros((len(knees), 3))
        found[:, subset] = np.linalg.solve(gram, part.sum(axis=1)[:, :, None])[:, :, 0] / scale[list(subset)]
        errors = np.abs(np.einsum("kij,kj->ki", rows, found) - 1.0).mean(axis=1)
        a, b, c = found.T
        legal = (found >= 0).all(axis=1) & (b * knees <= a) & (a > 0)
        k = int(np.argmin(np.where(legal, errors, np.inf)))
        if legal[k] and (best is None or errors[k] < best[0] - 1e-4):
            best = float(errors[k]), Throughput(*map(float, (c[k], b[k] * knees[k], b[k], a[k] - b[k] * knees[k])))
    return best[1] if best is not None else Throughput(0.0, 0.0, 0.0, float(np.mean(step)))
