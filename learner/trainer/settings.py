"""Every setting of the trainer process. Must not know torch: configuration is read and checked without it.

`TrainerSection` is the table [trainer] of a configuration. `TrainerConfig` is what the trainer process reads from trainer.json:
the same, and the settings that follow from the other tables.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from learner.section import Section, Seed

Beta = Annotated[float, Field(ge=0, lt=1)]

Aggregate = Literal["token", "sequence", "constant"]
"""token: mean over the step's tokens (DAPO). sequence: mean over sequences of their token means (GRPO). constant: token sums /
max_tokens, mean over sequences (Dr.GRPO)."""

Proximal = Literal["behaviour", "trainer"]
"""The policy from which the clip measures: the trainer's at the start of the step (decoupled), or the one that generated."""


class TrainerSection(Section):
    """The optimizer, the objective, checkpoints, and the default evaluation."""

    steps: int = Field(default=200, ge=0)
    """Optimizer steps of the whole run."""
    served_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the weights that are published to nodes. The trainer's own weights are float32."""

    lr: float = Field(default=3e-4, gt=0)
    """Learning rate of AdamW. The default suits the small models of the demo; 1e-6 is usual from 1B parameters on."""
    lr_ramp: int = Field(default=5, ge=0)
    """Steps over which the learning rate rises linearly to `lr`; it is constant afterwards."""
    betas: list[Beta] = Field(default=[0.9, 0.95], min_length=2, max_length=2)
    """AdamW's decay rates of the first and second moment of the gradient."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay."""
    grad_clip: float = Field(default=1.0, ge=0)
    """Largest global norm of the gradient; a longer one is scaled down to it. 0 turns clipping off."""

    clip_low: float = Field(default=0.2, ge=0, le=1)
    """The probability ratio of a token is clipped at 1 - `clip_low` from below (PPO, arXiv 1707.06347)."""
    clip_high: float = Field(default=0.28, ge=0)
    """The ratio is clipped at 1 + `clip_high` from above. More than `clip_low` lets unlikely tokens grow (clip-higher, DAPO,
    arXiv 2503.14476)."""
    tis_cap: float = Field(default=2.0, gt=0)
    """Largest importance weight pi / mu of a token, mu being the policy that sampled it (truncated importance sampling)."""
    proximal: Proximal = "behaviour"
    """Policy that the clip is measured from. "behaviour": the one that sampled the token, so the clip sees staleness.
    "trainer": the trainer's own at the start of the step, and staleness becomes a weight of at most `tis_cap` (decoupled
    objective, AReaL, arXiv 2505.24298)."""
    aggregate: Aggregate = "token"
    """How token losses are averaged. "token": over all tokens of the step (DAPO, arXiv 2503.14476). "sequence": over each
    completion, then over completions (GRPO, arXiv 2402.03300). "constant": sums divided by `rollout.max_new_tokens`, then over
    completions (Dr. GRPO, arXiv 2503.20783)."""
    scale_advantages: bool = True
    """Divide a group's advantages by the standard deviation of its rewards (GRPO). False leaves them (Dr. GRPO)."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the base model. Above 0 the base model is kept in memory as well."""

    micro_batch_tokens: int = Field(default=4096, ge=1)
    """Padded tokens of one forward pass. It bounds the memory of activations and logits."""
    share_prompts: bool = True
    """Run a prompt that several completions share once per forward pass, where the model's cache allows it."""

    eval_every: int = Field(default=0, ge=0)
    """Steps between two default evaluations: greedy answers to held-out prompts, made by the nodes beside training, whatever
    trainer runs. 0 evaluates the first and the last version only. [[eval]] makes further ones."""
    eval_size: int = Field(default=64, ge=0)
    """Held-out prompts of the default evaluation. 0 turns it off."""
    checkpoint_every: int = Field(default=1, ge=1)
    """Steps between checkpoints. A step is committed only with a checkpoint that contains it, so a crash loses at most so many
    steps."""
    checkpoint_keep: int = Field(default=2, ge=1)
    """Checkpoints that are kept. With 2 there is still one when a crash comes between saving and committing the newest."""

    seed: Seed = 0
    """Seed of the trainer's random generators."""
    device: str = "auto"
    """Device of the trainer: auto, cpu, cuda, cuda:N or mps. "auto" takes a GPU if there is one."""
    threads: int = Field(default=0, ge=0)
    """CPU threads of torch. 0 leaves torch's own choice."""

    @field_validator("device")
    @classmethod
    def _known(cls, device: str) -> str:
        if device.partition(":")[0] not in ("auto", "cpu", "cuda", "mps"):
            raise ValueError(f"{device!r} is not auto, cpu, cuda or mps")
        return device


class TrainerConfig(TrainerSection):
    """What the trainer process is told: its own table, and what follows from the others (`LearnerConfig.trainer_config`)."""

    model: str
    """Folder or hub id of the base model."""
    checkpoint_dir: str
    """Folder of the checkpoints."""
    max_staleness: int = Field(default=2, ge=0)
    """Learner steps between the oldest token of a completion and the step that trains on it. The trainer checks it again."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of the rollouts. Log probabilities are those of the distribution at this temperature."""
    max_new_tokens: int = Field(default=16, ge=1)
    """Most tokens of a completion."""
    micro_batch_groups: int = Field(default=4, ge=1)
    """Groups of a step that are cut into forward passes together (`learner.trainer.packing.Packer`)."""
