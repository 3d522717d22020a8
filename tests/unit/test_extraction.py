"""What torch finds on a device is what the compiled loop finds: the same changes, so the same bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.trainer.device_diff import find_on_device
from p2p.codec.classes import find
from p2p.codec.sparse import pack, room
from p2p.layout import WORD

SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def on_torch(words: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(words.view(f"<i{words.itemsize}").copy())


@given(st.data())
@settings(max_examples=120, deadline=None)
def test_the_same_changes_for_any_bits(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([1, 2, 4]))
    count = data.draw(st.integers(0, 3072) | st.sampled_from([1024, 2048, 20_000]))
    draw = np.random.default_rng(data.draw(st.integers(0, 99)))
    spread = data.draw(st.sampled_from([1, 300, 2**31]))
    base = draw.integers(0, spread, count).astype(WORD[size])
    if data.draw(st.booleans()) and size == 2:
        base = (draw.standard_normal(count).astype(np.float32) * 0.02).view("<u4").__rshift__(16).astype("<u2")
    new = base.copy()
    hit = draw.random(count) < data.draw(st.sampled_from([0.0, 0.01, 0.1, 0.3]))
    new[hit] += draw.integers(1, 250, int(hit.sum())).astype(WORD[size])
    most = room(count)
    mine, theirs = find_on_device(on_torch(new), on_torch(base), most), find(new, base, most)
    assert (mine is None) == (theirs is None)
    if mine is not None and theirs is not None:
        for one, other in zip((mine.counts, mine.ranks, mine.steps), (theirs.counts, theirs.ranks, theirs.steps), strict=True):
            assert one.dtype == other.dtype and np.array_equal(one, other)
        assert pack(mine) == pack(theirs)


def test_other_tensors_are_the_callers_mistake() -> None:
    good = torch.zeros(4, dtype=torch.int16)
    for bad in (torch.zeros(4), torch.zeros(5, dtype=torch.int16), torch.zeros(4, dtype=torch.int64), good.reshape(2, 2)):
        with pytest.raises(ValueError, match="want two"):
            find_on_device(bad, good if bad.ndim == 1 and bad.dtype != torch.int64 else bad, 4)
