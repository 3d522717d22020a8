"""A model whose weights are frozen and whose linear layers have a LoRA adapter: what is trained, kept and published of it.

Layers are peft's. Must not know losses or the network.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from learner.trainer.adapter.adapter_weights import AdapterWeights
from learner.trainer.adapter.peft_form import check_peft, peft_config
from learner.trainer.model import named_state, served_dtype
from learner.trainer.settings import LoraSection
from p2p.errors import UsageError

PREFIX = "adapter."
"""What the names of the adapter's tensors begin with, before the path of the layer that they belong to."""

ONE = "default"
"""peft's name of the only adapter."""


class AdaptedLayer(NamedTuple):
    """A linear layer with its adapter."""

    path: str
    """of the layer in the base model"""
    module: Any
    """peft's"""

    @property
    def a(self) -> nn.Parameter:
        """[rank, in]"""
        return self.module.lora_A[ONE].weight

    @property
    def b(self) -> nn.Parameter:
        """[out, rank]"""
        return self.module.lora_B[ONE].weight

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """By their published names."""
        yield f"{PREFIX}{self.path}.lora_A", self.a
        yield f"{PREFIX}{self.path}.lora_B", self.b


class AdaptedModel:
    """The `learner.trainer.trained.Trained` of a LoRA run.

    Published are the base model's tensors under their own names, and `adapter.PATH.lora_A` [rank, in] and `adapter.PATH.lora_B`
    [out, rank] of each target. Where the base is kept in more bits than it is served in, it is rounded to those first: what the
    adapter is trained on is what nodes have. Masters of the adapter are float32.
    """

    def __init__(self, module: nn.Module, lora: LoraSection, *, seed: int = 0, served: str = "bfloat16") -> None:
        """`seed` is that of the A matrices, the same bits on every device; B is 0. UsageError where `lora.targets` names no
        linear layer, or the output head."""
        _round(module, served)
        self.peft, self.module = adapt(module, lora), module
        self.layers = adapted_layers(module)
        first = dict(first_values(self.layers, seed))
        with torch.no_grad():
            for name, parameter in self.parameters():
                parameter.copy_(first[name])
        self._served = served
        self._weights: AdapterWeights | None = None

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for layer in self.layers:
            yield from layer.parameters()

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.parameters()

    def frozen_state(self) -> Iterator[tuple[str, Tensor]]:
        """The base model's tensors, by their own names."""
        for name, tensor in named_state(self.module):
            if not published_name(name).startswith(PREFIX):
                yield published_name(name), tensor

    def weights(self) -> AdapterWeights:
        if self._weights is None:
            self._weights = AdapterWeights(dict(self.frozen_state()), dict(self.parameters()), self._served)
        return self._weights

    @contextmanager
    def base(self) -> Iterator[None]:
        """Within it `module` is the base model, without a gradient. May be entered between a forward and its backward."""
        self.peft.base_model.disable_adapter_layers()
        try:
            with torch.no_grad():
                yield
        finally:
            self.peft.base_model.enable_adapter_layers()


    @torch.no_grad()
    def merged(self) -> nn.Module:
        """The base model with the adapter in its weights; nothing is trained after that."""
        return self.peft.merge_and_unload()

    def save_adapter(self, folder: Path, model: str) -> None:
        """The adapter alone, in the served dtype, as `peft.PeftModel.from_pretrained` reads it; `model` is the base's name there.
        Nothing is trained after that."""
        for _, parameter in self.parameters():
            parameter.data = parameter.data.to(served_dtype(self._served))
        self.peft.peft_config[ONE].base_model_name_or_path = model
        self.peft.save_pretrained(str(folder), save_embedding_layers=False)


def adapt(module: nn.Module, lora: LoraSection) -> Any:
    """Freeze `module` and replace its target layers in place; peft's model around it. Its values do not matter yet. UsageError as
    `AdaptedModel`."""
    check_peft(lora)
    from peft import LoraConfig, get_peft_model

    module.requires_grad_(False)
    known = {key: value for key, value in peft_config(lora).items() if key != "peft_type"}
    try:
        wrapped = get_peft_model(module, LoraConfig(**known | {"inference_mode": False}))  # type: ignore[arg-type]
    except ValueError as error:
        raise UsageError(f"trainer.lora.targets: {str(error).partition(chr(10))[0]}") from None
    head = module.get_output_embeddings()  # type: ignore[operator]
    for layer in adapted_layers(module):
        if layer.module is head or not isinstance(layer.module.base_layer, nn.Linear):
            kind = "the output head" if layer.module is head else type(layer.module.base_layer).__name__
            raise UsageError(f"trainer.lora.targets: {layer.path} is {kind}; only linear layers below the head have an adapter")
    return wrapped


def adapted_layers(module: nn.Module) -> list[AdaptedLayer]:
    """In the model's order."""
    return [AdaptedLayer(path, layer) for path, layer in module.named_modules() if hasattr(layer, "lora_A")]


def published_name(name: str) -> str:
    """What a parameter of an adapted module is called where it is published."""
    for matrix in ("lora_A", "lora_B"):
        path, found, _ = name.partition(f".{matrix}.{ONE}.")
        if found:
            return f"{PREFIX}{path}.{matrix}"
    return name.replace(".base_layer.", ".")


def first_values(layers: Iterable[AdaptedLayer], seed: int) -> Iterator[tuple[str, Tensor]]:
    """The adapter as LoRA's paper begins it, by published names: A random, B zero. On the host, in float32."""
    generator = torch.Generator().manual_seed(seed)
    for layer in layers:
        for name, parameter in layer.parameters():
            value = torch.zeros(parameter.shape, dtype=torch.float32)
            if name.endswith("lora_A"):
                nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
            yield name, value


@torch.no_grad()
def _round(module: nn.Module, served: str) -> None:
    """Floating tensors to the nearest values of the served dtype, in the dtype they have."""
    target = served_dtype(served)
    for _, tensor in named_state(module):
        if tensor.is_floating_point() and tensor.dtype != target:
            tensor.data.copy_(tensor.to(target))
