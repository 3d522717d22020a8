"""Extraction on a CUDA device finds what the compiled loop on the processor finds. Skipped where there is none."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from learner.trainer.device_diff import find_on_device
from learner.trainer.device_weights import DeviceWeights
from netem.bench.codec.model_updates import gaussian_update
from p2p.codec.classes import Changes, find
from p2p.codec.sparse import pack, room

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_weights_on_the_device_are_those_of_the_processor() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.Linear(2048, 512)).cuda()
    weights, twin = DeviceWeights(model), DeviceWeights(copy.deepcopy(model).cpu())
    for step in range(3):
        for segment in weights.layout.segments(1 << 18):
            mine, theirs = weights.take(segment), twin.take(segment)
            assert isinstance(mine, Changes) == isinstance(theirs, Changes) == (step > 0)
            if isinstance(mine, Changes) and isinstance(theirs, Changes):
                assert pack(mine) == pack(theirs)
            else:
                assert np.array_equal(mine, theirs)
        with torch.no_grad():
            # The tensors are changed as a training step changes them.
            for one, other in zip(model.parameters(), twin._tensors.values(), strict=True):
                one += torch.randn_like(one) * 1e-6
                other.copy_(one)


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.1])
def test_the_same_bytes(share: float) -> None:
    update = gaussian_update("layer", ((4096, 1024),), share)
    both = [torch.from_numpy(words.view(np.int16)).cuda() for words in (update.new, update.old)]
    mine = find_on_device(both[0], both[1], room(update.values))
    theirs = find(update.new, update.old, room(update.values))
    assert mine is not None and theirs is not None and pack(mine) == pack(theirs)
