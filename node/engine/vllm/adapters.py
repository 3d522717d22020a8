"""LoRA adapters inside vLLM, made of a mapped state's tensors and never of files on disk. In each worker's process.

vLLM knows an adapter by a name and a number, and looks for one that it does not know in a folder. Each version's adapter is
entered under a number of its own before any request names it, so vLLM finds it and reads nothing. Two are there at most: the one
that serves, and the one that is staged to take its place. Must not know requests, or the weights of the base model.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper

from node.engine.adapter import AdapterPlan
from node.engine.flat_model import MappedState
from p2p.errors import Refusal

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The largest ranks that vLLM makes room for: it takes one of these, and an adapter of that rank or less."""

NO_FOLDER = "shoal: in memory"
"""In place of the folder in which vLLM would look for an adapter that it does not know: there is none of that name."""


def room_for(rank: int) -> int:
    """The rank that vLLM is to make room for. Refusal where it has none so large."""
    largest = next((known for known in RANKS if known >= rank), None)
    if largest is None:
        raise Refusal(f"an adapter of rank {rank}: vLLM takes {RANKS[-1]} at most")
    return largest


def stage(worker_manager: Any, plan: AdapterPlan, number: int, source: MappedState) -> None:
    """Enter the adapter of `source` under `number`, in the form in which vLLM keeps one that is not active. Refusal where a layer
    that it adapts is none that vLLM can adapt."""
    manager = worker_manager._adapter_manager
    for other in set(manager.list_adapters()) - set(manager._active_adapters):
        manager.remove_adapter(other)  # staged once, and never used
    tensors = {}
    for path in plan.paths:
        names = plan.names(path)
        # Copies: vLLM multiplies B by the scale in place, and the file is another version's one day.
        tensors[f"base_model.model.{path}.lora_A.weight"] = source.tensor(names.a).clone()
        tensors[f"base_model.model.{path}.lora_B.weight"] = source.tensor(names.b).clone()
    helper = PEFTHelper.from_dict(
        {"r": plan.rank, "lora_alpha": plan.alpha, "target_modules": list(plan.paths), "use_rslora": plan.rslora}
    )
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    adapter = LoRAModel.from_lora_tensors(
        number, tensors, helper, device="cpu", dtype=worker_manager.lora_config.lora_dtype,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
    )  # fmt: skip
    known = set(manager.modules).union(*manager.packed_modules.values())
    if strange := sorted(set(adapter.loras) - known):
        raise Refusal(f"vLLM has no adapter for {len(strange)} layers: {', '.join(strange[:3])}", version=source.version)
    manager.add_adapter(adapter)


def use(worker_manager: Any, number: int) -> None:
    """Have requests of adapter `number`, which was staged, computed with it; others are active no more."""
    worker_manager._adapter_manager.activate_adapter(number)


def keep_only(worker_manager: Any, number: int) -> None:
    """Forget all adapters but this one."""
    manager = worker_manager._adapter_manager
    for other in set(manager.list_adapters()) - {number}:
        manager.remove_adapter(other)


@torch.no_grad()
def differing(worker_manager: Any, number: int) -> list[str]:
    """The layers that do not compute with the very values of adapter `number`. A rank that holds a part of a layer is not looked
    at."""
    manager = worker_manager._adapter_manager
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        return []
    if number not in manager.lora_index_to_id:
        return ["all"]
    index, adapter, wrong = manager.lora_index_to_id.index(number), manager._registered_adapters[number], []
    for name, module in manager.modules.items():
        weights = manager._get_lora_layer_weights(adapter, name)
        if not weights:
            continue
        packed = isinstance(weights.lora_a, list)
        for stacked, given in ((module.lora_a_stacked, weights.lora_a), (module.lora_b_stacked, weights.lora_b)):
            for held, want in zip(stacked, given if packed else [given], strict=False):
                if want is not None and not torch.equal(held[index, 0, : want.shape[0], : want.shape[1]], want.to(held.device)):
                    wrong.append(name)
    return wrong
