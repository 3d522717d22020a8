"""Attention over packed rows in one call a layer, on a GPU: flash attention over stretches of any ends.

Must not know rewards or losses. The buckets of `attention` are a call and a dozen small kernels for each group of like lengths,
some 770 kernels a layer for 24 rows, whose launches may be what held a step of 0.5B on an H100 up (bench/trainer.md). Here a
layer has one call: completions behind a shared prompt are rows whose keys are the prompt's and their own (flash attention aligns
the last query with the last key). Where it does not give what the buckets give, those are used (`varlen_trial`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from learner.trainer.forward.layout import PackedRows


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
