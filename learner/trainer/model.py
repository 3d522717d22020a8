"""Any Hugging Face causal LM as the trainer uses it: load, log probabilities, the tensors to serve.

Must not know rewards, groups, versions or the network. Masters are float32; what leaves is a bit view.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from learner.model_folder import first_line
from learner.trajectory import Gap
from p2p.errors import UsageError
from p2p.layout import WORD

SERVED_DTYPES: dict[str, torch.dtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32}
"""Dtypes in which floating tensors may be served to nodes."""

INT_VIEW = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of a value -> the integer dtype of torch that views its bits."""

ServedTensors = dict[str, tuple[str, np.ndarray]]
"""name -> (dtype name, unsigned integer bits in the tensor's shape)"""


def served_dtype(name: str) -> torch.dtype:
    """The torch dtype of this name. UsageError for one that cannot be served."""
    if name not in SERVED_DTYPES:
        raise UsageError(f"served dtype {name!r} is not one of {', '.join(SERVED_DTYPES)}")
    return SERVED_DTYPES[name]


def pick_device(name: str = "auto") -> torch.device:
    """ "auto": the first CUDA device, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


class LoadedModel(NamedTuple):
    """A causal LM with its tokenizer."""

    model: nn.Module
    tokenizer: Any


def load_model(source: str | Path, device: str = "auto", dtype: torch.dtype = torch.float32) -> LoadedModel:
    """Load from a local folder or a hub id, in `dtype` and with dropout off: the policy that is trained must be the one that
    generated.

    Only safetensors weights and only architectures that transformers itself knows: nothing a model ships is executed.
    UsageError, in one line, for a folder without config.json, an unknown architecture or a missing model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    path = Path(source).expanduser()
    local = path.exists() or str(source).startswith((".", "/", "~"))
    if local and not (path / "config.json").is_file():
        raise UsageError(f"model folder {source} has no config.json")
    where = str(path) if local else str(source)
    try:
        config = AutoConfig.from_pretrained(where)
        tokenizer = AutoTokenizer.from_pretrained(where)
        model = AutoModelForCausalLM.from_pretrained(
            where, config=config, dtype=dtype, use_safetensors=True, attn_implementation="sdpa"
        )
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"cannot load model {source}: {first_line(error)}") from error
    model.to(pick_device(device))
    model.eval()
    return LoadedModel(model, tokenizer)


def named_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, tied ones once under their first name, then persistent buffers. These names are exactly what a node
    looks up in the model it builds from the same config."""
    yield from model.named_parameters(remove_duplicate=True)
    for prefix, module in model.named_modules(remove_duplicate=True):
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer


@torch.no_grad()
def served_tensors(model: nn.Module, dtype: str = "bfloat16") -> ServedTensors:
    """The state as nodes will hold it: floating tensors cast to `dtype`, all others as they are; bits, not values.

    Pure: the model is not changed. Where no cast and no copy off the device is needed the arrays share the model's
    memory, so they are valid only until the next optimizer step. UsageError on a dtype that cannot be served.
    """
    target = served_dtype(dtype)
    served: ServedTensors = {}
    for name, tensor in named_state(model):
        value = tensor.detach()
        if value.is_floating_point():
            value = value.to(target)
        value = value.contiguous().cpu()
        size = value.element_size()
        bits = value.view(INT_VIEW[size]).numpy().view(WORD[size])
        served[name] = (str(value.dtype).removeprefix("torch."), bits)
    return served


def pad_right(rows: list[list[int]] | list[tuple[int, ...]], pad: int, device: torch.device) -> Tensor:
    """int64 [B, max length]."""
    width = max(len(row) for row in rows)
    block = np.full((len(rows), width), pad, dtype=np.int64)
    for i, row in enumerate(rows):
        block[i, : len(row)] = row
    return torch.from_numpy(block).to(device)


class CompletionLogprobs(NamedTuple):
    """Log probabilities of completions, left-aligned; T is the longest completion."""

    logprobs: Tensor
    """float32 [B, T]; 0 at padding and at given tokens"""
    mask: Tensor
    """bool [B, T], True at sampled completion tokens"""
    entropy: Tensor | None
    """float32 [B, T] in nats, 0 where `mask` is False; None unless it was asked for"""


def completion_logprobs(
    model: nn.Module,
    prompts: list[tuple[int, ...]],
    completions: list[tuple[int, ...]],
    *,
    given: Sequence[Sequence[Gap]] = (),
    temperature: float = 1.0,
    entropy: bool | Literal["gradient"] = False,
) -> CompletionLogprobs:
    """The model's log probability of each sampled completion token, with gradient.

    `given`, one entry a row where there are any: ranges of completion tokens that an environment wrote. The model reads them as
    it reads a prompt; they are not in the mask, and no gradient comes from their logits. `entropy` "gradient": with its gradient.

    One forward over right-padded rows. No attention mask is needed: under causal attention a real token never sees
    the padding behind it, and without a mask the fused causal kernel runs. The last completion token predicts nothing
    and is not fed. The probabilities are softmax(logits / temperature).
    """
    device = next(model.parameters()).device
    targets = pad_right([list(c) for c in completions], 0, device)  # [B, T]
    lengths = torch.tensor([len(c) for c in completions], device=device)
    mask = torch.arange(targets.shape[1], device=device)[None, :] < lengths[:, None]  # [B, T]
    for row, gaps in enumerate(given):
        for gap in gaps:
            mask[row, gap.start : gap.stop] = False
    logits = _plain_logits(model, prompts, completions).float()
    if temperature != 1.0:
        logits = logits / temperature
    log_softmax = torch.log_softmax(logits, dim=-1)  # [B, T, V]
    logprobs = log_softmax.gather(2, targets[:, :, None]).squeeze(2)  # [B, T]
    logprobs = torch.where(mask, logprobs, torch.zeros_like(logprobs))
    if not entropy:
        return CompletionLogprobs(logprobs, mask, None)
    with torch.set_grad_enabled(entropy == "gradient" and torch.is_grad_enabled()):
        of = log_softmax if entropy == "gradient" else log_softmax.detach()
        spread = -(of.exp() * of).sum(dim=-1)
    return CompletionLogprobs(logprobs, mask, torch.where(mask, spread, torch.zeros_like(spread)))


def _plain_logits(model: nn.Module, prompts: list[tuple[int, ...]], completions: list[tuple[int, ...]]) -> Tensor:
    """[B, T, V]: the logits that predict each completion token, from whole rows."""
    device = next(model.parameters()).device
    ids = pad_right([[*p, *c[:-1]] for p, c in zip(prompts, completions, strict=True)], 0, device)  # [B, L]
    width = max(len(c) for c in completions)
    first = min(len(p) for p in prompts) - 1  # the first position whose logits are needed
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=ids.shape[1] - first).logits
    else:
        logits = model(input_ids=ids, use_cache=False).logits[:, first:]
    starts = torch.tensor([len(p) - 1 - first for p in prompts], device=device)  # row's first logit, in kept positions
    if int(starts.max()) > 0 or logits.shape[1] != width:
        at = (starts[:, None] + torch.arange(width, device=device)[None, :]).clamp(max=logits.shape[1] - 1)
        logits = logits.gather(1, at[:, :, None].expand(-1, -1, logits.shape[2]))
    return logits
