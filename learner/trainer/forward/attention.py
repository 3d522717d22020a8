"""Attention over packed rows, as an implementation for transformers' models: each row sees itself, and the prompt it shares.

Must not know rewards or losses. Without a plan it is transformers' own causal attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from learner.trainer.forward.layout import LARGEST_MASK, PackedRows, Stretch
from learner.trainer.forward.varlen import VarlenPlan
from p2p.few_sizes import rounded_up

NAME = "shoal_packed"
"""What `config._attn_implementation` says of a model that attends so. transformers makes no mask for a name it has none for."""

PLAN = "shoal_plan"
"""Keyword of the model's forward that carries an `AttentionPlan` or a `VarlenPlan` to every layer."""


BLOCK = 512
"""Queries of a long row that are computed together where a layer sees no further than a window: at least so many, or as many as
the window has, as long as their mask stays below LARGEST_MASK."""


@dataclass(frozen=True, slots=True)
class _Part:
    """One bucket as index tensors: b stretches of at most T tokens."""

    take: Tensor | None
    """int64 [b, T]: where each token lies; padding takes the stretch's first. None: one stretch, which is the whole layout"""
    real: Tensor | None
    """int64 [tokens]: which of the b * T are no padding, in order; None: all"""
    prefix: Stretch | None
    b: int
    width: int
    ahead: int = 0
    """keys of no token before the prefix, which make its size a multiple"""
    masks: dict[_Mask, Tensor] = field(default_factory=dict)
    """those that layers had so far: they are the same for all of them"""

    def rows(self, x: Tensor) -> Tensor:
        """[b, heads, T, D] of [1, heads, L, D]."""
        if self.take is None:
            return x
        return x[0].index_select(1, self.take.reshape(-1)).unflatten(1, (self.b, self.width)).transpose(0, 1)

    def mask(self, which: _Mask, like: Tensor) -> Tensor:
        """[1, 1, queries, keys], to be added: made once for all layers, of the queries' type, as no kernel takes another."""
        if which not in self.masks:
            queries, keys, before, window, unseen, _ = which
            seen = torch.ones(queries, keys, dtype=torch.bool, device=like.device).tril(before).triu(before - window + 1)
            seen[:, :unseen] = False
            nothing = torch.zeros(queries, keys, dtype=like.dtype, device=like.device)
            self.masks[which] = nothing.masked_fill_(seen.logical_not_(), -torch.inf)[None, None]
        return self.masks[which]


class _Mask(NamedTuple):
    """Query i sees the keys up to `before` + i, and of these the last `window`, but none of the first `unseen`."""

    queries: int
    keys: int
    before: int
    window: int
    unseen: int = 0
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What each layer's attention does for one forward."""

    parts: tuple[_Part, ...]
    back: Tensor | None
    """int64 [L]: where each token of the layout lies in what the parts give, one behind the other; None: there already"""


def plan(rows: PackedRows, device: torch.device) -> AttentionPlan:
    """The plan of a layout."""
    if len(rows.buckets) == 1 and len(rows.buckets[0].stretches) == 1 and rows.buckets[0].prefix is None:
        return AttentionPlan((_Part(None, None, None, 1, len(rows.ids)),), None)
    parts, order = list[_Part](), list[Tensor]()
    for bucket in rows.buckets:
        sizes = [stretch.size for stretch in bucket.stretches]
        width = rounded_up(sizes[0], rows.multiple)
        starts = torch.tensor([stretch.start for stretch in bucket.stretches])
        offsets = torch.arange(width)
        within = offsets[None, :] < torch.tensor(sizes)[:, None]  # [b, T]
        take = starts[:, None] + offsets[None, :] * within
        order.append(take[within])
        real = None if sizes[-1] == width else within.reshape(-1).nonzero().squeeze(1).to(device)
        before = bucket.prefix.size if bucket.prefix else 0
        ahead = rounded_up(before, rows.multiple) - before
        parts.append(_Part(take.to(device), real, bucket.prefix, len(sizes), width, ahead=ahead))
    together = torch.cat(order)
    back = torch.zeros(len(rows.ids), dtype=together.dtype)  # what no row has takes the first: nobody reads it
    back[together] = torch.arange(len(together))
    return AttentionPlan(tuple(parts), back.to(device))


