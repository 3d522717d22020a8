"""What scoring found of tokens, by token. Must import without torch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Deviations(NamedTuple):
    """One entry a sampled token, float64."""

    distance: np.ndarray
    claimed: np.ndarray
    recomputed: np.ndarray
    shift: np.ndarray
    """see `learner.audit.statistic`"""


class OwnDeviations(NamedTuple):
    """What the auditor itself came to, as a node that computes in bfloat16."""

    found: Deviations
    repeated: np.ndarray
    """bool: see `learner.audit.repeats`"""
    prompts: np.ndarray
    """float64: `prompt_number` of each token's prompt"""

    @classmethod
    def none(cls) -> OwnDeviations:
        """Of no tokens."""
        empty = np.empty(0)
        return cls(Deviations(empty, empty, empty, empty), np.empty(0, bool), empty)
