"""Every setting of the trainer process. Must not know torch: configuration is read and checked without it.

`TrainerSection` is the table [trainer] of a configuration. `TrainerConfig` is what the trainer process reads from trainer.json:
the same, and the settings that follow from the other tables.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from learner.section import Section, Seed
from learner.trainer.objectives.registry import make_objective
from p2p.errors import UsageError

Beta = Annotated[float, Field(ge=0, lt=1)]

OptimizerName = Literal["adamw", "adamw_host", "adamw_8bit", "muon"]
"""What makes weights of gradients: see `TrainerSection.optimizer`."""

ScheduleName = Literal["constant", "linear", "cosine", "inverse_sqrt"]
"""What becomes of the learning rate: see `TrainerSection.lr_schedule`."""

Aggregate = Literal["token", "sequence", "group", "constant"]
"""How token losses are averaged: see `TrainerSection.aggregate`."""

Baseline = Literal["mean", "others"]
"""What is subtracted from a reward: see `TrainerSection.baseline`."""

Scale = Literal["group", "batch", "nothing"]
"""What advantages are divided by: see `TrainerSection.scale_advantages`."""

CHECKPOINT_FROM = 100_000_000
"""Parameters from which `activation_checkpointing = "auto"` is on: below, activations are small beside everything else."""


ModuleName = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^\w+(\.\w+)*$")]
"""The end of a module's path in a model: "q_proj", or "self_attn.q_proj"."""


