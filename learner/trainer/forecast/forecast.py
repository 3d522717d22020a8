"""What training takes, item by item: on the trainer's device, on its host and on the disk. Pure; must not know torch.

It is what a run holds at its most crowded moment, not what an allocator asks of the system beyond that; the interpreter with its
libraries is not in it (some 0.4 GiB). `shoal bench trainer` measures how far it is off.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from learner.trainer.forecast.facts import ModelCosts
from learner.trainer.freed import APART_FROM
from learner.trainer.logit_chunks import ON_PROCESSOR
from learner.trainer.optimizers.kinds import BFLOAT16, FLOAT32, bytes_per_parameter
from learner.trainer.settings import OptimizerName
from p2p.few_sizes import sizes_up_to

KEEP_SHARE = 0.25
"""Of the memory that is free once gradients and optimizer are there, what layers may take that are not run again in the backward:
nodes, or the rest of a busy machine, may want the other part."""

COMING_BYTES = 12
"""A trained parameter, for its gradient and AdamW's two moments: none of them is there when a model has just been loaded."""

Place = Literal["device", "host", "disk"]
"""Where bytes are."""

Moment = Literal["always", "training", "publishing", "saving"]
"""When they are: the moments but "always" follow each other, so the largest of them counts."""


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """Of the settings, what bytes follow from."""

    own_memory: bool
    """the trainer's device has memory of its own; False: it computes in the host's"""
    optimizer: OptimizerName = "adamw"
    ranks: int = 1
    """devices that share weights, gradients and optimizer"""
    served_bytes: int = 2
    """of a published value"""
    reference: bool = False
    """the base model is kept beside the policy, for the KL penalty"""
    frozen_bytes: int = FLOAT32
    """of a weight that is not trained"""
    whole: bool = True
    """the whole model is published and saved; False: what is trained of it"""
    states: int = 2
    """states as published that the host keeps"""
    copies: int = 0
    """checkpoints on the disk at once"""
    versions: float = 0.0
    """states that the published versions on the disk amount to"""
    room: int = 0
    """bytes that layers may take that are not run again in the backward"""
    copied: bool = False
    """a checkpoint is copied to the host first and written beside training"""


@dataclass(frozen=True, slots=True)
class Item:
    """Something that takes bytes."""

    name: str
    place: Place
    size: int
    """bytes"""
    when: Moment = "always"


@dataclass(frozen=True, slots=True)
class MemoryForecast:
    """Of one rank, and what all of them hold on their host; where they compute in the host's memory, of all together."""

    costs: ModelCosts
    plan: TrainingPlan
    items: tuple[Item, ...]

    def bytes_in(self, *places: Place) -> int:
        """At the most crowded moment."""
        here = [item for item in self.items if item.place in places]
        moments = {item.when for item in here} - {"always"}
        most = max((_sum(i for i in here if i.when == moment) for moment in moments), default=0)
        return _sum(i for i in here if i.when == "always") + most

    @property
    def device(self) -> int:
        """Bytes on the trainer's device; on one without memory of its own, of the host's memory for everything."""
        return self.bytes_in("device") if self.plan.own_memory else self.bytes_in("device", "host")

    @property
    def host(self) -> int:
        """Bytes of the host's memory beside `device`."""
        return self.bytes_in("host") if self.plan.own_memory else 0

    @property
    def disk(self) -> int:
        """Bytes on the disk."""
        return self.bytes_in("disk")

    def size_of(self, name: str) -> int:
        """Bytes of the items of this name."""
        return _sum(item for item in self.items if item.name == name)


ACTIVATIONS, GRADIENTS, OPTIMIZER, REFERENCE = "activations and logits", "gradients", "optimizer", "reference model"
"""Names of items that settings change."""

COPY = "checkpoint, copied"
"""Name of the item for what a checkpoint is written from, at most: less of it where the disk is fast."""

LIBRARIES_BYTES = 40 << 20
"""What libraries hold of their own once they compute: 43 to 50 MiB were measured of a model of 2 M that took 64 tokens."""

KERNELS_BYTES = 15 << 18
"""For each length of a forward, and of a chunk of logits, what oneDNN and torch keep of the kernels that they compile for
computing in bfloat16 on a processor: 3.75 MiB, so that it is 120 MiB up to 1,024 tokens and 180 up to 4,096
(bench/trainer.md)."""

HOLES = 0.05
"""Of activations, where the C library hands out their memory: what lies between them and cannot be used. Chosen after looking
at 20M to 360M (bench/trainer.md)."""

