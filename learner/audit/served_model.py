"""A model that has the weights of a flat state, in the type that it computes in. Needs torch.

Whole models and LoRA adapters on a frozen base: built from the run's own model folder, as the trainer builds them, without a read
of its weights. Must not know versions' order, nodes or what is scored.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from learner.model_folder import first_line
from learner.trainer.adapter.adapted import AdaptedModel
from learner.trainer.model import named_state
from learner.trainer.settings import LoraSection
from p2p.errors import Refusal, UsageError
from p2p.gpu_attention import without_plans_by_shape
from p2p.layout import Layout
from p2p.weights.state import FlatState


class ServedModel:
    """`dtype` is what it computes in. UsageError when the folder's model cannot be built."""

    def __init__(self, folder: Path, lora: LoraSection, *, device: str, dtype: torch.dtype) -> None:
        self._folder, self._lora, self._device, self._dtype = folder, lora, torch.device(device), dtype
        self._tensors: dict[str, Tensor] = {}
        self.model: nn.Module = self._build()

    def _build(self) -> nn.Module:
        model: Any = empty_model(self._folder, self._dtype, self._device)
        for needed in ("get_decoder", "get_output_embeddings"):
            if not callable(getattr(model, needed, None)) or getattr(model, needed)() is None:
                raise UsageError(f"{type(model).__name__} has no {needed.removeprefix('get_')} to score with")
        if self._lora.rank:
            for _, tensor in named_state(model):
                tensor.data.zero_()  # what is not filled yet must not be rounded
            adapted = AdaptedModel(model, self._lora)
            model.to(self._device, self._dtype)
            self._tensors = {name: t.detach() for name, t in (*adapted.frozen_state(), *adapted.parameters())}
        else:
            self._tensors = {name: tensor.detach() for name, tensor in named_state(model)}
        return model.eval()

    @torch.no_grad()
    def check_logits(self) -> None:
        """UsageError where the logits are more than the output embedding of the decoder's last states (capped or scaled, as in
        some models): the scorer takes them for that. Once the model is filled."""
        model: Any = self.model
        ids = torch.arange(8, device=self._device)[None, :]
        whole = model(input_ids=ids, use_cache=False).logits.float()
        taken = model.get_output_embeddings()(model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state).float()
        if not torch.allclose(whole, taken, rtol=1e-3, atol=1e-3):
            raise UsageError(f"{type(model).__name__} changes its logits after its output embedding: it cannot be scored")

    def check(self, layout: Layout) -> None:
        """Refusal unless a state of this layout has exactly its tensors."""
        odd = sorted(self._tensors.keys() ^ layout.by_name.keys())
        if odd:
            raise Refusal(f"the state and the model differ in {len(odd)} tensors, the first is {odd[0]!r}")
        for spec in layout.tensors:
            if spec.shape != tuple(self._tensors[spec.name].shape):
                raise Refusal(f"tensor {spec.name!r} has shape {spec.shape}, the model's {tuple(self._tensors[spec.name].shape)}")

    @torch.no_grad()
    def fill(self, state: FlatState, names: Iterable[str]) -> None:
        """Take these tensors from `state`."""
        for name in names:
            spec = state.layout.by_name[name]
            if spec.nbytes:
                bits = state.bytes[spec.offset : spec.stop]
                value = torch.from_numpy(bits).view(getattr(torch, spec.dtype)).view(spec.shape)
                self._tensors[name].copy_(value)


def empty_model(folder: Path, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The folder's model, of no particular values; on the device "meta" it takes no memory. UsageError when transformers cannot
    build it."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    without_plans_by_shape(torch)
    try:
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.device(device), no_init_weights():
            model: Any = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation="sdpa", trust_remote_code=False
            )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UsageError(f"the model in {folder} cannot be built: {first_line(error)}") from None
    model.tie_weights()
    model.requires_grad_(False)
    return model


def state_bytes(folder: Path, dtype: torch.dtype) -> int:
    """Bytes of a flat state of the folder's model in this type, without an adapter. UsageError as `empty_model`."""
    model = empty_model(folder, dtype, torch.device("meta"))
    return Layout.build((name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in named_state(model)).nbytes
