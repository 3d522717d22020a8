"""Packed copies of a linear layer's weight: always of the values that are in place, made beforehand or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from node.engine.vllm import packing as vllm_packing
from node.engine.vllm.packing import AHEAD_BYTES, AheadPacking, repack


class Layer(torch.nn.Module):
    """Packs as vLLM does: computes with a copy of its weight."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(rows, 256), requires_grad=False)
        self.packed = 0
        self.shoal_pack(self, remove_weight=False)
        vllm_packing._packed.add(self)  # as our own packing registers a layer

    def shoal_pack(self, into: Any, remove_weight: bool) -> None:
        self.packed += 1
        copy = into.weight.detach().clone()
        into.cpu_linear = lambda x: torch.nn.functional.linear(x, copy)

    def right(self) -> bool:
        x = torch.randn(3, 256)
        return torch.equal(self.cpu_linear(x), torch.nn.functional.linear(x, self.weight))

    @property
    def address(self) -> int:
        return self.weight.untyped_storage().data_ptr()


def double(weight: torch.Tensor, values: torch.Tensor) -> None:
    values.mul_(2)


@pytest.mark.parametrize("rows", [4, AHEAD_BYTES // 1024 + 1])
def test_small_layers_are_packed_before_they_are_written_to(rows: int) -> None:
    layer, other = Layer(rows), Layer(4)
    ahead = AheadPacking({layer.address}, double)
    assert layer.packed == (2 if rows == 4 else 1) and layer.right()
    layer.weight.mul_(2)
    ahead.use()
    assert layer.packed == 2 and other.packed == 1 and layer.right()


def test_a_copy_of_other_values_is_not_used() -> None:
    layer = Layer(4)
    ahead = AheadPacking({layer.address}, double)
    layer.weight.mul_(3)
    ahead.use()
    assert layer.packed == 3 and layer.right()
    layer.weight.mul_(2)
    ahead.use()  # a second time: what was made beforehand is gone
    assert layer.packed == 4 and layer.right()
    layer.weight.mul_(2)
    repack({layer.address})
    assert layer.packed == 5 and layer.right()


def test_a_zero_of_the_other_sign_is_another_value() -> None:
    layer = Layer(4)
    layer.weight.zero_()
    ahead = AheadPacking({layer.address}, lambda weight, values: None)
    layer.weight.neg_()
    ahead.use()
    assert layer.packed == 3
