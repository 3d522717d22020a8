"""Bytes of tensors that are alive at once, as operations make them and they go. Must not know models."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts while it is entered. What was made before counts when an operation gives a view of it, unless it is in `known`."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.shapes: set[tuple[int, ...]] = set()
        """of all tensors that operations made"""
        self._seen = {tensor.untyped_storage()._cdata for tensor in known}

    def largest(self, but: set[tuple[int, ...]] = frozenset()) -> tuple[int, ...]:  # type: ignore[assignment]
        """The shape with most values, of those that are not in `but`."""
        return max(self.shapes - but, key=lambda shape: torch.Size(shape).numel())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._take(tensor)
        return out

    def _take(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        self._seen.add(key)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        self.shapes.add(tuple(tensor.shape))
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size
