"""Group-relative advantages. Must not know torch, tokens or versions: rewards in, advantages out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

STD_EPSILON = 1e-4
"""Added to the standard deviation (TRL's value): caps the gain of a group whose rewards differ by almost nothing."""


def group_advantages(rewards: Sequence[float], *, scale: bool = True, leave_one_out: bool = False) -> np.ndarray:
    """float32 [G]: (reward - mean) / (sample std + eps) within one group (GRPO, arXiv 2402.03300, section 4.1.2).

    `scale=False` leaves the standard deviation out (Dr.GRPO, arXiv 2503.20783: dividing by it weights questions by
    how easy or hard they are). `leave_one_out`: the mean is that of the other rewards (RLOO, arXiv 2402.14740). A group whose
    rewards are all equal says nothing: exact zeros. ValueError on an empty group or a reward that is not finite.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1 or values.size == 0:
        raise ValueError("a group needs at least one reward")
    if not np.isfinite(values).all():
        raise ValueError(f"reward is not finite: {values.tolist()}")
    if values.min() == values.max():
        return np.zeros(values.size, dtype=np.float32)
    centred = values - values.mean()
    if leave_one_out:
        centred *= values.size / (values.size - 1)
    if scale:
        centred /= values.std(ddof=1) + STD_EPSILON
    return centred.astype(np.float32)
