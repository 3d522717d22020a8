"""What changed between two states, found where the weights are: the torch twin of `p2p.codec.classes.find`, for a GPU.

It gives the same `Changes`, so the payloads are the same bytes (`learner.trainer.device_weights` publishes them). Only changes
leave the device: some 6 bytes for each changed word, in place of all words. Must not know how changes are written.
"""

from __future__ import annotations

import numpy as np
import torch

from p2p.codec.classes import CLASSES, SHIFT, Changes
from p2p.layout import WORD

BLOCK = 1024
"""Words whose classes are counted together. The rank of a changed word within its block is then found by comparing them all, so a
larger block takes more comparisons and a smaller one more counts."""

AT_ONCE = 1 << 16
"""Changed words whose ranks are found at once: that takes BLOCK bytes of the device's memory for each, 64 MiB together."""


@torch.no_grad()
def find_on_device(new: torch.Tensor, base: torch.Tensor, most: int) -> Changes | None:
    """`new` and `base`: signed integers of 1, 2 or 4 bytes [n] (a view of the weights' bits), on one device. None when more than
    `most` differ. ValueError on other tensors."""
    size = base.element_size()
    if new.dtype != base.dtype or new.shape != base.shape or base.ndim != 1 or base.is_floating_point() or size not in SHIFT:
        raise ValueError(f"want two equal shapes of 1, 2 or 4 byte integers, got {new.dtype} and {base.dtype}")
    where = torch.nonzero(new != base).squeeze(1)
    if len(where) > most:
        return None
    # A shift of signed words brings copies of the sign from above.
    of_class = ((base >> SHIFT[size]) & min(CLASSES - 1, (256**size - 1) >> SHIFT[size])).to(torch.uint8)
    ranks = _ranks(of_class, where)
    place, order = torch.sort(of_class[where], stable=True)
    counts = torch.bincount(place, minlength=CLASSES)
    steps = (new[where].long() - base[where].long())[order] & (256**size - 1)
    return Changes(
        counts.cpu().numpy(), ranks[order].cpu().numpy().astype(np.uint32), steps.cpu().numpy().astype(WORD[size])
    )  # fmt: skip


def _ranks(of_class: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """int64 [len(where)]: how many words of the same class come before each of `where` (rising)."""
    if not len(where):
        return where
    blocks = -(-len(of_class) // BLOCK)
    padded = torch.nn.functional.pad(of_class, (0, blocks * BLOCK - len(of_class))).reshape(blocks, BLOCK)
    numbers = torch.arange(blocks, device=of_class.device, dtype=torch.int64)[:, None] * CLASSES
    held = torch.bincount((numbers + padded).reshape(-1), minlength=blocks * CLASSES).reshape(blocks, CLASSES)
    before = held.cumsum(0) - held
    within = torch.arange(BLOCK, device=of_class.device)
    ranks = torch.empty_like(where)
    for start in range(0, len(where), AT_ONCE):
        at = where[start : start + AT_ONCE]
        block, own = at // BLOCK, of_class[at]
        same = (padded[block] == own[:, None]) & (within < (at % BLOCK)[:, None])
        ranks[start : start + AT_ONCE] = before[block, own.long()] + same.sum(1)
    return ranks
