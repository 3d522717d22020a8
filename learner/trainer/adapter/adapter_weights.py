"""A frozen base and an adapter as the client publishes them: the base once, the adapter each time.

Must not know sockets or chunks.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from learner.trainer.device_weights import segment_words, served_layout
from p2p.codec.classes import CLASSES, Changes
from p2p.layout import WORD, Segment


class AdapterWeights:
    """A `learner.client.port.WeightSource`. The adapter is small: its segments are always given whole."""

    def __init__(self, frozen: Mapping[str, Tensor], adapter: Mapping[str, Tensor], dtype: str) -> None:
        self._tensors = {**frozen, **adapter}
        self.frozen = frozenset(frozen)
        self.layout = served_layout(self._tensors, dtype)
        self._never_changes: dict[tuple[int, int], bool] = {}
        """(start, stop) of each segment that was taken: whether it lies in frozen tensors alone"""
        self._given = set[int]()
        """starts of the frozen segments that were given"""

    def take(self, segment: Segment) -> Changes | np.ndarray:
        """Words of a frozen segment once, and no changes after that; of any other segment its words each time."""
        key = segment.start, segment.stop
        if key not in self._never_changes:
            self._never_changes[key] = self.frozen.issuperset(self.layout.touched(*key))
        word = WORD[segment.itemsize]
        if self._never_changes[key]:
            if segment.start in self._given:
                return Changes(np.zeros(CLASSES, np.int64), np.empty(0, np.uint32), np.empty(0, word))
            self._given.add(segment.start)
        return segment_words(segment, self.layout, self._tensors).cpu().numpy().view(word)

    def forget(self) -> None:
        self._given.clear()
