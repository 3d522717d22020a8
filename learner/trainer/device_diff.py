"""What changed between two states, found where the weights are: the torch twin of `p2p.codec.classes.find`, for a GPU.

It gives the same `Changes`, so the payloads are the same bytes (`learner.trainer.device_weights` publishes them). Only changes
leave the device: some 6 bytes for each changed word, in place of all words. Must not know how changes are written.
"""

from __future__ import annotations

import numpy as np
import torch

from p2p.codec.classes import CLASSES, SHIFT, Changes
from p2p.layout import WORD


@torch.no_grad()
def find_on_device(new: torch.Tensor, base: torch.Tensor, most: int) -> Changes | None:
    """`new` and `base`: signed integers of 1, 2 or 4 bytes [n] (a view of the weights' bits), on one device. None when more than
    `most` differ. ValueError on other tensors. Takes some 20 bytes of the device's memory for each word meanwhile.

    All words are sorted by their class, which a GPU does at a fair part of its memory's rate: where a changed word then lies,
    behind the first of its class, is its rank.
    """
    size = base.element_size()
    if new.dtype != base.dtype or new.shape != base.shape or base.ndim != 1 or base.is_floating_point() or size not in SHIFT:
        raise ValueError(f"want two equal shapes of 1, 2 or 4 byte integers, got {new.dtype} and {base.dtype}")
    changed = new != base
    count = int(changed.sum())
    if count > most:
        return None
    if not count:
        return Changes(np.zeros(CLASSES, np.int64), np.zeros(0, np.uint32), np.zeros(0, WORD[size]))
    # A shift of signed words brings copies of the sign from above.
    of_class = ((base >> SHIFT[size]) & min(CLASSES - 1, (256**size - 1) >> SHIFT[size])).to(torch.uint8)
    in_order, order = torch.sort(of_class, stable=True)
    first = torch.searchsorted(in_order, torch.arange(CLASSES, dtype=torch.uint8, device=base.device))
    at = torch.nonzero(changed[order]).squeeze(1)
    place, where = in_order[at].int(), order[at]
    counts = torch.bincount(place, minlength=CLASSES)
    ranks, steps = (at - first[place]).int(), new[where] - base[where]
    return Changes(counts.cpu().numpy(), ranks.cpu().numpy().view(np.uint32), steps.cpu().numpy().view(WORD[size]))
