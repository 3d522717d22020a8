"""The key-value cache of a changing set of rows: right-aligned, left-padded, joined, thinned and trimmed.

Must not know requests or sampling. W columns are shared by all rows; row i's first `pads[i]` columns hold nothing
and are masked, so its next token goes to column W at position W - pads[i].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad as pad_tensor
from transformers import DynamicCache

from p2p.few_sizes import filled_up


class KVRows:
    """A DynamicCache of plain layers (keys and values [rows, heads, W, head_dim]) and the padding of each row."""

    def __init__(self, cache: DynamicCache, pads: np.ndarray) -> None:
        self.cache, self.pads = cache, pads
        self._pads: torch.Tensor | None = None
        """`pads` on the device, made when first needed"""

    @property
    def width(self) -> int:
        return self.cache.get_seq_length()

    @property
    def nbytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers)

    def select(self, index: np.ndarray) -> None:
        """Keep rows `index` (int64, in that order, repeats allowed), then drop columns that are padding in all."""
        self.pads, self._pads = self.pads[index], None
        cut = int(self.pads.min()) if len(index) else 0
        self.pads = self.pads - cut
        for layer in self.cache.layers:
            chosen = torch.from_numpy(index).to(layer.keys.device)
            layer.keys = layer.keys[:, :, cut:].index_select(0, chosen)
            layer.values = layer.values[:, :, cut:].index_select(0, chosen)

    def join(self, other: KVRows) -> None:
        """Append the rows of `other`, padding the narrower of the two on the left."""
        width = max(self.width, other.width)
        mine, theirs = width - self.width, width - other.width
        for a, b in zip(self.cache.layers, other.cache.layers, strict=True):
            a.keys = torch.cat([_widen(a.keys, mine), _widen(b.keys, theirs)])
            a.values = torch.cat([_widen(a.values, mine), _widen(b.values, theirs)])
        self.pads, self._pads = np.concatenate([self.pads + mine, other.pads + theirs]), None

    def decode(self, model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
        """Run one more token per row: ids int64 [rows, 1] in, logits [rows, vocab] out; W grows by one."""
        if self._pads is None:
            self._pads = torch.from_numpy(self.pads).to(ids.device)[:, None]
        width = self.width
        mask = None
        if self.pads.any():
            mask = torch.arange(width + 1, device=ids.device)[None] >= self._pads
        out = model(
            input_ids=ids,
            position_ids=width - self._pads,
            attention_mask=mask,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1]


def _widen(tensor: torch.Tensor, columns: int) -> torch.Tensor:
    return pad_tensor(tensor, (0, 0, columns, 0)) if columns else tensor


class Prefilled(NamedTuple):
    """Whole sequences run through the model."""

    kv: KVRows
    logits: torch.Tensor
    """[n, vocab]: what follows the last token of each sequence"""


def prefill(
    model: torch.nn.Module, config: Any, sequences: Sequence[Sequence[int]], device: torch.device, *, multiple: int = 1
) -> Prefilled:
    """Run whole sequences (token ids, none empty) at once, padded on the left to the longest. While they run they are filled up
    (`filled_up` to a `multiple`) behind, where nothing sees it and no mask has to say so."""
    lengths = np.array([len(s) for s in sequences], dtype=np.int64)
    longest = int(lengths.max())
    width = filled_up(longest, multiple)
    pads = longest - lengths
    ids = np.zeros((len(sequences), width), dtype=np.int64)
    for row, sequence in zip(ids, sequences, strict=True):
        row[longest - len(sequence) : longest] = sequence
    columns = np.minimum(np.arange(width), longest - 1)[None]
    mask = torch.from_numpy(columns >= pads[:, None]).to(device) if pads.any() else None
    cache = DynamicCache(config=config)
    out = model(
        input_ids=torch.from_numpy(ids).to(device),
        position_ids=torch.from_numpy(np.maximum(columns - pads[:, None], 0)).to(device),
        attention_mask=mask,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1 if width == longest else torch.tensor([longest - 1], device=device),
    )
    if width > longest:
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[:, :, :longest], layer.values[:, :, :longest]
    return Prefilled(KVRows(cache, pads), out.logits[:, -1])
