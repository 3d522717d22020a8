"""What a forward keeps for its backward, in bytes. Must not know rewards or losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import psutil
import torch
from torch import Tensor, nn

from learner.trainer.forward.forward import TokenForward
from learner.trainer.forward.layout import RowTokens
from p2p.few_sizes import FEW_SIZES

TRIED = FEW_SIZES
"""Tokens of the smaller of the forwards with which it is found out what a layer keeps; the other has twice as many. It is so much
for every token, and something beside: in bfloat16 a copy of the layer's weights."""


class Saved(NamedTuple):
    """Tensors that are kept from a forward to its backward, beside parameters."""

    total: int
    """bytes, each storage once"""
    largest: int
    """bytes of the largest"""


def saved_bytes(forward: TokenForward, rows: list[RowTokens], *, entropy_gradient: bool = True) -> Saved:
    """Of a forward over these rows."""
    return saved_by(forward.model, lambda: forward(rows, entropy_gradient=entropy_gradient).logprobs)


def saved_by(model: nn.Module, run: Callable[[], Tensor]) -> Saved:
    """Of what `run` computes with a model. Nothing of it is left."""
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    seen: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> None:
        # Not the tensor: one that an operation gives and keeps would hold that operation, which holds it, for ever.
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            seen[storage._cdata] = storage

    with torch.autograd.graph.saved_tensors_hooks(pack, _not_kept):
        found = run()
    assert found.requires_grad
    sizes = [storage.nbytes() for storage in seen.values()]
    return Saved(sum(sizes), max(sizes, default=0))


def _not_kept(_: None) -> Tensor:
    raise RuntimeError("what was kept was only counted: there is no backward")


def layer_bytes(forward: TokenForward, tokens: int) -> float:
    """Bytes that a layer keeps more, for a forward of `tokens` tokens, when it is not run again in the backward; 0 where none
    is."""
    if not forward.layers:
        return 0.0
    few, more = (_kept_by_layers(forward, count) / forward.layers for count in (TRIED, 2 * TRIED))
    return max(0.0, few + (more - few) * (tokens / TRIED - 1))


def _kept_by_layers(forward: TokenForward, tokens: int) -> int:
    row, kept = RowTokens((0,), (0,) * tokens), forward.kept
    found = []
    for keep in (0, forward.layers):
        forward.kept = keep
        found.append(saved_bytes(forward, [row]).total)
    forward.kept = kept
    return found[1] - found[0]


def layers_to_keep(forward: TokenForward, tokens: int, room: float) -> int:
    """How many layers may keep everything, for forwards of `tokens` tokens, if they may take `room` bytes more."""
    each = layer_bytes(forward, tokens)
    return 0 if each <= 0 else max(0, min(forward.layers, int(room / each)))


def free_bytes(device: torch.device) -> int:
    """Of the memory that `device` computes in."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
