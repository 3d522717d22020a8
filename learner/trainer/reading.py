"""A checkpoint of either form back into what is trained: one process's, or that of several ranks. Must not know the network."""

from __future__ import annotations

from pathlib import Path

import torch

from learner.trainer.checkpoints.checkpoint import load_checkpoint, load_weights
from learner.trainer.checkpoints.forms import is_sharded
from learner.trainer.ranks.checkpoint import load_sharded_checkpoint, load_sharded_weights
from learner.trainer.trained import Trained


def read_checkpoint(path: Path, trained: Trained, optimizer: torch.optim.Optimizer) -> int:
    """Put everything back as it was saved; the step that it is of. UsageError when the folder does not fit this model."""
    return (load_sharded_checkpoint if is_sharded(path) else load_checkpoint)(path, trained, optimizer)


def read_weights(path: Path, trained: Trained) -> None:
    """A checkpoint's weights alone. FileNotFoundError when it is gone, UsageError when it is of another model."""
    (load_sharded_weights if is_sharded(path) else load_weights)(path, trained)
