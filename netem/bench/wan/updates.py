"""The updates that `shoal bench wan` publishes: an adapter's, or a whole model's, drawn as AdamW would make them.

Nothing is trained: a value moves by the learning rate times a slowly turning direction of size one, which is what AdamW does once
its averages have settled. Masters are fp32, what is published bf16. Must not know networks or nodes.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from p2p.layout import ADAPTER

TURN = 0.9
"""How much of a direction is kept from step to step: AdamW's first average with beta 0.9."""

Tensors = dict[str, tuple[str, np.ndarray]]


def smollm2_135m(folder: Path) -> None:
    """A model folder in the shapes of SmolLM2-135M, its weights drawn at random, and a tokenizer of a token per character."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from netem.demo.tiny_model import char_tokenizer

    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True, max_position_embeddings=8192, rope_theta=100000.0, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    char_tokenizer().save_pretrained(folder)


class Updates:
    """The states of a run, one after the other: `rank` 0 moves every value, another one an adapter of that rank."""

    def __init__(self, folder: Path, rank: int, lr: float) -> None:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        self._lr, self._draw = lr, torch.Generator().manual_seed(1)
        base = {name: p.detach() for name, p in model.named_parameters(remove_duplicate=True)}
        self._frozen: dict[str, torch.Tensor] = base if rank else {}
        self._masters = _adapter(model, rank, self._draw) if rank else {name: p.float() for name, p in base.items()}
        self._directions = {name: self._random(p) for name, p in self._masters.items()}

    def state(self) -> Tensors:
        """As it is now, for `LearnerClient.publish`."""
        return {name: ("bfloat16", _bits(t)) for name, t in {**self._frozen, **self._masters}.items()}

    def step(self) -> None:
        """One optimizer step."""
        for name, master in self._masters.items():
            direction = self._directions[name]
            direction.mul_(TURN).add_(self._random(master), alpha=math.sqrt(1 - TURN**2))
            master.add_(direction, alpha=self._lr)

    def _random(self, like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=self._draw)


def _bits(tensor: torch.Tensor) -> np.ndarray:
    bits: np.ndarray = tensor.to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint16)
    return bits


def _adapter(model: Any, rank: int, draw: torch.Generator) -> dict[str, torch.Tensor]:
    """A as LoRA's paper begins it, B zero, of every linear layer but the head."""
    found: dict[str, torch.Tensor] = {}
    for path, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and layer is not model.get_output_embeddings():
            bound = 1 / math.sqrt(layer.in_features)
            found[f"{ADAPTER}{path}.lora_A"] = (torch.rand(rank, layer.in_features, generator=draw) * 2 - 1) * bound
            found[f"{ADAPTER}{path}.lora_B"] = torch.zeros(layer.out_features, rank)
    return found
