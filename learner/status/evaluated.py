"""What a run's evaluations found so far, by name, in bounded memory. Must not know views, files or the network."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

KEY = re.compile(r"eval/(?:([^/]{1,40})/)?(exact/mean|exact/stderr|reward/mean|reward/stderr|finished|unscored)")
"""A metric of an evaluation: its name, if it is not the default evaluation's, and what it says."""

FIELDS = {
    "exact/mean": "exact", "exact/stderr": "exact_error", "reward/mean": "reward", "reward/stderr": "reward_error",
    "finished": "finished", "unscored": "unscored",
}  # fmt: skip
"""End of a metric's name -> field of an `EvalPoint`."""

MOST_NAMES = 33
"""Evaluations that are kept: the default one, and as many as a configuration may name."""

MOST_EVAL_POINTS = 40
"""Results of one evaluation that are kept: the first, the newest 16, and between them some. The status page has them all."""

NEWEST = 16
"""Results that are never thinned out."""


class EvalPoint(NamedTuple):
    """What one evaluation found of one version."""

    step: int
    exact: float | None = None
    """share of the answers that were fully right"""
    exact_error: float | None = None
    """its standard error, over prompts"""
    reward: float | None = None
    reward_error: float | None = None
    finished: float | None = None
    """share of its prompts that this rests on"""
    unscored: float | None = None
    """prompts whose reward could not be had"""


def eval_points(line: Mapping[str, Any]) -> dict[str, EvalPoint]:
    """What a line of metrics.jsonl says of evaluations, by name; "" is the default one."""
    found: dict[str, dict[str, float]] = {}
    for key, value in line.items():
        if not key.startswith("eval/") or not isinstance(value, (int, float)) or not math.isfinite(value):
            continue
        if (match := KEY.fullmatch(key)) is not None:
            found.setdefault(match[1] or "", {})[FIELDS[match[2]]] = float(value)
    return {
        name: EvalPoint(line["step"], **values) for name, values in found.items() if "exact" in values or "reward" in values
    }


class EvalHistory:
    """The results of all evaluations, each by step."""

    def __init__(self) -> None:
        self._found: dict[str, dict[int, EvalPoint]] = {}

    def add(self, line: Mapping[str, Any]) -> None:
        """Take a line of metrics.jsonl; a later result of the same step replaces the earlier."""
        for name, point in eval_points(line).items():
            if name not in self._found and len(self._found) >= MOST_NAMES:
                continue
            kept = self._found.setdefault(name, {})
            kept[point.step] = point
            if len(kept) > MOST_EVAL_POINTS:  # the one that its neighbours are the nearest to says the least
                steps = sorted(kept)
                del kept[steps[min(range(1, len(steps) - NEWEST), key=lambda i: steps[i + 1] - steps[i - 1])]]

    def take_back(self, step: int) -> None:
        """Forget what came after this step."""
        for kept in self._found.values():
            for later in [s for s in kept if s > step]:
                del kept[later]

    def status(self) -> dict[str, list[dict[str, float]]]:
        """Plain values, each evaluation's by step."""
        return {
            name: [{f: v for f, v in kept[s]._asdict().items() if v is not None} for s in sorted(kept)]
            for name, kept in self._found.items() if kept
        }  # fmt: skip
