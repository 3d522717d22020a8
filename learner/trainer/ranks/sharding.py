"""A model whose parameters lie in parts on several ranks (FSDP2), and its weights read so: no rank ever holds all of them.

Must not know losses, groups or the head. Each parameter is cut along its first dimension. A layer's are gathered for its forward
and its backward, the others (embedding, norm, output projection) for both together. Gradients are summed over ranks.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from learner.client.port import Weights
from learner.model_folder import first_line
from learner.trainer.adapter.adapted import adapt, adapted_layers, first_values, published_name
from learner.trainer.forward.forward import INSIDE, recomputable_layers
from learner.trainer.model import load_model, named_state, pick_device, served_dtype
from learner.trainer.optimizers.parts import PART_OF
from learner.trainer.ranks.torch_ranks import TorchRanks
from learner.trainer.ranks.weights import RankedWeights
from learner.trainer.settings import TrainerConfig
from p2p.errors import UsageError

log = logging.getLogger("shoal.trainer")


class RowRange(NamedTuple):
    """Which part of a tensor this rank holds: rows [start, stop) of the first dimension."""

    start: int
    stop: int


def part_of(rows: int, rank: int, count: int) -> RowRange:
    """As FSDP cuts a first dimension: `torch.chunk`'s equal parts, the last ones smaller or empty."""
    size = -(-rows // count)
    return RowRange(min(rank * size, rows), min((rank + 1) * size, rows))


class ShardedModel:
    """Implements `learner.trainer.trained.Trained` on each rank.

    `parameters` are plain tensors, this rank's parts: an optimizer that works element by element needs to know of no ranks. Their
    gradients are there after each backward.
    """

    def __init__(self, module: nn.Module, ranks: TorchRanks, served_dtype: str = "bfloat16", peft: Any = None) -> None:
        """`module` is sharded (`shard`); `peft`: peft's model around it, where only its adapter is trained."""
        self.module, self.ranks, self._peft = module, ranks, peft
        self._weights: RankedWeights | None = None
        self._served_dtype = served_dtype
        # Taken here, once: from its first forward on, the model may have whole parameters in place of their parts.
        state = {published_name(name): tensor for name, tensor in named_state(module)}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        """of everything that is published, over all ranks together"""
        self.split = {name for name, tensor in state.items() if isinstance(tensor, DTensor)}
        """names of what is cut; every rank has all of the others"""
        self._state: dict[str, Tensor] = {}
        self._trained: dict[str, nn.Parameter] = {}
        for name, tensor in state.items():
            self._state[name] = _local(tensor)
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                self._state[name] = self._trained[name] = own = nn.Parameter(_local(tensor))
                setattr(own, PART_OF, tensor)
                tensor.register_post_accumulate_grad_hook(_hand_over(own))

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._trained.items()

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's parts; what is not cut whole. Of a model with an adapter, that alone."""
        yield from (self._trained if self._peft is not None else self._state).items()

    @property
    def base(self) -> Callable[[], AbstractContextManager[None]] | None:
        return None if self._peft is None else self._without_adapter

    @contextmanager
    def _without_adapter(self) -> Iterator[None]:
        self._peft.base_model.disable_adapter_layers()
        try:
            with torch.no_grad():
                yield
        finally:
            self._peft.base_model.enable_adapter_layers()

    def changed(self) -> None:
        """Call it when the parts have changed otherwise than by a step: what was gathered of them before is of no use."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def weights(self) -> Weights:
        """A source that asks the other ranks for what they hold."""
        if self._weights is None:
            frozen = self._state.keys() - self._trained.keys() if self._peft is not None else frozenset[str]()
            self._weights = RankedWeights(
                self._state, self.shapes, split=self.split, frozen=frozenset(frozen), ranks=self.ranks, dtype=self._served_dtype
            )
        return self._weights


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _hand_over(own: nn.Parameter) -> Any:
    def take(parameter: Tensor) -> None:
        gradient = parameter.grad
        assert isinstance(gradient, DTensor)
        parameter.grad = None
        if own.grad is None:
            own.grad = gradient.to_local()
        else:
            own.grad += gradient.to_local()

    return take


# --- sharding and loading ---------------------------------------------------------------------------------------------


def open_sharded(config: TrainerConfig, ranks: TorchRanks) -> ShardedModel:
    """What `learner.trainer.opening.open_trained` opens, each rank with its part."""
    device, served = pick_device(config.device), config.served_dtype
    if config.optimizer != "adamw":
        raise UsageError(f'trainer.optimizer = "{config.optimizer}" does not go with trainer.devices above 1 yet; use "adamw"')
    if not config.lora.rank:
        return ShardedModel(load_sharded(config.model, ranks, device), ranks, served)
    model, read = _on_host(config.model)
    peft = adapt(model, config.lora)
    model.eval()
    first = dict(first_values(adapted_layers(model), config.seed))
    shard(model, ranks, device)
    sharded = ShardedModel(model, ranks, served, peft)
    _fill(model, {**(read or {}), **first}, ranks, served_dtype(served))
    return sharded


def load_sharded(source: str | Path, ranks: TorchRanks, device: torch.device, *, trained: bool = True) -> nn.Module:
    """The model of `learner.trainer.model.load_model`, each rank with its part. UsageError as there."""
    model, read = _on_host(source)
    model.requires_grad_(trained).eval()
    shard(model, ranks, device, trained=trained)
    _fill(model, read or {}, ranks, None)
    return model


class _OnHost(NamedTuple):
    model: nn.Module
    files: dict[str, Path] | None
    """which file has each tensor, where the parameters have no values yet"""


def _on_host(source: str | Path) -> _OnHost:
    read = _files(source)
    model = _empty_model(source) if read is not None else None
    if model is not None and read is not None and _fits(model, read):
        return _OnHost(model, read)
    log.warning(
        "%s: its files do not name its parameters as the model does, so each rank reads the whole model first, in the host's "
        "memory", source,
    )  # fmt: skip
    return _OnHost(load_model(source, "cpu").model, None)


def shard(model: nn.Module, ranks: TorchRanks, device: torch.device, *, trained: bool = True) -> None:
    """Cut a model that lies on the host, or whose parameters have no values yet (their parts have none then either). Before its
    first forward."""
    for layer in recomputable_layers(model):
        fully_shard(layer, mesh=ranks.mesh, reshard_after_forward=True)
    setattr(model, INSIDE, MethodType(lambda self, run, *args: run(*args), model))
    # A backward follows at once, or never.
    fully_shard(model, mesh=ranks.mesh, reshard_after_forward=not trained)
    register_fsdp_forward_method(model, INSIDE)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Summed as they are: gloo has no other reduction, and a step divides by its weight itself.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


@contextmanager
def _without_values() -> Iterator[None]:
    """Parameters of modules made inside have shapes and no values; buffers are as ever, since no file has them."""
    register = nn.Module.register_parameter

    def without(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, None if param is None else nn.Parameter(param.to("meta"), requires_grad=param.requires_grad))

    nn.Module.register_parameter = without  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _empty_model(source: str | Path) -> nn.Module | None:
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with _without_values():
            config = AutoConfig.from_pretrained(str(source))
            model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"cannot load model {source}: {first_line(error)}") from error
    model.tie_weights()  # type: ignore[operator]
    made: dict[int, nn.Parameter] = {}
    """of a tied parameter the one tensor; memory that is never touched takes none"""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(torch.empty(parameter.shape), requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
    return model


def _files(source: str | Path) -> dict[str, Path] | None:
    """Tensor name -> the file that has it; None where there are no safetensors files in a local folder."""
    folder = Path(source).expanduser()
    if not folder.is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

        try:
            folder = Path(snapshot_download(str(source), allow_patterns=["*.safetensors", "*.json", "*.model", "*.txt"]))
        except (OSError, ValueError, HfHubHTTPError, LocalEntryNotFoundError) as error:
            raise UsageError(f"cannot load model {source}: {first_line(error)}") from error
    index = folder / "model.safetensors.index.json"
    try:
        if index.is_file():
            return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        single = folder / "model.safetensors"
        if single.is_file():
            with safe_open(single, "pt") as file:
                return dict.fromkeys(file.keys(), single)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise UsageError(f"cannot load model {source}: {first_line(error)}") from error
    return None


def _fits(model: nn.Module, files: dict[str, Path]) -> bool:
    return all(name in files for name, _ in named_state(model))


@torch.no_grad()
def _fill(model: nn.Module, found: Mapping[str, Path | Tensor], ranks: TorchRanks, served: torch.dtype | None) -> None:
    """This rank's parts of what was found by its published name: a tensor, or the file that has it. What was not found stays.
    `served`: a frozen model is rounded to what nodes have."""
    for name, tensor in named_state(model):
        name = published_name(name)
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        rows = part_of(tensor.shape[0], ranks.rank, ranks.count) if isinstance(tensor, DTensor) else None
        value = found.get(name)
        if isinstance(value, Tensor):
            own.copy_(value if rows is None else value[rows.start : rows.stop])
        elif value is not None:
            with safe_open(value, "pt") as file:
                there = file.get_slice(name)
                if tuple(there.get_shape()) != tuple(tensor.shape):
                    raise UsageError(f"{value}: {name} is {there.get_shape()}, the model's is {list(tensor.shape)}")
                if rows is None:
                    own.copy_(file.get_tensor(name))
                elif rows.stop > rows.start:
                    own.copy_(there[rows.start : rows.stop])
        if served is not None and own.is_floating_point() and not isinstance(value, Tensor):
            own.copy_(own.to(served))
