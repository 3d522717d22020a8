"""Which long completions of proven nodes are checked beside the share that is chosen by chance. Pure.

A node that goes on where its seed drew the end holds a step up for as long as it likes, and looks quick by its tokens. Of its
completions the usual share is checked, some one in fifty, so that took minutes to find. So the longest completions are checked
out of turn: those that had a small part of all tokens of late, an eighth of the usual share. Each node's first one is, and beyond
that as many tokens as it earned by others, and as all nodes together earned and did not use. So whose answers are honestly long
costs no more than two eighths. Must not know what a check is, or who is proven.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from p2p.forgetting import forget_oldest, renewed

LONG_PART = 0.125
"""Part of the usual share of tokens: so many are in long completions, and so many of a node's may be checked for being long."""

RECENT_LENGTHS = 4_096
"""Completions that are compared with: when most nodes begin to make long ones at once, it takes them hundreds to hide it."""

FAR_LONGER = 4
"""Times what one completion in a hundred has at the least, beyond which length does not count."""

USUAL = 0.75
"""Share of the completions whose lengths are usual: who makes less than a quarter of them does not move it."""

FEW_LENGTHS = 16
"""Completions below which nothing is called long, and after which it is found anew what is."""

MOST_SPARE = 4_096
"""Tokens that all nodes together may have earned and not used, and have at the beginning."""

MOST_OWING = 2_000
"""Nodes, gone ones among them, of which it is remembered what they had checked."""


@dataclass
class LongCompletions:
    """`share`: the usual one. `is_here(node)`: whether it is linked; those that are gone are forgotten first."""

    share: Callable[[], float]
    is_here: Callable[[str], bool]
    least: float = field(default=float("inf"), init=False)
    """tokens from which a completion is long; inf while that is not known"""
    usual: int = field(default=0, init=False)
    """tokens that USUAL of the completions have at the most; 0 while that is not known"""
    _lengths: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT_LENGTHS), init=False, repr=False)
    _since: int = field(default=0, init=False, repr=False)
    """completions since `least` was found"""
    _spare: float = field(default=float(MOST_SPARE), init=False, repr=False)
    _owing: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    """node -> tokens of its long ones that were checked, less what its tokens since have earned; none is at 0"""

    def ended(self, tokens: int) -> bool:
        """A completion of so many tokens has ended. Whether it is long, beside those before it."""
        long = tokens >= self.least
        self._lengths.append(tokens)
        self._since += 1
        if self._since >= FEW_LENGTHS:
            self.least, self._since = self._longest(), 0
        return long

    def made(self, node: str, tokens: int) -> None:
        """It made so many tokens of which the usual share is checked by chance."""
        earned = LONG_PART * self.share() * tokens
        self._spare = min(MOST_SPARE, self._spare + earned)
        owing = self._owing.get(node)
        if owing is None:
            return
        owing -= earned
        if owing > 0:
            self._owing[node] = owing
        else:
            del self._owing[node]

    def takes(self, node: str, tokens: int) -> bool:
        """Whether so many tokens of a long completion are checked now; they are counted if so."""
        if tokens <= 0 or (node in self._owing and tokens > self._spare):
            return False
        if node in self._owing:
            self._spare -= tokens
            return True
        self._owing[node] = float(tokens)
        renewed(self._owing, node)
        forget_oldest(self._owing, MOST_OWING, self.is_here)
        return True

    def _longest(self) -> float:
        """The length from which on completions have no more than the part of all tokens that may be checked for it. A few that
        are far longer than all others count as if they were less so: those are what is looked for."""
        ranked = sorted(self._lengths, reverse=True)
        self.usual = ranked[int((1 - USUAL) * len(ranked))]
        most = FAR_LONGER * ranked[len(ranked) // 100]
        room, least = LONG_PART * self.share() * sum(ranked), float("inf")
        for length in ranked:
            room -= min(length, most)
            if room < 0:
                return min(length, most) + 1
            least = min(length, most)
        return least
