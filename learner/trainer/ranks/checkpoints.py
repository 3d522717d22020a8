"""Checkpoints of a model whose parts lie on several ranks: written by all of them, between two steps.

The same calls as `learner.trainer.checkpoints.writing.Checkpoints`, which writes beside training; this one waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from learner.trainer.checkpoints.checkpoint import prune_checkpoints
from learner.trainer.ranks.checkpoint import save_sharded
from learner.trainer.ranks.sharding import ShardedModel
from learner.trainer.trained import Trained


class ShardedCheckpoints:
    """Writes to `root`, keeps the newest `keep`. Every rank calls it alike; `commit(step, folder)` is called on each."""

    def __init__(
        self,
        root: Path,
        trained: Trained,
        optimizer: torch.optim.Optimizer,
        commit: Callable[[int, Path], None],
        *,
        epoch: int,
        config: Mapping[str, Any],
        keep: int,
        committed: int,
    ) -> None:
        assert isinstance(trained, ShardedModel)
        self._root, self._trained, self._optimizer, self._commit = root, trained, optimizer, commit
        self._epoch, self._config, self._keep = epoch, config, keep
        self.committed = committed
        """step of the last commit"""
        self.write_s, self.waited_s = 0.0, 0.0
        """seconds that the last checkpoint took, and all of them together: training waits for them"""

    def begin(self, step: int) -> None:
        """Write and commit a checkpoint of everything as it is now, after `step` steps."""
        began = time.perf_counter()
        folder = save_sharded(
            self._root, step, self._trained, self._optimizer, epoch=self._epoch, config=self._config
        )  # fmt: skip
        self._commit(step, folder)
        if self._trained.ranks.rank == 0:
            prune_checkpoints(self._root, self._keep, step)
        self.committed, self.write_s = step, time.perf_counter() - began
        self.waited_s += self.write_s

    def make_room(self, step: int, most: int) -> None:
        """Nothing is written beside training."""

    def check(self) -> None:
        """Nothing is written beside training."""

    def settle(self) -> None:
        """Nothing is written beside training."""
