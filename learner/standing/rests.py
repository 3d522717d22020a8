"""For how long a node gets nothing of which a token was grossly wrong. Pure: told what happened and when (one clock, seconds).

At first for as long as its doubt lasts. Whenever something that the trainer waits for is taken from it afterwards, twice as long:
it would hold a step up for a moment again and again, and lose each sequence before there is more to judge it by. Must not know
who was found wrong, or what a rest keeps from a node.
"""

from __future__ import annotations

from typing import NamedTuple

from p2p.forgetting import forget_oldest, renewed

MOST_S = 3600.0
"""Seconds that one lasts at the most."""


class Rest(NamedTuple):
    """A node's last one."""

    until: float
    lasts_s: float


class Rests:
    """Of all nodes; of too many, the last ones."""

    def __init__(self) -> None:
        self._of: dict[str, Rest] = {}

    def resting(self, peer: str, now: float) -> bool:
        """Whether it gets nothing now."""
        rest = self._of.get(peer)
        return rest is not None and now < rest.until

    def begin(self, peer: str, lasts_s: float, now: float) -> Rest:
        """It gets nothing for so long."""
        rest = self._of[peer] = Rest(now + lasts_s, lasts_s)
        renewed(self._of, peer)
        forget_oldest(self._of)
        return rest

    def again(self, peer: str, now: float) -> Rest | None:
        """It held the trainer up since. None while it rests already, or if it never did."""
        rest = self._of.get(peer)
        return self.begin(peer, min(2 * rest.lasts_s, MOST_S), now) if rest is not None and now >= rest.until else None
