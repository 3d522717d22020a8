"""Random models of many sizes in Qwen3's shape, as folders for vLLM and as state files for our engines. Must not know engines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from netem.bench.real_head import random_prompt
from node.engine.port import StateFile
from p2p.layout import ITEMSIZE, Layout
from p2p.version import Version

CONTEXT = 1024
"""Most tokens of a sequence, prompt included: what a bench asks for fits."""


@dataclass(frozen=True, slots=True)
class Shape:
    """`heads` query heads and half as many for keys and values, of `width` each; embeddings tied."""

    hidden: int
    layers: int
    heads: int
    width: int
    inner: int
    vocabulary: int

    @property
    def config(self) -> dict[str, Any]:
        """Arguments of transformers' `Qwen3Config`."""
        return {
            "vocab_size": self.vocabulary, "hidden_size": self.hidden, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.heads // 2, "head_dim": self.width,
            "intermediate_size": self.inner, "tie_word_embeddings": True, "max_position_embeddings": CONTEXT,
            "architectures": ["Qwen3ForCausalLM"],
        }  # fmt: skip


SHAPES = {
    "0.45m": Shape(128, 3, 4, width=32, inner=256, vocabulary=48),
    "2m": Shape(256, 3, 8, width=32, inner=512, vocabulary=256),
    "10m": Shape(384, 6, 6, width=64, inner=1024, vocabulary=1024),
    "57m": Shape(512, 12, 8, width=64, inner=1536, vocabulary=32000),
    "270m": Shape(1024, 16, 16, width=64, inner=3072, vocabulary=64000),
    "0.6b": Shape(1024, 28, 16, width=128, inner=3072, vocabulary=151936),
    "1.2b": Shape(1792, 28, 14, width=128, inner=5376, vocabulary=64000),
}
"""Named by their parameters, roughly. 0.45m is the demo's; 0.6b is Qwen3-0.6B's own shape."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model on disk: `folder` has the configuration only, `whole` the weights beside it (or is None)."""

    name: str
    folder: Path
    whole: Path | None
    layout: Layout
    states: tuple[Path, ...]
    """flat files of the same layout, no value of one equal to that of the other, as far as it is not zero"""
    vocabulary: int
    parameters: int
    kv_bytes: int
    """what keys and values of the asked number of sequences of full length take"""

    def state(self, step: int, changed: tuple[str, ...] | None = None) -> StateFile:
        """Version `step`: the states in turn."""
        return StateFile(self.states[step % len(self.states)], self.layout, Version(0, step), changed)

    def some(self, share: float) -> tuple[str, ...]:
        """Names of tensors that together are about this share of the model: every so-many-th one, large and small."""
        names = [spec.name for spec in self.layout.tensors]
        return tuple(names) if share >= 1 else tuple(names[:: max(1, round(1 / share))])

    def touched(self, names: tuple[str, ...]) -> int:
        """Bytes of these tensors in a state file."""
        return sum(self.layout.by_name[name].nbytes for name in names)


def make_model(name: str, folder: Path, running: int, *, whole: bool, dtype: str = "float32") -> Model:
    """Random weights in one of SHAPES, as transformers makes them, and a second state whose every value differs."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from node.engine.flat_model import write_state
    from node.engine.vllm.model import cpu_kv_bytes

    s = SHAPES[name]
    config = Qwen3Config(**s.config)
    config.save_pretrained(folder / "folder")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    layout = write_state(model, folder / "state-0.bin", dtype)
    if whole:
        model.to(getattr(torch, dtype)).save_pretrained(folder / "whole")
    parameters = sum(p.numel() for p in model.parameters())
    del model
    _another(folder / "state-0.bin", folder / "state-1.bin", ITEMSIZE[dtype])
    states = (folder / "state-0.bin", folder / "state-1.bin")
    kv_bytes = cpu_kv_bytes(config, dtype, CONTEXT, running)
    return Model(
        name, folder / "folder", folder / "whole" if whole else None, layout=layout, states=states, vocabulary=s.vocabulary,
        parameters=parameters, kv_bytes=kv_bytes,
    )  # fmt: skip


def _another(path: Path, other: Path, itemsize: int) -> None:
    """The same values, each with its last bit turned: a step at a small learning rate."""
    kind = {2: np.uint16, 4: np.uint32}[itemsize]
    with open(path, "rb") as given, open(other, "wb") as out:
        while block := given.read(1 << 24):
            out.write((np.frombuffer(block, kind) ^ kind(1)).tobytes())


def prompts(seed: int, count: int, length: int, vocabulary: int) -> list[tuple[int, ...]]:
    """`count` prompts of random tokens, the same for a seed everywhere."""
    return [tuple(random_prompt(seed + i, length, vocabulary)) for i in range(count)]
