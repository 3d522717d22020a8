"""A small model with two sets of weights, cores that serve it, and completions put together from their events."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen3Config

from node.engine.flat_model import state_tensors, write_state, write_tensors
from node.engine.port import EngineCore, StateFile
from p2p.protocol.rollout import Completion, Generate, TokenEvent
from p2p.version import Version

V0, V1, V2 = Version(0, 0), Version(0, 1), Version(1, 2)
VOCAB, CONTEXT = 48, 128

torch.set_num_threads(1)


@dataclass
class World:
    """A model folder, states of it at V0 and V1, and how to make a core that serves one."""

    folder: Path
    states: dict[Version, StateFile]
    models: dict[Version, torch.nn.Module]
    make: Callable[..., EngineCore]

    def core(self, version: Version = V0, **settings: object) -> EngineCore:
        core = self.make(**settings)
        core.load(self.folder, self.states[version])
        return core


def qwen3_config(context: int = CONTEXT) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        intermediate_size=64, tie_word_embeddings=True, max_position_embeddings=context,
    )  # fmt: skip


def build_world(
    folder: Path, make: Callable[..., EngineCore], config: PreTrainedConfig | None = None, scale: float = 6
) -> World:
    """Weights scaled up, so that tokens depend sharply on what came before them."""
    config = config or qwen3_config()
    config.save_pretrained(folder)
    states, models = {}, {}
    for seed, version in enumerate((V0, V1)):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for p in model.parameters():
                if p.ndim > 1:
                    p.mul_(scale)
        path = folder / f"state{version}.bin"
        states[version] = StateFile(path, write_state(model, path), version)
        models[version] = model

    return World(folder, states, models, make)


RANK, ALPHA = 3, 7.0
"""Of the adapters here: a scale that is no power of two, so that rounding in a wrong place shows."""


def build_adapted_world(
    folder: Path, make: Callable[..., EngineCore], config: PreTrainedConfig | None = None, scale: float = 6
) -> World:
    """A frozen base, and two adapters of all its linear layers but the head, in float32. `models`: with each of them merged."""
    config = config or qwen3_config()
    config.save_pretrained(folder)
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": "all-linear", "use_rslora": False})
    )
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in base.parameters():
            if p.ndim > 1:
                p.mul_(scale)
    layers = [n for n, m in base.named_modules() if isinstance(m, torch.nn.Linear) and m is not base.get_output_embeddings()]
    states, models = {}, {}
    for seed, version in enumerate((V0, V1)):
        draw = torch.Generator().manual_seed(seed)
        tensors, merged = state_tensors(base), copy.deepcopy(base)
        for name in layers:
            layer = merged.get_submodule(name)
            a = torch.randn(RANK, layer.in_features, generator=draw) * 0.1
            b = torch.randn(layer.out_features, RANK, generator=draw) * 0.1
            tensors |= {f"adapter.{name}.lora_A": a, f"adapter.{name}.lora_B": b}
            with torch.no_grad():
                layer.weight += (ALPHA / RANK * (b.double() @ a.double())).float()
        path = folder / f"state{version}.bin"
        states[version] = StateFile(path, write_tensors(tensors, path), version)
        models[version] = merged
    return World(folder, states, models, make)


def ask(name: str = "a", **changes: object) -> Generate:
    base = Generate(name, prompt_ids=(5, 6, 7), max_new_tokens=12, stop_ids=(), seed=3, min_version=V0)
    return replace(base, **changes)  # type: ignore[arg-type]


class Gathered:
    """Completions put together from events; Completion itself refuses gaps, overlaps and versions that go back."""

    def __init__(self, core: EngineCore, *requests: Generate) -> None:
        self.core = core
        self.all: dict[str, Completion] = {}
        for request in requests:
            self.add(request)

    def add(self, request: Generate) -> None:
        self.core.add(request)
        prefix = list(request.prefix_ids)
        self.all[request.request_id] = Completion(ids=prefix, logprobs=[0.0] * len(prefix))

    def take(self, events: list[TokenEvent]) -> None:
        for event in events:
            self.all[event.request_id].add(event)

    def steps(self, n: int) -> Gathered:
        for _ in range(n):
            self.take(self.core.step())
        return self

    def run(self) -> Gathered:
        for _ in range(2000):
            if not self.core.has_work():
                return self
            self.take(self.core.step())
        raise AssertionError("the engine never ends")

    def __getitem__(self, name: str) -> Completion:
        return self.all[name]


def crowd(n: int) -> list[Generate]:
    """n requests that differ in everything: prompts, lengths, budgets, temperatures, seeds."""
    rng = np.random.default_rng(7)
    return [
        ask(
            f"crowd{i}",
            prompt_ids=tuple(int(t) for t in rng.integers(0, VOCAB, rng.integers(1, 30))),
            max_new_tokens=int(rng.integers(1, 40)),
            temperature=float(rng.choice([0.0, 0.7, 1.0])),
            top_p=float(rng.choice([0.8, 1.0])),
            seed=int(rng.integers(0, 1000)),
        )
        for i in range(n)
    ]


def full_log_probs(model: torch.nn.Module, prompt: tuple[int, ...], ids: list[int], temperature: float) -> np.ndarray:
    tokens = torch.tensor([[*prompt, *ids]])
    with torch.no_grad():
        logits = model(tokens).logits[0, len(prompt) - 1 : -1].double() / (temperature or 1.0)
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids)[:, None])[:, 0].numpy()


