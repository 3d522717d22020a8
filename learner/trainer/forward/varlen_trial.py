"""Whether attention in one call gives what the buckets give, on a device and for a model's heads. Must not know rewards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from learner.trainer.forward.attention import PLAN, packed_attention, plan
from learner.trainer.forward.layout import PackedRows, RowTokens, packed
from learner.trainer.forward.varlen import Kernel, flash, varlen_plan

SAME = 0.02
"""Part of the norm by which values and gradients may be off from the buckets': bfloat16 rounds by up to 0.004, several times."""

TRIED = tuple(
    tuple(RowTokens((0,) * prompt, (0,) * completion) for prompt, completion in lengths)
    for lengths in (((40, 70), (40, 9), (1, 33), (90, 5)), ((1, 1), (1, 1)))
)
"""Layouts with which it is found out whether the kernel gives what the buckets give; of the last all rows have one query."""

WINDOW, SCALE = 7, 0.4
"""A layer's window and scale with which it is tried besides."""


def works_on(device: torch.device, config: Any, kernel: Kernel = flash) -> str:
    """ "" where one call gives the values and gradients of the buckets, for a model's heads, with and without a window and a
    scale; else why not. `config`: transformers' own, of the text model."""
    apart = list[float]()
    try:
        heads = int(config.num_attention_heads)
        of_keys = int(getattr(config, "num_key_value_heads", 0) or heads)
        width = int(getattr(config, "head_dim", 0) or config.hidden_size // heads)
        module = _Heads(heads // of_keys)
        for rows, window, scale in product(TRIED, (None, WINDOW), (None, SCALE)):
            laid, generator = packed(rows), torch.Generator().manual_seed(0)
            given = [torch.randn(1, n, len(laid.ids), width, generator=generator) for n in (heads, of_keys, of_keys)]
            weight = torch.randn(1, len(laid.ids), heads, width, generator=generator).to(device, torch.bfloat16)
            one, other = (
                _with_gradients([x.to(device, torch.bfloat16).requires_grad_() for x in given], weight, attend)
                for attend in (
                    partial(varlen_plan(laid, device, kernel).attend, window=window, scale=scale),
                    partial(_bucketed, module, laid, window=window, scale=scale),
                )
            )
            apart += [_off(a.double(), b.double()) for a, b in zip(one, other, strict=True)]
    except (AttributeError, TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    # Not by the largest: a number that is none is larger than nothing.
    return "" if all(off <= SAME for off in apart) else f"values or gradients are {max(apart):.1%} off, or are no numbers"


def _bucketed(
    module: nn.Module, rows: PackedRows, query: Tensor, key: Tensor, value: Tensor, *, window: int | None, scale: float | None
) -> Tensor:
    how = {PLAN: plan(rows, query.device), "sliding_window": window, "scaling": scale}
    return packed_attention(module, query, key, value, None, **how).out


def _off(mine: Tensor, theirs: Tensor) -> float:
    return float((mine - theirs).norm()) / (float(theirs.norm()) or 1.0)  # of a row with one key some gradients are zero


def _with_gradients(given: list[Tensor], weight: Tensor, how: Callable[..., Tensor]) -> list[Tensor]:
    out = how(*given)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), given)]


class _Heads(nn.Module):
    """What transformers' attention functions ask a layer."""

    is_causal = True

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = groups