class LoraSection(Section):
    """Train a low-rank adapter (LoRA, arXiv 2106.09685) on a frozen base model, in place of every weight. Nodes then get the base
    model once, and with every later version the adapter alone."""

    rank: int = Field(default=0, ge=0, le=4096)
    """Rank of the adapter's matrices: 16 is usual. 0 trains every weight. A run keeps what it began with."""
    alpha: float = Field(default=32.0, gt=0)
    """The adapter's output is multiplied by alpha / rank. With another alpha another `trainer.lr` is right."""
    targets: Literal["all-linear"] | Annotated[list[ModuleName], Field(min_length=1)] = "all-linear"
    """Which linear layers have an adapter: all but the output head ("all-linear"), or those whose module paths end so:
    ["q_proj", "v_proj"]."""
    rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead (rsLoRA, arXiv 2312.03732): for ranks of 64 and more."""


class TrainerSection(Section):
    """The optimizer, the objective, checkpoints, and the default evaluation."""

    steps: int = Field(default=200, ge=0)
    """Optimizer steps of the whole run."""
    served_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the weights that are published to nodes. The trainer's own weights are float32; with `trainer.lora` those of the
    adapter are, and the frozen base model has this type, or float32 where `compute_dtype` is or `devices` are several."""

    optimizer: OptimizerName = "adamw"
    """"adamw"; "adamw_host": the same with its state in the machine's memory, where the weights are updated, for a GPU with too
    little of its own (with bfloat16 computation the GPU keeps 6 bytes a parameter instead of 16); "adamw_8bit": moments in 8 bits
    (pip install '.[bitsandbytes]'); "muon": Muon (arXiv 2502.16982) for matrices between embeddings and head, AdamW for the rest,
    both at `lr`. A run keeps the one that it was begun with."""
    lr: float = Field(default=3e-4, gt=0)
    """Learning rate. The default suits the small models of the demo; 1e-6 is usual from 1B parameters on, and some ten times that
    with `trainer.lora`."""
    lr_ramp: int = Field(default=5, ge=0)
    """Steps over which the learning rate rises linearly to `lr`; afterwards it goes by `lr_schedule`."""
    lr_schedule: ScheduleName = "constant"
    """What becomes of the learning rate after the ramp: it stays "constant", falls to `lr` * `lr_min_ratio` at the last of
    `steps` ("linear", or along a "cosine"), or falls as 1 / sqrt(step) ("inverse_sqrt", as in arXiv 1706.03762), not below that.
    It follows from the step and these settings alone."""
    lr_min_ratio: float = Field(default=0.0, ge=0, le=1)
    """Smallest learning rate after the ramp, as a share of `lr`."""
    betas: list[Beta] = Field(default=[0.9, 0.95], min_length=2, max_length=2)
    """AdamW's decay rates of the first and second moment of the gradient."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of matrices. Norms, biases and embeddings have none."""
    grad_clip: float = Field(default=1.0, ge=0)
    """Largest global norm of the gradient; a longer one is scaled down to it. 0 turns clipping off."""

    objective: str = "grpo"
    """Objective by its name (docs/objectives.md): "grpo" (also Dr. GRPO's and DAPO's), "gspo", "cispo", "difference",
    "decoupled", "masked", "topr", "m2po" or "gepo". `preset` sets one with what belongs to it."""
    objective_options: dict[str, Any] = Field(default_factory=dict)
    """Settings of the objective, as docs/objectives.md lists them: clip_low, clip_high, cap."""
    aggregate: Aggregate = "token"
    """How token losses are averaged. "token": over all tokens of the step (DAPO, arXiv 2503.14476). "sequence": over each
    completion, then over completions (GRPO, arXiv 2402.03300). "group": over each group's tokens, then over groups (ScaleRL,
    arXiv 2510.13786). "constant": sums divided by `rollout.max_new_tokens`, then over completions (Dr. GRPO, arXiv
    2503.20783)."""
    baseline: Baseline = "mean"
    """What is subtracted from a completion's reward: the "mean" of its group's rewards, or of those of the "others" (leave one
    out, RLOO, arXiv 2402.14740)."""
    scale_advantages: Scale = "group"
    """What advantages are divided by: the standard deviation of their "group"'s rewards (GRPO), that of all advantages of the
    step ("batch", ScaleRL, arXiv 2510.13786), or "nothing" (Dr. GRPO)."""
    overlong: Literal["train", "mask"] = "train"
    """Completions without an end of their own, cut off at `rollout.max_new_tokens`: "train" on them as they were scored, or
    "mask" them out of the loss (overlong filtering, DAPO, arXiv 2503.14476, section 3.4). Their rewards count for their group's
    mean."""
    overlong_tokens: int = Field(default=0, ge=0)
    """Tokens before `rollout.max_new_tokens` in which a completion's reward falls, evenly by up to 1 (soft overlong punishment,
    DAPO, section 3.4). 0 turns it off."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the base model. Above 0 the base model is kept in memory as well; with `trainer.lora` it
    is there anyway."""
    kl_off_policy: Literal["ignore", "weigh"] = "ignore"
    """"weigh" multiplies each token's estimate of that divergence by pi / mu: then it is unbiased for stale completions too
    (DeepSeek-V3.2, arXiv 2512.02556, section 3.1). "ignore" is GRPO's."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy, in nats a token, that the loss rewards."""

    minibatches: int = Field(default=1, ge=1)
    """Optimizer updates of a step: its groups, in their order, are cut into so many minibatches, one update each (of fewer groups
    than that, one each). The step stays one version. Backwards then begin when the step's groups are all here; where the
    objective has a trust region around the policy at the start of the step ("decoupled", "masked"), each row is forwarded
    once more for that."""
    micro_batch_tokens: int = Field(default=4096, ge=1)
    """Tokens of one forward pass. It bounds the memory of activations."""
    share_prompts: bool = True
    """Run a prompt that several completions share once per forward pass."""
    compute_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """What the model computes in. "auto" is bfloat16 on a GPU and float32 on a CPU. Weights, gradients, the optimizer, log
    probabilities and losses are float32 either way."""
    activation_checkpointing: Literal["auto", "on", "off"] = "auto"
    """Keep only each layer's input for the backward pass and compute the rest again there: a fraction of the memory for a third
    more time. "auto" does so from 100 million parameters on, for as many layers as it takes to leave three quarters of the free
    memory free."""

    eval_every: int = Field(default=0, ge=0)
    """Steps between two default evaluations: greedy answers to held-out prompts, made by the nodes beside training, whatever
    trainer runs. 0 evaluates the first and the last version only. [[eval]] makes further ones."""
    eval_size: int = Field(default=64, ge=0)
    """Held-out prompts of the default evaluation. 0 turns it off."""
    checkpoint_every: int = Field(default=1, ge=1)
    """Steps that a crash takes back at most, besides the one under way: they are taken again. A step is committed only with a
    checkpoint that contains it. There is one every so many steps, or where it is written beside training every half as many,
    rounded up."""
    checkpoint_beside: bool = True
    """Write checkpoints beside the next steps: training waits only where the one before is not on the disk yet. Off: each step
    waits for its own, and with `checkpoint_every` = 1 no node ever holds weights that a crash can take back. With several
    `devices` each step waits, whatever is set here."""
    publish_beside: bool = True
    """Compare and encode a new version beside the next step's forwards. Off: the trainer waits, and the cores are the encoder's
    alone, so the nodes have the version a little sooner."""
    checkpoint_keep: int = Field(default=2, ge=1)
    """Checkpoints that are kept. With 2 there is still one when a crash comes between saving and committing the newest."""

    seed: Seed = 0
    """Seed of the trainer's random generators."""
    device: str = "auto"
    """Device of the trainer: auto, cpu, cuda, cuda:N or mps. "auto" takes a GPU if there is one."""
    devices: int = Field(default=1, ge=1)
    """Devices that train together, one process each (FSDP2 under torchrun): every one holds its part of weights, gradients and
    optimizer. With `device` "cpu" they are processes of this machine's CPU. Above 1 `optimizer` is "adamw", and `device` names no
    single one."""
    threads: int = Field(default=0, ge=0)
    """CPU threads of torch. 0 leaves torch's own choice."""

    lora: LoraSection = LoraSection()

    @property
    def checkpoint_interval(self) -> int:
        """Steps between two checkpoints. One that is written beside training is committed by the time that the next one begins:
        intervals of half the steps that a crash may take back seldom make a step wait for it."""
        beside = self.checkpoint_beside and self.devices == 1
        return (self.checkpoint_every + 1) // 2 if beside else self.checkpoint_every

    @field_validator("objective")
    @classmethod
    def _one_of_the_objectives(cls, name: str) -> str:
        _checked_objective(name, {})
        return name

    @field_validator("objective_options")
    @classmethod
    def _its_options(cls, options: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if "objective" in info.data:  # else it is wrong itself
            _checked_objective(info.data["objective"], options)
        return options

    @model_validator(mode="after")
    def _batch_scale(self) -> Self:
        if self.scale_advantages != "batch":
            return self
        try:
            own = make_objective(self.objective, self.objective_options).every_row
        except UsageError:  # told where objectives are checked
            own = False
        if self.kl_coef or self.entropy_coef or own:
            raise ValueError(
                'scale_advantages = "batch" divides the whole gradient: it does not go with kl_coef, entropy_coef or an '
                'objective that has a gradient without advantages ("difference" with a penalty); use "group"'
            )
        return self

    @model_validator(mode="after")
    def _several_devices(self) -> Self:
        if self.devices == 1:
            return self
        if self.optimizer != "adamw":
            raise ValueError(f'devices = {self.devices} does not go with optimizer = "{self.optimizer}" yet; use "adamw"')
        if self.device.startswith("mps") or ":" in self.device:
            raise ValueError(f'devices = {self.devices} does not go with device = "{self.device}"; use auto, cuda or cpu')
        return self

    @field_validator("device")
    @classmethod
    def _known(cls, device: str) -> str:
        if device.partition(":")[0] not in ("auto", "cpu", "cuda", "mps"):
            raise ValueError(f"{device!r} is not auto, cpu, cuda or mps")
        return device


def _checked_objective(name: str, options: dict[str, Any]) -> None:
    try:
        make_objective(name, options)
    except UsageError as error:
        raise ValueError(str(error)) from None


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
