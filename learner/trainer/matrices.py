"""Matrices of a model in bfloat16 where it is kept, half of their memory. Must not know optimizers or losses."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from p2p.errors import UsageError


@torch.no_grad()
def keep_in_bfloat16(model: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
    """Turn those of `parameters` that are matrices into bfloat16, in place, for a model that computes under autocast.

    Vectors (norms, biases) stay float32: they are few, and their small changes would be lost. What embeddings give is float32 as
    before, so that the sum that runs through the layers has the same precision as with float32 weights; projections are in
    bfloat16 under autocast anyway. Gradients are float32 too: sums over many forwards lose nothing.
    """
    changed = set[int]()
    for parameter in parameters:
        if parameter.ndim < 2 or not parameter.is_floating_point() or parameter.dtype == torch.bfloat16:
            continue
        parameter.data = parameter.data.to(torch.bfloat16)
        changed.add(id(parameter))
        if parameter.requires_grad:
            if not hasattr(parameter, "grad_dtype"):
                raise UsageError('float32 gradients of bfloat16 weights need torch 2.10; use trainer.compute_dtype = "float32"')
            parameter.grad_dtype = torch.float32
    for module in model.modules():
        if isinstance(module, nn.Embedding) and id(module.weight) in changed:
            module.register_forward_hook(_in_float32)


def _in_float32(module: nn.Module, given: object, out: Tensor) -> Tensor:
    return out.float()
