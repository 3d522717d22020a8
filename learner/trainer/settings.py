"""Every setting of the trainer process. Must not know torch: configuration is read and checked without it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from p2p.errors import UsageError

SEEDS = (-(1 << 63), (1 << 63) - 1)
"""What every random generator takes."""
_RANGES: dict[str, tuple[float, float]] = {
    **{name: (0, math.inf) for name in (
        "steps", "max_staleness", "lr_ramp", "weight_decay", "grad_clip", "clip_high", "kl_coef", "eval_every", "eval_size",
        "threads",
    )},
    **{name: (1, math.inf) for name in (
        "checkpoint_every", "checkpoint_keep", "max_new_tokens", "micro_batch_tokens", "micro_batch_groups",
    )},
    "clip_low": (0, 1),
    "seed": SEEDS, "task_seed": SEEDS,
}  # fmt: skip
"""Setting -> smallest and largest value that makes sense. A negative grad_clip would train the other way round."""


@dataclass(frozen=True)
class TrainerConfig:
    model: str
    """folder or hub id of the base model"""
    checkpoint_dir: str
    task: str = "reverse"
    """for evaluation only: training data comes through the client"""
    task_seed: int = 0
    task_options: dict[str, Any] = field(default_factory=dict)
    task_allow_unconfined: bool = False

    steps: int = 200
    served_dtype: str = "bfloat16"
    max_staleness: int = 2
    """steps between a trajectory's oldest span and the step that consumes it; checked again here"""

    lr: float = 3e-4
    lr_ramp: int = 5
    """steps of linear ramp to `lr`"""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    """largest global gradient norm; 0 turns clipping off"""

    clip_low: float = 0.2
    clip_high: float = 0.28
    tis_cap: float = 2.0
    proximal: str = "behaviour"
    """"behaviour": clip pi / mu; "trainer": decoupled, weighted by min(pi / mu, tis_cap)"""
    aggregate: str = "token"
    scale_advantages: bool = True
    """divide by the group's standard deviation (False: Dr.GRPO)"""
    kl_coef: float = 0.0
    """against the base model, kept in memory beside the masters when > 0"""

    temperature: float = 1.0
    """the rollouts'; behaviour logprobs are of the distribution at this temperature"""
    max_new_tokens: int = 16
    micro_batch_tokens: int = 4096
    """padded tokens of one forward: bounds the memory of activations and logits"""
    micro_batch_groups: int = 4
    """forwards are cut anew every so many groups of a step (`learner.trainer.packing.Packer`)"""

    share_prompts: bool = True
    """run a prompt that a group repeats once per forward, where the model's cache allows it"""

    eval_every: int = 0
    """0: only before the first and after the last step"""
    eval_size: int = 64
    checkpoint_every: int = 1
    """steps between checkpoints; a step is committed only with a checkpoint that contains it"""
    checkpoint_keep: int = 2
    """2: the newest, and the one before in case the crash came between save and commit"""

    seed: int = 0
    device: str = "auto"
    threads: int = 0
    """torch threads; 0 leaves torch's own choice"""

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if not (low <= value <= high and value != math.inf):  # NaN is in no range
                bound = f"below {low:g}" if value < low else f"above {high:g}" if value > high else "not a finite number"
                raise UsageError(f"trainer.{name} = {value} is {bound}")
        for name in ("lr", "temperature", "tis_cap"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"trainer.{name} = {getattr(self, name)} is not a finite number above 0")
        for beta in self.betas:
            if not 0 <= beta < 1:
                raise UsageError(f"trainer.betas = {list(self.betas)}: {beta} is not within 0 <= beta < 1")
        for name, known in (
            ("served_dtype", ("bfloat16", "float32")),
            ("aggregate", ("token", "sequence", "constant")),
            ("proximal", ("trainer", "behaviour")),
        ):
            if getattr(self, name) not in known:
                raise UsageError(f"trainer.{name} = {getattr(self, name)!r} is not one of {', '.join(known)}")

        if self.device.partition(":")[0] not in ("auto", "cpu", "cuda", "mps"):
            raise UsageError(f"trainer.device = {self.device!r} is not auto, cpu, cuda or mps")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainerConfig:
        """Inverse of `to_dict` (JSON lists become tuples). UsageError on an unknown key."""
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise UsageError(f"unknown trainer setting {unknown[0]!r}; known: {', '.join(sorted(known))}")
        settings: dict[str, Any] = {k: tuple(v) if k == "betas" else v for k, v in values.items()}
        return cls(**settings)
