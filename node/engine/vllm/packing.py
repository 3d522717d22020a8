"""Linear layers that vLLM packs for oneDNN on a CPU: the weights are kept beside the packed copy, which follows their changes.

Packing costs about 0.13 ms a layer before the first value moves (oneDNN looks for a form), which is most of an update of a
small model. So copies of small layers are packed `ahead`, as a version is staged, and a commit takes those that were made from
the very bits that it finds in place. Must not know states, routes or requests.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

AHEAD_BYTES = 1 << 20
"""Bytes of the largest weight that is packed ahead: larger ones are packed at 5 GB/s or more, and their copies would take
memory."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_packed: weakref.WeakSet[Any] = weakref.WeakSet()
"""linear layers that compute with a packed copy of their weight"""


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_BITS[tensor.element_size()])


def keep_linears_whole() -> None:
    """On a CPU vLLM packs the weights of linear layers for oneDNN and empties the parameters: nothing could be updated in place
    after that. So the parameter stays, beside the packed copy, which `repack` makes anew. It costs the model's size once
    more; computing without the copy costs a quarter of the speed. Before a model is built."""
    from vllm.model_executor.layers import utils

    pack = utils.dispatch_cpu_unquantized_gemm

    def pack_and_keep(layer: Any, remove_weight: bool) -> None:
        bias = getattr(layer, "bias", None)
        before = None if bias is None else bias.data
        pack(layer, remove_weight=False)
        if before is None or layer.bias.data_ptr() == before.data_ptr():
            layer.shoal_pack = pack
            _packed.add(layer)
        else:  # one of its kernels wants another bias than the one that is loaded
            layer.bias.data, layer.cpu_linear = before, torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = pack_and_keep


class AheadPacking:
    """Packed copies of what layers whose weights lie in `storages` (by address) will hold: made now for small ones.

    `write(weight, values)` puts into `values`, which has what `weight` has now, what the weight will hold.
    """

    def __init__(self, storages: set[int], write: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        self._made: dict[Any, SimpleNamespace] = {}
        self._layers = _touched(storages)
        for layer in self._layers:
            weight = layer.weight.detach()
            if weight.nbytes <= AHEAD_BYTES and weight.is_contiguous():
                twin = SimpleNamespace(weight=weight.clone(), bias=None)
                write(weight, twin.weight)
                layer.shoal_pack(twin, remove_weight=False)
                self._made[layer] = twin

    def use(self) -> None:
        """The layers' weights were written to: have them compute with what was made of these very values, and pack the rest."""
        for layer in self._layers:
            twin = self._made.pop(layer, None)
            if twin is not None and torch.equal(bits(twin.weight), bits(layer.weight.detach())):
                layer.cpu_linear = twin.cpu_linear
            else:
                layer.shoal_pack(layer, remove_weight=False)


def _touched(storages: set[int]) -> list[Any]:
    return [layer for layer in _packed if layer.weight.untyped_storage().data_ptr() in storages]


def repack(storages: set[int]) -> None:
    """Renew the packed copies whose weights lie in these storages (by address), which were written to."""
    for layer in _touched(storages):
        layer.shoal_pack(layer, remove_weight=False)
