"""How many bytes a run needs: in memory for training, on the disk for checkpoints and versions. Pure; must not know torch.

Lower bounds where they are called so, for a run must not be refused that would have gone well.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from learner.config import LearnerConfig
from learner.preflight.facts import ModelShape

MASTER_BYTES, GRADIENT_BYTES, MOMENT_BYTES = 4, 4, 8
"""Bytes a parameter: the trainer's own weights, their gradient, and AdamW's two moments, all float32."""

CHECKPOINT_BYTES = MASTER_BYTES + MOMENT_BYTES
"""Bytes a parameter of a checkpoint."""

SERVED_BYTES = {"bfloat16": 2, "float32": 4}
"""Bytes a parameter of a published version, by `trainer.served_dtype`."""

STATES = 2
"""States in the head's format that the trainer holds in host memory: the one published, and the next."""

LOGITS_BYTES = 12
"""Bytes a token and id of the vocabulary in a forward pass: logits, their log-softmax and its gradient, float32 each."""

DELTA_SHARE = 1 / 32
"""Bytes of a delta as a share of the state's: what the publisher reckons with before it has made one."""


SURE_SHARE = 0.5
"""Share of the bytes reckoned for versions that a run is refused without: they are compressed, so the rest may not be needed."""

JOURNAL_BYTES = 64_000_000
"""Bytes that any run is to have for its journal and logs: a long one takes more, and a disk with less is as good as full."""


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Bytes of memory for training. Activations are not counted."""

    device: int
    """at least, on the trainer's device"""
    host: int
    """at least, in the machine's memory, beside what is on a device that has its own"""
    logits: int
    """about, on the device, for one full forward pass"""
    a_parameter: int
    """bytes a parameter of `device`"""


@dataclass(frozen=True, slots=True)
class DiskNeeds:
    """Bytes on the run's disks, about."""

    checkpoints: int
    copies: int
    """checkpoints at once: those kept, and the one being written"""
    versions: int
    journal: int = JOURNAL_BYTES

    @property
    def total(self) -> int:
        return self.checkpoints + self.versions + self.journal

    @property
    def least(self) -> int:
        """Less does not do."""
        return self.checkpoints + int(SURE_SHARE * self.versions) + self.journal

    def of(self, parts: Collection[str]) -> DiskNeeds:
        """What these parts of a run need, by the names in `facts.PARTS`."""
        kept = "checkpoints" in parts
        return DiskNeeds(
            self.checkpoints if kept else 0, self.copies if kept else 0, self.versions if "versions" in parts else 0,
            self.journal if "journal" in parts else 0,
        )  # fmt: skip


def memory_needs(config: LearnerConfig, model: ModelShape, *, gpu: bool) -> MemoryNeeds:
    """What our trainer needs with these settings. `gpu`: it runs on a device with memory of its own."""
    trainer = config.trainer
    served = SERVED_BYTES[trainer.served_dtype]
    each = MASTER_BYTES + GRADIENT_BYTES + MOMENT_BYTES + (MASTER_BYTES if trainer.kl_coef else 0) + (served if gpu else 0)
    states = (STATES + (config.swarm.squash_every > 1)) * served * model.parameters
    logits = LOGITS_BYTES * model.vocabulary * max(trainer.micro_batch_tokens, config.rollout.max_new_tokens)
    return MemoryNeeds(each * model.parameters, states, logits, each)


def disk_needs(config: LearnerConfig, model: ModelShape) -> DiskNeeds:
    """What checkpoints (of our trainer) and versions take on the disk at the most crowded moment: the first version is kept, and
    an anchor goes when its successor and the deltas between are there."""
    trainer, every = config.trainer, config.swarm.anchor_every
    made = 0 if config.external_trainer else math.ceil(trainer.steps / trainer.checkpoint_every)
    copies = min(made, trainer.checkpoint_keep + 1)
    anchors = 2 if trainer.steps > every else 1
    states = 1 + anchors + DELTA_SHARE * min(every, trainer.steps)
    served = SERVED_BYTES[trainer.served_dtype] * model.parameters
    return DiskNeeds(copies * CHECKPOINT_BYTES * model.parameters, copies, int(states * served))
