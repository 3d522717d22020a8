"""How many bytes a run needs: in memory for training, on the disk for checkpoints and versions. Pure; must not know torch.

Lower bounds where they are called so, for a run must not be refused that would have gone well.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from learner.config import LearnerConfig
from learner.preflight.facts import ModelShape
from learner.trainer.forecast.facts import ModelCosts
from learner.trainer.forecast.forecast import COPY, MemoryForecast, TrainingPlan, forecast
from learner.trainer.logit_chunks import chunk_on
from learner.trainer.optimizers.kinds import FLOAT32
from learner.trainer.settings import TrainerSection

SERVED_BYTES = {"bfloat16": 2, "float32": 4}
"""Bytes a parameter of a published version, by `trainer.served_dtype`."""

STATES = 2
"""States in the head's format that the trainer holds in host memory: the one published, and the next."""

LOGITS_BLOCKS = 2
"""Blocks of a chunk's logits at once: these, or their gradient, and the probabilities, float32 each."""

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
    """about, on the device, for one chunk of a forward pass"""
    a_parameter: float
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


def training_plan(config: LearnerConfig, *, gpu: bool, room: int = 0) -> TrainingPlan:
    """What follows from a run's settings. `gpu`: the trainer's device has memory of its own; `room`: the bytes there that layers
    may take that are not run again in the backward."""
    trainer, every = config.trainer, config.swarm.anchor_every
    served = SERVED_BYTES[trainer.served_dtype]
    made = 0 if config.external_trainer else math.ceil(trainer.steps / trainer.checkpoint_interval)
    anchors = 2 if trainer.steps > every else 1
    adapter = trains_adapter(config)
    bfloat16 = computes_in_bfloat16(trainer, gpu=gpu)
    # In the machine's memory anyway, and in float32, the two are one.
    plain = trainer.optimizer == "adamw_host" and not gpu and not bfloat16
    return TrainingPlan(
        own_memory=gpu, optimizer="adamw" if plain else trainer.optimizer, ranks=trainer.devices, served_bytes=served,
        reference=bool(trainer.kl_coef) and not adapter, whole=not adapter,
        frozen_bytes=SERVED_BYTES[frozen_type(trainer, bfloat16=bfloat16)] if adapter else FLOAT32,
        states=STATES + (config.swarm.squash_every > 1), copies=min(made, trainer.checkpoint_keep + 1),
        versions=1 + anchors + DELTA_SHARE * min(every, trainer.steps), room=room,
        copied=trainer.checkpoint_beside and trainer.devices == 1,
    )  # fmt: skip


def trains_adapter(config: LearnerConfig) -> bool:
    """Whether an adapter on a frozen model is trained (`trainer.lora`)."""
    return bool(config.trainer.lora.rank)


def computes_in_bfloat16(trainer: TrainerSection, *, gpu: bool) -> bool:
    """As the trainer decides it."""
    return trainer.compute_dtype == "bfloat16" or (trainer.compute_dtype == "auto" and gpu)


def frozen_type(trainer: TrainerSection, *, bfloat16: bool) -> str:
    """Of a frozen model's weights beside an adapter, as the trainer keeps them. `bfloat16`: it computes in it."""
    return trainer.served_dtype if bfloat16 and trainer.devices == 1 else "float32"


def memory_forecast(config: LearnerConfig, costs: ModelCosts, *, gpu: bool, room: int = 0) -> MemoryForecast:
    """What our trainer takes with these settings."""
    return forecast(costs, training_plan(config, gpu=gpu, room=room))


def plain_costs(config: LearnerConfig, model: ModelShape, *, gpu: bool) -> ModelCosts:
    """What a model's files tell alone: all is trained, and activations are not known. All counts as matrices of hidden layers,
    of which no optimizer keeps more than of others: so what follows is the least. An adapter's own values are few beside its
    frozen base: they are left out."""
    each = model.parameters
    trained = 0 if trains_adapter(config) else each
    return ModelCosts(each, trained, trained, bfloat16=computes_in_bfloat16(config.trainer, gpu=gpu))


def memory_needs(config: LearnerConfig, model: ModelShape, *, gpu: bool) -> MemoryNeeds:
    """What our trainer needs with these settings. `gpu`: it runs on a device with memory of its own."""
    trainer = config.trainer
    found = memory_forecast(config, plain_costs(config, model, gpu=gpu), gpu=gpu)
    most = max(trainer.micro_batch_tokens, config.rollout.max_new_tokens)
    logits = chunk_on("cuda" if gpu else "cpu").bytes_of(model.vocabulary, most)
    # What is there in every step, whatever the activations are. Of a checkpoint that is written beside training, only what the
    # disk has not yet is copied: that may be nothing.
    device, host = (
        sum(i.size for i in found.items if i.place == place and i.when in ("always", "training") and i.name != COPY)
        for place in ("device", "host")
    )
    each = device / model.parameters if model.parameters else 0
    return MemoryNeeds(device, host, LOGITS_BLOCKS * logits, each)


def disk_needs(config: LearnerConfig, model: ModelShape) -> DiskNeeds:
    """What checkpoints (of our trainer) and versions take on the disk at the most crowded moment: the first version is kept, and
    an anchor goes when its successor and the deltas between are there."""
    gpu = config.trainer.device != "cpu"  # with some optimizers a GPU's checkpoint is smaller: that counts while it may be one
    found = memory_forecast(config, plain_costs(config, model, gpu=gpu), gpu=gpu)
    return DiskNeeds(found.size_of("checkpoints"), found.plan.copies, found.size_of("versions"))