SMALL_HOLES, SMALL_HOLES_COMPILED = 0.55, 0.75
"""The same of a model whose blocks are not kept apart, and of one whose kernels lie between them. Chosen after looking at 2M
(bench/trainer.md). Below 1M, where nothing is given back at all, it was not measured."""

BASE_VERSIONS = 2
"""States of a frozen base model among the versions on the disk: the anchor of an epoch, and the first state, which is kept."""


def forecast(costs: ModelCosts, plan: TrainingPlan) -> MemoryForecast:
    """Of a model and settings."""
    frozen, own = costs.parameters - costs.trained, plan.own_memory
    published = costs.parameters if plan.whole else costs.trained
    each = bytes_per_parameter(plan.optimizer, bfloat16=costs.bfloat16)
    plain = bytes_per_parameter(plan.optimizer, hidden_matrix=False)
    resident = BFLOAT16 if plan.optimizer == "adamw_host" and costs.bfloat16 else FLOAT32
    others = costs.trained - costs.matrices
    states = (each.device - resident - FLOAT32) * costs.matrices + (plain.device - 2 * FLOAT32) * others
    if plan.optimizer == "adamw_host":
        # What is no matrix keeps its float32 on the device; both have their states on the host.
        states = 0
    saved = each.disk * costs.matrices + plain.disk * others + (plan.frozen_bytes * frozen if plan.whole else 0)

    # Ranks without memory of their own hold their parts in one and the same, and each its activations.
    parts, passes = (plan.ranks, 1) if own else (1, plan.ranks)
    base = 0 if plan.whole else plan.served_bytes * costs.parameters
    # Ranks keep theirs in float32: it is cut as the model is.
    reference = BFLOAT16 if costs.bfloat16 and plan.ranks == 1 else FLOAT32

    rounded = passes if costs.bfloat16 and not own else 0
    compiled = KERNELS_BYTES * (sizes_up_to(costs.tokens) + sizes_up_to(ON_PROCESSOR.tokens))
    small = SMALL_HOLES_COMPILED if costs.bfloat16 else SMALL_HOLES
    holes = HOLES if costs.parameters >= APART_FROM else small
    activations = passes * (costs.activations + kept_layers(costs, plan) * costs.layer_bytes) if costs.activations else 0

    def shared(size: float) -> int:
        return int(size / parts)

    items = [
        Item("weights", "device", shared(resident * costs.matrices + FLOAT32 * others + plan.frozen_bytes * frozen)),
        Item(GRADIENTS, "device", shared(FLOAT32 * costs.trained), "training"),
        Item(OPTIMIZER, "device", shared(states)),
        Item(OPTIMIZER, "host", int(each.host * costs.matrices + plain.host * others)),
        Item(REFERENCE, "device", shared(reference * costs.parameters) if plan.reference else 0),
        Item("published last, to compare with", "device", shared(plan.served_bytes * published) if own else 0),
        Item(ACTIVATIONS, "device", activations, "training"),
        Item("holes between them", "device", 0 if own else int(holes * activations), "training"),
        Item("output projection, rounded", "host", rounded * BFLOAT16 * costs.head, "training"),
        # Rank 0 holds them, whole.
        Item("published states", "host", plan.states * plan.served_bytes * published + base),
        Item("libraries at work", "host", passes * LIBRARIES_BYTES),
        Item("compiled kernels", "host", rounded * compiled),
        # On a device without memory of its own all tensors are cast at once; else each segment is, on the device.
        Item("cast to be published", "host",
             shared(plan.served_bytes * published) if not own and plan.served_bytes != FLOAT32 else 0, "publishing"),
        Item(COPY, "host", int(saved) if own or plan.copied else 0, "always" if plan.copied else "saving"),
        Item("checkpoints", "disk", int(plan.copies * saved)),
        Item("versions", "disk",
             int(plan.versions * plan.served_bytes * published) + (BASE_VERSIONS * base if plan.versions else 0)),
    ]  # fmt: skip
    return MemoryForecast(costs, plan, tuple(item for item in items if item.size))


def room_to_keep(free: int, trained: int) -> int:
    """Bytes that layers may take that are not run again in the backward, where `free` are free of the memory that computes, once
    the weights are there. What training `trained` parameters takes besides is still to come."""
    return max(0, int(KEEP_SHARE * (free - COMING_BYTES * trained)))


def kept_layers(costs: ModelCosts, plan: TrainingPlan) -> int:
    """Layers that are not run again in the backward, of those that could be."""
    return min(costs.layers, plan.room // costs.layer_bytes) if costs.layer_bytes else 0


def _sum(items: Iterable[Item]) -> int:
    return sum(item.size for item in items)
