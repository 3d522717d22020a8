"""What is to be generated: prompts whose completions' lengths have a long tail. Pure; random by seed.

Published rollouts (RLBoost, StaleFlow, StreamRL) have up to 20,000 tokens a completion, a median of a few thousand and a tail
that decides the step's time. A length here is lognormal about its prompt's mean, cut at `most`; the prompt's mean goes with a
feature that a predictor may see, as closely as `told` says (its correlation). """

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    median: float
    """tokens"""
    between: float
    """standard deviation of the log lengths of prompts"""
    within: float
    """of one prompt's members"""
    most: int = 20_000
    prompt: int = 300
    """tokens"""
    told: float = 0.5
    groups: int = 128
    """a learner's step"""
    samples: int = 16
    train_s: float = 230.0
    """of the learner, for a step's groups; without waiting"""
    update_s: float = 6.0
    """of the learner, from the last group's gradient to the version handed out"""
    spread_s: float = 12.0
    """from there until nodes serve it"""

    def group(self, task_index: int, seed: int) -> tuple[float, tuple[int, ...]]:
        """(the prompt's feature, its members' lengths)"""
        rng = np.random.default_rng((seed, task_index))
        own, noise = rng.standard_normal(2)
        mean = math.log(self.median) + self.between * own
        lengths = np.exp(mean + self.within * rng.standard_normal(self.samples))
        feature = math.exp(5.0 + self.told * own + math.sqrt(1 - self.told**2) * noise)
        return feature, tuple(int(n) for n in np.clip(lengths, 8, self.most))

    def mean_length(self, seed: int = 0, groups: int = 2000) -> float:
        return float(np.mean([n for i in range(groups) for n in self.group(i, seed)[1]]))


SKEWED = Workload("skewed", 2600.0, 0.8, 0.6)
EVEN = Workload("even", 4000.0, 0.2, 0.2)
