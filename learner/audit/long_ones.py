"""Which long completions of proven nodes are checked beside the share that is chosen by chance. Pure.

A node that goes on where its seed drew the end holds a step up for as long as it likes, and looks quick by its tokens. Of its
completions the usual share is checked, some one in fifty, so that took minutes to find. So a completion that is much longer than
others is checked as soon as its node's allowance has room: each node's first one at once, and beyond that a quarter of the usual
share of the tokens that it makes. Whoever is honest and has long answers costs that much and no more. Must not know what a check
is, or who is proven.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from p2p.forgetting import forget_oldest, renewed

LONG = 3.0
"""A completion is long that has so many times as many tokens as a quarter of the last ones had at the most."""

RECENT_LENGTHS = 4_096
"""Completions that are compared with: when most nodes begin to make long ones at once, it takes them thousands to hide it."""

FEW_LENGTHS = 16
"""Completions below which nothing is called long, and after which it is found anew what is."""

LONG_PART = 0.25
"""Part of the usual share of a node's tokens that its long completions may have checked beside it."""

MOST_OWING = 2_000
"""Nodes, gone ones among them, of which it is remembered what they had checked."""


@dataclass
class LongCompletions:
    """`is_here(node)`: whether it is linked; those that are gone are forgotten first."""

    is_here: Callable[[str], bool]
    _lengths: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT_LENGTHS), init=False, repr=False)
    _usual: float = field(default=math.inf, init=False, repr=False)
    _since: int = field(default=0, init=False, repr=False)
    """completions since that was found"""
    _owing: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    """node -> tokens of its long ones that were checked, less what its tokens since have earned; none is at 0"""

    @property
    def least(self) -> float:
        """Tokens from which a completion is long; inf while that is not known."""
        return LONG * self._usual

    def ended(self, tokens: int) -> bool:
        """A completion of so many tokens has ended. Whether it is long, beside those before it."""
        long = tokens >= self.least
        self._lengths.append(tokens)
        self._since += 1
        if self._since >= FEW_LENGTHS:
            self._usual, self._since = sorted(self._lengths)[len(self._lengths) // 4], 0
        return long

    def made(self, node: str, tokens: int, share: float) -> None:
        """It made so many tokens that nobody chose to check, where `share` of all are checked by chance."""
        owing = self._owing.get(node)
        if owing is None:
            return
        owing -= LONG_PART * share * tokens
        if owing > 0:
            self._owing[node] = owing
        else:
            del self._owing[node]

    def takes(self, node: str, tokens: int) -> bool:
        """Whether so many tokens of a long completion are checked now; they are counted if so."""
        if node in self._owing or tokens <= 0:
            return False
        self._owing[node] = float(tokens)
        renewed(self._owing, node)
        forget_oldest(self._owing, MOST_OWING, self.is_here)
        return True
