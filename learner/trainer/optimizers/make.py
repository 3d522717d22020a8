"""The optimizer that the settings name. Must not know losses or the network."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from learner.trainer.optimizers.eight_bit import make_adamw_8bit
from learner.trainer.optimizers.host import HostAdamW
from learner.trainer.optimizers.muon import MUON, MuonWithAdamW
from learner.trainer.optimizers.parts import parts_of
from learner.trainer.settings import TrainerConfig


def make_optimizer(
    parameters: Iterable[tuple[str, nn.Parameter]], config: TrainerConfig, model: nn.Module, *, bfloat16: bool = False
) -> torch.optim.Optimizer:
    """An optimizer of the named parameters of `model` that are trained. `bfloat16`: the model computes in it.

    Vectors (norms, biases) and embeddings have no weight decay (`ParameterParts` says why). Each of its groups says by `kind`
    what its state is, and has its parameters' names: `learner.trainer.optimizers.restore` reads both.
    UsageError where a package is not installed.
    """
    parts = parts_of(parameters, model)
    decay, name = config.weight_decay, config.optimizer
    matrices = [*parts.hidden, *parts.stacks, *parts.head]
    plain: dict[str, Any] = {"lr": config.lr, "betas": tuple(config.betas)}
    if name == "muon":
        groups = _groups(MUON, parts.hidden, decay) + _groups("adamw", [*parts.stacks, *parts.head], decay)
        return MuonWithAdamW(groups + _groups("adamw", [*parts.embeddings, *parts.vectors], 0.0), **plain)
    without = [*parts.embeddings, *parts.vectors]
    if name == "adamw_8bit":
        return make_adamw_8bit(_groups(name, matrices, decay) + _groups(name, without, 0.0), **plain)
    apart = bfloat16 or any(p.device.type != "cpu" for _, p in (*matrices, *without))
    if name == "adamw_host" and apart:
        groups = _groups(name, matrices, decay) + _groups(name, without, 0.0)
        return HostAdamW(groups, model=model, bfloat16=bfloat16, **plain)
    # Where the model is in the machine's memory anyway, and computes in float32, its state on the host is plain AdamW's.
    return torch.optim.AdamW(_groups("adamw", matrices, decay) + _groups("adamw", without, 0.0), fused=True, **plain)


def _groups(kind: str, named: list[Any], weight_decay: float) -> list[dict[str, Any]]:
    """One group, or none where it would be empty."""
    return [{"params": list(named), "kind": kind, "weight_decay": weight_decay}] if named else []