class Attended(NamedTuple):
    """What transformers' attention functions return."""

    out: Tensor
    """[batch, L, heads, D]"""
    weights: None = None


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> Attended:
    """The signature and shapes of transformers' attention functions: [1, heads, L, D] in, [1, L, heads, D] out."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    found: AttentionPlan | VarlenPlan | None = kwargs.pop(PLAN, None)
    if found is None:
        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return Attended(out)
    window = kwargs.pop("sliding_window", None)
    if window is None and _sees_less(module):
        raise NotImplementedError("a layer's window is in the model's own mask alone, which packed rows do without")
    if isinstance(found, VarlenPlan):
        return Attended(found.attend(query, key, value, window=window, scale=kwargs.get("scaling")))
    kwargs.pop("is_causal", None)
    outs = list[Tensor]()
    for part in found.parts:
        q, k, v = (part.rows(x) for x in (query, key, value))  # [b, heads, T, D]
        before = 0
        if part.prefix is not None:
            first, last = part.prefix
            before = part.ahead + last - first
            k, v = (_behind(x[:, :, first:last], part.ahead, own) for x, own in ((key, k), (value, v)))
        attend = partial(sdpa_attention_forward, module, **kwargs)
        pieces = list[Tensor]()
        for here in _blocks(part.width, before, window, part.ahead):
            mask = part.mask(here.mask._replace(dtype=q.dtype), q) if here.mask else None
            across = slice(here.first, before + here.stop)
            out, _ = attend(q[:, :, here.start : here.stop], k[:, :, across], v[:, :, across], mask, is_causal=mask is None)
            pieces.append(out)  # [b, queries, heads, D]
        out = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
        rows = out.reshape(part.b * part.width, *out.shape[2:])
        outs.append(rows if part.real is None else rows.index_select(0, part.real))
    if found.back is None:
        return Attended(outs[0][None])
    return Attended(torch.cat(outs).index_select(0, found.back)[None])


def _behind(prefix: Tensor, ahead: int, own: Tensor) -> Tensor:
    """[b, heads, ahead + P + T, D] of the prefix [1, heads, P, D] that all have, and their own [b, heads, T, D]."""
    if ahead:
        prefix = torch.nn.functional.pad(prefix, (0, 0, ahead, 0))
    return torch.cat([prefix.expand(len(own), -1, -1, -1), own], dim=2)


class _Block(NamedTuple):
    """Queries [start, stop) of rows, and the first of the keys that any of them sees."""

    start: int
    stop: int
    first: int
    mask: _Mask | None
    """None: they see all keys up to their own"""


def _blocks(width: int, before: int, window: int | None, ahead: int) -> Iterator[_Block]:
    """How rows of `width` queries behind `before` shared keys, the first `ahead` of them nobody's, are computed: at once, or
    where a layer sees no further than a window and the rows are long, some queries at a time, so that no mask of width x width
    is made."""
    keys = before + width
    if window is None or window >= keys:
        yield _Block(0, width, 0, _Mask(width, keys, before, keys, unseen=ahead) if before else None)
        return
    size = max(1, min(max(BLOCK, window), LARGEST_MASK // (2 * window)))
    for start in range(0, width, size):
        stop = min(start + size, width)
        first = max(0, before + start - window + 1)
        mask = _Mask(stop - start, before + stop - first, before + start - first, window, unseen=max(0, ahead - first))
        yield _Block(start, stop, first, mask)


def _sees_less(module: nn.Module) -> bool:
    """Whether this layer does not see its whole row, as the model's settings have it."""
    config: Any = getattr(module, "config", None)
    kinds, layer = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if kinds and layer is not None:
        return kinds[layer] != "full_attention"
    return bool(getattr(config, "sliding_window", None)) and getattr(config, "use_sliding_window", True)


def use_packed_attention(model: nn.Module) -> None:
    """Have the model attend so. ValueError where its attention cannot be replaced."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, packed_attention)
    model.set_attn_implementation(NAME)  # type: ignore[operator]
