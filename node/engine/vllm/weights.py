"""The weights of a model that vLLM runs: filled from a state file, replaced in place, compared with it. In each worker's process.

vLLM fuses and shards what a checkpoint names (q, k and v are one parameter, a rank holds a part). Where each value goes is
known to the model's own `load_weights` alone. So the first fill goes through it and is watched: each copy it makes, from which
bytes of which tensor to which part of which parameter, becomes a `Route`. An update then follows the routes of the changed
tensors, without any code of the model, and following them back says what the engine really holds. Must not know requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from node.engine.adapter import AdapterPlan
from node.engine.flat_model import MappedState
from node.engine.port import StateFile
from node.engine.vllm import adapters as vllm_adapters
from node.engine.vllm import compat as vllm_compat
from node.engine.vllm import draws as vllm_draws
from node.engine.vllm import packing as vllm_packing
from node.engine.vllm.packing import bits
from p2p.errors import Refusal
from p2p.layout import Layout
from p2p.version import Version

if vllm_compat.on_cpu():  # vLLM imports this module before it builds a model
    vllm_packing.keep_linears_whole()

PAGE = 4096
"""Bytes: a stage reads one byte in so many, so that every page which a commit will read is in memory."""


@dataclass(frozen=True, slots=True)
class Route:
    """One copy: part of a checkpoint tensor, as strides over its elements, to part of a parameter."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """the first element, counted within the tensor"""
    target: torch.Tensor
    """a view of the parameter's own storage"""

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.offset)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the parameter has the very bits that a copy would put there."""
        want = self.part(tensor).to(device=self.target.device, dtype=self.target.dtype)
        return torch.equal(bits(want), bits(self.target))


class Copies:
    """The copies that put some tensors of a state in place, prepared when the state is staged."""

    def __init__(self, routes: dict[str, list[Route]], source: MappedState, names: Iterable[str]) -> None:
        self.names = tuple(names)
        self._targets: list[torch.Tensor] = []
        self._parts: list[torch.Tensor] = []
        for name in self.names:
            tensor = source.tensor(name)
            for route in routes[name]:
                self._targets.append(route.target)
                self._parts.append(route.part(tensor))
        storages = {target.untyped_storage().data_ptr() for target in self._targets}
        self._packed = vllm_packing.AheadPacking(storages, self._write) if vllm_compat.on_cpu() else None

    def run(self) -> None:
        copy_all(self._targets, self._parts)
        if self._packed is not None:
            self._packed.use()

    def _write(self, weight: torch.Tensor, values: torch.Tensor) -> None:
        """What `run` puts into `weight`, into `values` instead, which has its form."""
        address = weight.untyped_storage().data_ptr()
        for target, part in zip(self._targets, self._parts, strict=True):
            if target.untyped_storage().data_ptr() == address:
                offset = target.storage_offset() - weight.storage_offset()
                values.as_strided(target.shape, target.stride(), offset).copy_(part)


def copy_all(targets: list[torch.Tensor], parts: list[torch.Tensor]) -> None:
    """Each part into its target: one call, since a small model's copies are shorter than Python's way to each."""
    if targets:
        torch._foreach_copy_(targets, parts)


class _Watch(TorchDispatchMode):
    """Sees each copy while a model loads; keeps those whose source lies in the mapped state."""

    def __init__(self, source: MappedState) -> None:
        super().__init__()
        self.routes: dict[str, list[Route]] = {spec.name: [] for spec in source.layout.tensors}
        self._starts = {source.tensor(name).untyped_storage().data_ptr(): name for name in self.routes}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            target, given = args[0], args[1]
            name = self._starts.get(given.untyped_storage().data_ptr())
            if name is not None:
                given = given.expand(target.shape)
                at = (tuple(given.shape), tuple(given.stride()), given.storage_offset())
                self.routes[name].append(Route(*at, target.detach()))
        return func(*args, **(kwargs or {}))


@register_model_loader(vllm_compat.LOAD_FORMAT)
class StateLoader(BaseModelLoader):
    """Fills a new model from the state file that the engine's arguments name; leaves the routes on the model."""

    def download_model(self, model_config: Any) -> None:
        """Called by vLLM before `load_weights`. The weights are a local file, so there is nothing to download."""

    @torch.no_grad()
    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Called by vLLM to fill a model that it has just built. Refusal when the state and the model have different tensors."""
        extra = self.load_config.model_loader_extra_config
        layout = Layout.from_wire(extra["table"])
        source = MappedState(StateFile(Path(extra["path"]), layout, Version(0, 0)))
        with _Watch(source) as watch:
            loaded = load_by_name(model, source)
        if loaded is not None:
            missing = sorted(dict(model.named_parameters()).keys() - set(loaded))
            if missing:
                raise Refusal(f"state misses what fills {len(missing)} tensors of the model: {', '.join(missing[:3])}")
        tp = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        for spec in layout.tensors:
            if spec.name in layout.adapter:  # `adapters` has these
                continue
            went = sum(route.target.numel() for route in watch.routes[spec.name])
            count = spec.nbytes // spec.itemsize
            if went < count and (not went or went * tp < count):
                raise Refusal(
                    f"state has unexpected tensors, or some that vLLM does not copy as they are: {spec.name!r} "
                    f"({went} of {count} values arrive)"
                )
        model.shoal_routes = watch.routes  # type: ignore[assignment]


def load_by_name(model: Any, source: MappedState) -> set[str] | None:
    """Load all tensors through the model's own `load_weights`; returns the names of filled parameters where the model says them.
    Refusal when a tensor does not fit."""
    adapter = source.layout.adapter
    named = [(spec.name, source.tensor(spec.name)) for spec in source.layout.tensors if spec.name not in adapter]
    try:
        return model.load_weights(iter(named))
    except (ValueError, KeyError, AssertionError, RuntimeError, IndexError) as error:
        reason = f"state has tensors that the model does not take: {error!r}"
        raise Refusal(reason[:400], version=source.version) from error


class WeightRoom:
    """vLLM's worker extension: these methods become the worker's own, for `collective_rpc`.

    Two states are mapped at most: the one that is served, and the one that is staged to take its place.
    """

    _shoal_copies: Copies | None = None
    """of the staged state"""

    @torch.no_grad()
    def shoal_open(self, state: StateFile, names: tuple[str, ...]) -> None:
        """Map `state` as the staged one, read the pages of `names`, so that a commit waits for no disk, and prepare their
        copies."""
        source = MappedState(state)
        for name in names:
            source.tensor(name).flatten().view(torch.uint8)[::PAGE].sum()
        self._shoal_sources()["staged"] = source
        self._shoal_copies = Copies(self._shoal_routes(), source, names)

    def shoal_drop(self) -> None:
        """Forget the staged state."""
        self._shoal_sources().pop("staged", None)
        self._shoal_copies = None

    def shoal_settle(self) -> None:
        """The staged state becomes the served one."""
        sources = self._shoal_sources()
        sources["served"] = sources.pop("staged")
        self._shoal_copies = None

    @torch.no_grad()
    def shoal_fill(self, which: str, names: tuple[str, ...]) -> None:
        """Put these tensors of the "staged" or the "served" state in place."""
        copies = self._shoal_copies
        if which != "staged" or copies is None or copies.names != tuple(names):
            copies = Copies(self._shoal_routes(), self._shoal_sources()[which], names)
        copies.run()
        self._shoal_synchronize()

    @torch.no_grad()
    def shoal_reload(self, which: str) -> None:
        """Put all tensors of that state in place through the model's own `load_weights`."""
        model = self._shoal_model()
        load_by_name(model, self._shoal_sources()[which])
        vllm_packing.repack({p.untyped_storage().data_ptr() for p in model.parameters()})
        self._shoal_synchronize()

    @torch.no_grad()
    def shoal_differing(self, which: str, names: Iterable[str]) -> list[str]:
        """Those of `names` whose values in the model differ from that state."""
        routes, source = self._shoal_routes(), self._shoal_sources()[which]
        return [n for n in names if not all(route.holds(source.tensor(n)) for route in routes[n])]

    def shoal_loose(self) -> list[str]:
        """Tensors with a route into memory that no parameter or buffer of the model uses (any more)."""
        model = self._shoal_model()
        used = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
        routes = self._shoal_routes()
        return [n for n, rs in routes.items() if any(r.target.untyped_storage().data_ptr() not in used for r in rs)]

    def shoal_stage_adapter(self, plan: AdapterPlan, number: int) -> None:
        """Enter the staged state's adapter under this number."""
        vllm_adapters.stage(self._shoal_adapters(), plan, number, self._shoal_sources()["staged"])

    def shoal_use_adapter(self, number: int) -> list[str]:
        """Compute with this adapter; returns layers that do not."""
        vllm_adapters.use(self._shoal_adapters(), number)
        self._shoal_synchronize()
        return vllm_adapters.differing(self._shoal_adapters(), number)

    def shoal_keep_adapter(self, number: int) -> None:
        """Forget all adapters but this one."""
        vllm_adapters.keep_only(self._shoal_adapters(), number)

    def shoal_drawn(self) -> dict[str, tuple[int, np.ndarray]]:
        return vllm_draws.drawn()

    def shoal_score_at(self, temperature: float) -> None:
        """From here on log probabilities of prompts are those at this temperature, computed as `sampling.log_probs` does."""

        def log_probs(logits: torch.Tensor) -> torch.Tensor:
            return torch.log_softmax(logits.double() / temperature, dim=-1).float()

        self.model_runner.sampler.compute_logprobs = log_probs  # type: ignore[attr-defined]

    def _shoal_adapters(self) -> Any:
        return self.model_runner.lora_manager  # type: ignore[attr-defined]

    def _shoal_model(self) -> Any:
        return self.model_runner.get_model()  # type: ignore[attr-defined]

    def _shoal_routes(self) -> dict[str, list[Route]]:
        return self._shoal_model().shoal_routes

    def _shoal_sources(self) -> dict[str, MappedState]:
        if not hasattr(self, "_shoal_mapped"):
            self._shoal_mapped: dict[str, MappedState] = {}
        return self._shoal_mapped

    def _shoal_synchronize(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
