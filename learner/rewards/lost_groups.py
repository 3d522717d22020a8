"""Groups lost since anything was scored: whether a reward function is broken, or some nodes write what breaks it. Pure.

A broken function fails on everybody's answers. So a lost group counts when one of its failed answers is wholly the work of proven
nodes, and what counts must come from half of the proven nodes that are here: neither strangers, however many, nor one proven node
of three can stop a run. While nobody is proven nothing stops it; once somebody is, what was lost before counts as well. Must not
know functions.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable

ROW = 1024
"""Lost groups of a row that are remembered, or `task.reward_failures` where that is more."""

BLAMED = 256
"""Nodes of which it is known on how many of their answers a function failed: of more, those with the fewest are forgotten."""

TOLD = 3
"""Nodes that a message names."""

Makers = frozenset[str]
"""The nodes that made one answer."""


class LostGroups:
    """`most`: so many groups in a row are one too many."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.proven: Callable[[], Collection[str]] | None = None
        """the proven nodes that are here; without it every node's answers count"""
        self._row: deque[frozenset[Makers]] = deque(maxlen=max(ROW, most))
        self._blamed: Counter[str] = Counter()

    @property
    def in_a_row(self) -> int:
        """Groups lost since anything was scored, whoever made them."""
        return len(self._row)

    def scored(self) -> None:
        """An answer has its reward."""
        self._row.clear()

    def failed(self, nodes: Iterable[str]) -> None:
        """An answer of each of these has no reward."""
        self._blamed.update(nodes)
        if len(self._blamed) > BLAMED:
            self._blamed = Counter(dict(self._blamed.most_common(BLAMED // 2)))

    def lost(self, failed: Iterable[Makers]) -> bool:
        """A group of which these answers failed, and none has a reward. Whether that is one too many."""
        self._row.append(frozenset(failed))
        if self.proven is None:
            return len(self._row) >= self.most
        proven = frozenset(self.proven())
        counting = [sound for answers in self._row if (sound := [makers for makers in answers if makers and makers <= proven])]
        nodes = frozenset[str]().union(*(makers for answers in counting for makers in answers))
        return len(counting) >= self.most and 2 * len(nodes) >= len(proven)

    def blame(self) -> str:
        """Whose answers it failed on, and how often: "12 of node A, 3 of node B"."""
        named = [f"{count:,} of node {node}" for node, count in self._blamed.most_common(TOLD)]
        return ", ".join(named) + (" and others" if len(self._blamed) > TOLD else "")
