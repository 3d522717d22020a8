"""What is to be generated: prompts whose completions' lengths have a long tail. Pure; random by seed.

Published rollouts (RLBoost, StaleFlow, StreamRL) have up to 20,000 tokens a completion, a median of a few thousand and a tail
that decides the step's time. A length here is lognormal about its prompt's mean and cut at `most`. The prompt's mean is
correlated with a feature that a length predictor sees.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class DrawnGroup(NamedTuple):
    """What one prompt comes to."""

    feature: float
    """what a length predictor sees of the prompt"""
    lengths: tuple[int, ...]
    """tokens of each completion"""


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts and their completions, and what the learner takes for them."""

    name: str
    median: float
    """median length of a completion in tokens"""
    between: float
    """standard deviation of the prompts' mean log lengths"""
    within: float
    """standard deviation of the log lengths of one prompt's completions"""
    most: int = 20_000
    """longest completion in tokens"""
    prompt: int = 300
    """tokens of a prompt"""
    told: float = 0.5
    """correlation of a prompt's mean log length with its feature"""
    groups: int = 128
    """groups of a learner's step"""
    samples: int = 16
    """completions of a group"""
    train_s: float = 230.0
    """seconds of training for a step's groups, without waiting"""
    update_s: float = 6.0
    """seconds from the last group's gradient to the version being handed out"""
    spread_s: float = 12.0
    """seconds from there until nodes serve it"""

    def group(self, task_index: int, seed: int) -> DrawnGroup:
        """The prompt `task_index` of this workload; the same for the same seed."""
        rng = np.random.default_rng((seed, task_index))
        own, noise = rng.standard_normal(2)
        mean = math.log(self.median) + self.between * own
        lengths = np.exp(mean + self.within * rng.standard_normal(self.samples))
        feature = math.exp(5.0 + self.told * own + math.sqrt(1 - self.told**2) * noise)
        return DrawnGroup(feature, tuple(int(n) for n in np.clip(lengths, 8, self.most)))

    def mean_length(self, seed: int = 0, groups: int = 2000) -> float:
        """Mean length in tokens of the first `groups` groups."""
        return float(np.mean([n for i in range(groups) for n in self.group(i, seed).lengths]))


SKEWED = Workload("skewed", 2600.0, 0.8, 0.6)
"""A long tail, as in the published rollouts."""

EVEN = Workload("even", 4000.0, 0.2, 0.2)
"""Completions of about the same length."""
