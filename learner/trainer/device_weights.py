"""Weights on a GPU as the client publishes them: cast and compared on the device. Must not know sockets or chunks.

Only changes leave the device, some 6 bytes for each changed word. The state that was taken last stays on the device for the
next comparison (2 bytes for each parameter, for bf16).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from learner.trainer.device_diff import find_on_device
from learner.trainer.model import INT_VIEW, named_state, served_dtype
from p2p.codec.classes import Changes
from p2p.codec.sparse import room
from p2p.layout import WORD, Layout, Segment


@torch.no_grad()
def segment_words(segment: Segment, layout: Layout, tensors: Mapping[str, Tensor]) -> Tensor:
    """Signed integers [n]: the segment's words, where the tensors are: each cast to the layout's dtype; zero between tensors."""
    size, some = segment.itemsize, next(iter(tensors.values()))
    words = torch.zeros(segment.nbytes // size, dtype=INT_VIEW[size], device=some.device)
    for name in layout.touched(segment.start, segment.stop):
        spec = layout.by_name[name]
        first, last = max(segment.start, spec.offset), min(segment.stop, spec.stop)
        values = tensors[name].detach().reshape(-1)[(first - spec.offset) // size : (last - spec.offset) // size]
        bits = values.to(getattr(torch, spec.dtype)).view(INT_VIEW[size])
        words[(first - segment.start) // size : (last - segment.start) // size] = bits
    return words


def served_layout(tensors: Mapping[str, Tensor], dtype: str) -> Layout:
    """The tensor table of a state whose floating tensors are served in `dtype`. UsageError on one that cannot be."""
    target = served_dtype(dtype)
    kinds = {name: target if t.is_floating_point() else t.dtype for name, t in tensors.items()}
    return Layout.build([(n, str(kinds[n]).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items()])


class DeviceWeights:
    """A `learner.client.port.WeightSource` over a model; the same words as `learner.trainer.model.served_tensors` gives."""

    frozen: frozenset[str] = frozenset()

    def __init__(self, model: nn.Module, dtype: str = "bfloat16") -> None:
        self._tensors = dict(named_state(model))
        self.layout = served_layout(self._tensors, dtype)
        self._taken: dict[int, Tensor] = {}
        """segment's start -> its words as they were last taken"""

    @torch.no_grad()
    def take(self, segment: Segment) -> Changes | np.ndarray:
        """The changes of a segment since it was last taken, or all of its words (uN [n]): the first time, and where too many
        changed."""
        new, old = segment_words(segment, self.layout, self._tensors), self._taken.pop(segment.start, None)
        changes = None
        if old is not None and segment.itemsize in (1, 2, 4):
            changes = find_on_device(new, old, room(len(new)))
        self._taken[segment.start] = new
        return changes if changes is not None else new.cpu().numpy().view(WORD[segment.itemsize])

    def forget(self) -> None:
        self._taken.clear()
