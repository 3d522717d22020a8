"""A LoRA adapter in a served state: which layers have one, and what it adds to them. Must not know engines or states' files.

A state with an adapter has the frozen base model's tensors under their usual names, and `adapter.<path>.lora_A` [r, in] and
`.lora_B` [out, r] for each adapted layer. What the tensors do not say is in `adapter_config.json`, as peft writes it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from p2p.errors import Refusal
from p2p.layout import ADAPTER, Layout
from p2p.protocol.descriptor import ADAPTER_CONFIG

UNKNOWN = {"use_dora": False, "rank_pattern": {}, "alpha_pattern": {}, "bias": "none", "modules_to_save": None,
           "fan_in_fan_out": False, "lora_bias": False}  # fmt: skip
"""Settings of peft that would change what an adapter does -> the only value (or one as empty) that is understood here."""


class Pair(NamedTuple):
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """A layer at one of `paths` gives W x + scale B (A x)."""

    rank: int
    alpha: float
    rslora: bool
    paths: tuple[str, ...]

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def names(self, path: str) -> Pair:
        """The state's names of the two tensors at `path`."""
        return Pair(f"{ADAPTER}{path}.lora_A", f"{ADAPTER}{path}.lora_B")


def read_adapter(model_dir: Path, layout: Layout) -> AdapterPlan | None:
    """The adapter of a state with this layout; None when it has none. Refusal where the tensors or the configuration are not
    those of a plain LoRA adapter."""
    if not layout.adapter:
        return None
    try:
        config: Any = json.loads((model_dir / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        rank, alpha, rslora = int(config["r"]), float(config["lora_alpha"]), bool(config.get("use_rslora"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise Refusal(f"the state has an adapter, and {ADAPTER_CONFIG} cannot be read: {error!r}") from error
    if rank < 1 or not math.isfinite(alpha):
        raise Refusal(f"{ADAPTER_CONFIG}: r must be at least 1 and lora_alpha finite, not {rank} and {alpha}")
    odd = [key for key, plain in UNKNOWN.items() if config.get(key, plain) not in (plain, None)]
    if odd or config.get("peft_type", "LORA") != "LORA":
        raise Refusal(f"{ADAPTER_CONFIG}: only plain LoRA is known here, not {', '.join(odd) or config.get('peft_type')}")
    paths = sorted({name[len(ADAPTER) :].rpartition(".")[0] for name in layout.adapter})
    plan = AdapterPlan(rank, alpha, rslora, tuple(paths))
    wanted = {name for path in paths for name in plan.names(path)}
    if wanted != layout.adapter:
        raise Refusal(f"the state's adapter is not pairs of lora_A and lora_B: {min(wanted ^ layout.adapter)!r}")
    for path in paths:
        a, b = (layout.by_name[name].shape for name in plan.names(path))
        if len(a) != 2 or len(b) != 2 or a[0] != rank or b[1] != rank:
            raise Refusal(f"adapter of {path}: shapes {a} and {b} are not those of rank {rank}")
    return plan


def add_adapter(model: torch.nn.Module, plan: AdapterPlan, layout: Layout) -> dict[str, torch.Tensor]:
    """Have the layers of `model` at the plan's paths add what the adapter adds. Returns its tensors by the state's names, zero
    and of the model's dtype, to be filled in place. Refusal when there is no linear layer of that form at a path."""
    tensors: dict[str, torch.Tensor] = {}
    modules = dict(model.named_modules())
    for path in plan.paths:
        layer, (name_a, name_b) = modules.get(path), plan.names(path)
        if not isinstance(layer, torch.nn.Linear):
            what = "no such layer" if layer is None else f"a {type(layer).__name__}"
            raise Refusal(f"adapter of {path}: the model has {what} there, not a linear layer")
        shapes = layout.by_name[name_a].shape, layout.by_name[name_b].shape
        if shapes != ((plan.rank, layer.in_features), (layer.out_features, plan.rank)):
            raise Refusal(f"adapter of {path}: shapes {shapes} do not fit a layer of {layer.in_features} to {layer.out_features}")
        a, b = (torch.zeros(shape, dtype=layer.weight.dtype, device=layer.weight.device) for shape in shapes)
        layer.register_forward_hook(_Sum(a, b, plan.scale))
        tensors[name_a], tensors[name_b] = a, b
    return tensors


class _Sum:
    """Adds scale B (A x) to what a layer gave."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
        self._a, self._b, self._scale = a, b, scale

    def __call__(self, layer: torch.nn.Module, given: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
        low = torch.nn.functional.linear(given[0], self._a)
        return out + torch.nn.functional.linear(low, self._b) * self._scale
