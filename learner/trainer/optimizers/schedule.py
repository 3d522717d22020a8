"""The learning rate of a step, by the name of a schedule. Pure; must not know torch or the network."""

from __future__ import annotations

import math

from learner.trainer.settings import TrainerSection


def learning_rate(config: TrainerSection, step: int) -> float:
    """The learning rate of a step (the run's first is 0): a linear ramp, then the schedule. It depends on the step alone, so a
    resumed run has the same."""
    return config.lr * min(1.0, (step + 1) / max(config.lr_ramp, 1)) * _after_ramp(config, step)


def _after_ramp(config: TrainerSection, step: int) -> float:
    """Share of `lr`: 1 up to the ramp's last step, `lr_min_ratio` from the run's last on (or where 1 / sqrt has fallen to it)."""
    least, ramp = config.lr_min_ratio, max(config.lr_ramp, 1)
    if config.lr_schedule == "constant" or step < ramp:
        return 1.0
    if config.lr_schedule == "inverse_sqrt":
        return max(least, math.sqrt(ramp / (step + 1)))
    done = min(1.0, (step + 1 - ramp) / max(config.steps - ramp, 1))
    share = 1 - done if config.lr_schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return least + (1 - least) * share
