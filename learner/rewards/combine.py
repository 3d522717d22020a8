"""From what each reward function says of a group to its scores. Pure; must not know how they were asked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from learner.rewards.port import GroupUnscored, NoReward
from learner.rewards.settings import RewardPart
from learner.tasks.port import Score

Values = Sequence[float | NoReward | None]
"""What one reward function says of each answer of a group, in order; None where it does not apply."""


def combined(parts: Sequence[RewardPart], values: Sequence[Values]) -> list[Score | NoReward]:
    """A score for each answer: the weighted sum of what applies. It is exact when every part that applies is at least 1.
    NoReward where a function failed, no part applies to an answer, or the sum is too large for a number."""
    return [_combined(parts, of_answer, i) for i, of_answer in enumerate(zip(*values, strict=True))]


def _combined(parts: Sequence[RewardPart], values: Sequence[float | NoReward | None], i: int) -> Score | NoReward:
    known: dict[str, float] = {}
    for part, value in zip(parts, values, strict=True):
        if isinstance(value, NoReward):
            return value
        if value is not None:
            known[part.title] = value
    if not known:
        return NoReward(f"no reward function says anything about answer {i}: all returned None")
    reward = math.fsum(part.weight * known[part.title] for part in parts if part.title in known)
    if not math.isfinite(reward):
        return NoReward(f"the reward of answer {i} is {reward}")
    exact = all(value >= 1.0 for value in known.values())
    return Score(reward, exact, known if len(parts) > 1 else {})


def checked_values(answer: Mapping[str, Any], count: int) -> list[float | None]:
    """What a process says of `count` answers. GroupUnscored when it is no list of finite numbers."""
    if "error" in answer:
        raise GroupUnscored(str(answer["error"]))
    values = answer.get("values")
    if not isinstance(values, list) or len(values) != count:
        raise GroupUnscored(f"it returned no list of {count} values")
    for value in values:
        if value is not None and not (isinstance(value, float) and math.isfinite(value)):
            raise GroupUnscored(f"it returned {value!r:.80}, which is no reward")
    return values
