"""Attention over packed rows in one call a layer, on a GPU: flash attention over stretches of any ends.

Must not know rewards or losses. The buckets of `attention` are a call and a dozen small kernels for each group of like lengths,
some 770 kernels a layer for 24 rows, whose launches may be what held a step of 0.5B on an H100 up (bench/trainer.md). Here a
layer has one call: completions behind a shared prompt are rows whose keys are the prompt's and their own (flash attention aligns
the last query with the last key). Where it does not give what the buckets give, `works_on` says why, and those are used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from learner.trainer.forward.layout import PackedRows, RowTokens, packed

SAME = 0.02
"""Part of the norm by which values and gradients may be off from the buckets': bfloat16 rounds by up to 0.004, several times."""


class RowEnds(NamedTuple):
    """Where rows begin and end, one behind the other."""

    queries: Tensor
    """int32 [rows + 1]: of each row's queries, and the end"""
    keys: Tensor
    """int32 [rows + 1]: of its keys"""
    most_queries: int
    most_keys: int


class Kernel(Protocol):
    """Attention over rows of any lengths."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, ends: RowEnds, *, window: int | None, scale: float | None
    ) -> Tensor:
        """Queries [n, heads, D], keys and values [m, heads of keys, D] -> [n, heads, D]. Query i of a row with q queries and k
        keys sees the keys up to k - q + i, and of these the last `window`. Scores are multiplied by `scale`; None: by
        1 / sqrt(D)."""


def flash(
    query: Tensor, key: Tensor, value: Tensor, ends: RowEnds, *, window: int | None, scale: float | None
) -> Tensor:
    """torch's flash attention, as `Kernel`, with gradients. RuntimeError or NotImplementedError where it cannot."""
    behind = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
    out: Tensor = torch.ops.aten._flash_attention_forward(
        query, key, value, cum_seq_q=ends.queries, cum_seq_k=ends.keys, max_q=ends.most_queries,
        max_k=ends.most_keys, dropout_p=0.0, is_causal=True, return_debug_mask=False, scale=scale, **behind,
    )[0]  # fmt: skip
    return out


@dataclass(frozen=True, slots=True)
class VarlenPlan:
    """What each layer's attention does for one forward."""

    ends: RowEnds
    tokens: int
    """of rows; what fills the layout up lies behind them"""
    take: Tensor | None
    """int64 [keys]: where each key lies in the layout; None: the keys are the queries' own, in their order"""
    kernel: Kernel = flash

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, window: int | None, scale: float | None) -> Tensor:
        """[1, heads, L, D] in, as transformers has them; [1, L, heads, D] out."""
        # As autocast does before torch's own attention: what comes from a norm may be float32.
        kind = query.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else value.dtype
        q, k, v = (x[0].transpose(0, 1).to(dtype) for x in (query, key, value))
        if self.take is not None:
            k, v = (x.index_select(0, self.take) for x in (k, v))
        else:
            k, v = k[: self.tokens], v[: self.tokens]
        out = self.kernel(q[: self.tokens], k, v, self.ends, window=window, scale=scale)
        return torch.nn.functional.pad(out, (0, 0, 0, 0, 0, q.shape[0] - self.tokens))[None]


def varlen_plan(rows: PackedRows, device: torch.device, kernel: Kernel = flash) -> VarlenPlan:
    """The plan of a layout."""
    laid = sorted(
        ((stretch, bucket.prefix) for bucket in rows.buckets for stretch in bucket.stretches), key=lambda one: one[0].start
    )
    # Each token is in one stretch, so in the order of their beginnings they are the layout itself.
    queries = [stretch.size for stretch, _ in laid]
    keys = [stretch.size + (prefix.size if prefix else 0) for stretch, prefix in laid]
    take = None
    if any(prefix for _, prefix in laid):
        parts = [torch.arange(*part) for stretch, prefix in laid for part in ((prefix, stretch) if prefix else (stretch,))]
        take = torch.cat(parts).to(device)
    begins = [torch.tensor([0, *sizes]).cumsum(0).to(device, torch.int32) for sizes in (queries, keys)]
    return VarlenPlan(RowEnds(begins[0], begins[1], max(queries), max(keys)), sum(queries), take, kernel)


TRIED = tuple(
    tuple(RowTokens((0,) * prompt, (0,) * completion) for prompt, completion in lengths)
    for lengths in (((40, 70), (40, 9), (1, 33), (90, 5)), ((1, 1), (1, 1)))
)
"""Layouts with which it is found out whether the kernel gives what the buckets give; of the last all rows have one query."""

WINDOW, SCALE = 7, 0.4
"""A layer's window and scale with which it is tried besides."""


class Bucketed(Protocol):
    """Attention over a layout by its buckets, apart from a model: `attention.bucketed`."""

    def __call__(
        self, module: nn.Module, given: tuple[Tensor, ...], rows: PackedRows, *, window: int | None, scale: float | None
    ) -> Tensor:
        """Queries, keys and values [1, heads, L, D] -> [1, L, heads, D]."""


def works_on(device: torch.device, config: Any, bucketed: Bucketed, kernel: Kernel = flash) -> str:
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
                    partial(_by_buckets, bucketed, module, laid, window=window, scale=scale),
                )
            )
            apart += [_off(a.double(), b.double()) for a, b in zip(one, other, strict=True)]
    except (AttributeError, TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    # Not by the largest: a number that is none is larger than nothing.
    return "" if all(off <= SAME for off in apart) else f"values or gradients are {max(apart):.1%} off, or are no numbers"


def _by_buckets(
    bucketed: Bucketed, module: nn.Module, laid: PackedRows, *given: Tensor, window: int | None, scale: float | None
) -> Tensor:
    return bucketed(module, given, laid, window=window, scale=scale)


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
