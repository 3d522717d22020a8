"""What a run trains, opened as its settings say: the whole model, or an adapter on a frozen one. Must not know the network."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from learner.trainer.adapter.adapted import AdaptedModel
from learner.trainer.model import load_model, pick_device
from learner.trainer.settings import TrainerConfig
from learner.trainer.trained import Trained, WholeModel


class Opened(NamedTuple):
    """A model as it is trained, with its tokenizer."""

    trained: Trained
    tokenizer: Any


def open_trained(config: TrainerConfig) -> Opened:
    """UsageError as `load_model` and `AdaptedModel`."""
    if not config.lora.rank:
        model, tokenizer = load_model(config.model, config.device)
        return Opened(WholeModel(model, config.served_dtype), tokenizer)
    model, tokenizer = load_model(config.model, config.device, frozen_dtype(config))
    adapted = AdaptedModel(model, config.lora, seed=config.seed, served=config.served_dtype)
    return Opened(adapted, tokenizer)


def frozen_dtype(config: TrainerConfig) -> torch.dtype:
    """What a frozen base model is kept in: bfloat16 where that is what is computed in and published, float32 elsewhere."""
    on_gpu = pick_device(config.device).type == "cuda"
    computes = config.compute_dtype == "bfloat16" or (config.compute_dtype == "auto" and on_gpu)
    return torch.bfloat16 if computes and config.served_dtype == "bfloat16" else torch.float32
