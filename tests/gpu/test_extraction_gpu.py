"""Extraction on a CUDA device finds what the compiled loop on the processor finds. Skipped where there is none.

Written to be run later (`python -m pytest tests/gpu`): not run on a GPU yet.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from learner.bench.updates import gaussian_update
from learner.extraction import find_on_device
from p2p.codec.classes import find
from p2p.codec.sparse import pack, room

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.1])
def test_the_same_bytes(share: float) -> None:
    update = gaussian_update("layer", ((4096, 1024),), share)
    both = [torch.from_numpy(words.view(np.int16)).cuda() for words in (update.new, update.old)]
    mine = find_on_device(both[0], both[1], room(update.values))
    theirs = find(update.new, update.old, room(update.values))
    assert mine is not None and theirs is not None and pack(mine) == pack(theirs)
