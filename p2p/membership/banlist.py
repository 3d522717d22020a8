"""Peers that were dropped for what they sent, and until when. Pure: the time is passed in. Must not know why."""

from __future__ import annotations

BAN_S = (30.0, 3600.0)
"""Seconds for which a peer that was dropped for what it sent is not let in again: the first for the first time, doubled each
time, up to the second. A fault of the line is over in half a minute; a peer that goes on costs one handshake an hour."""

MAX_BANNED = 1024
"""Dropped peers that are remembered before those are forgotten whose time is long over. Identities are free, so the list
needs a bound."""

MOST_BANNED = 65_536
"""Dropped peers that are remembered at all: beyond, the one that was added first is forgotten."""


class Banlist:
    """Peers to keep away from. Times are seconds of one clock, which the caller reads."""

    def __init__(self) -> None:
        self._terms: dict[str, tuple[float, float]] = {}
        """peer -> (until when, for how long the next time)"""
        self._most = MAX_BANNED

    def __len__(self) -> int:
        return len(self._terms)

    def add(self, peer: str, now: float) -> None:
        """Keep away from `peer` from `now` on, for longer each time. One that is kept away already is not barred anew: what it
        had sent before comes in still."""
        if self.holds(peer, now):
            return
        if len(self._terms) >= self._most:
            # Who has behaved since it was let in again starts anew; identities are free, so the list must not grow.
            self._terms = {p: (until, seconds) for p, (until, seconds) in self._terms.items() if now <= until + seconds}
            self._most = max(MAX_BANNED, 2 * len(self._terms))  # a look at all of them must not come with each
        while len(self._terms) >= MOST_BANNED:
            del self._terms[next(iter(self._terms))]
        _, seconds = self._terms.get(peer, (now, BAN_S[0]))
        self._terms[peer] = (now + seconds, min(2 * seconds, BAN_S[1]))

    def holds(self, peer: str, now: float) -> bool:
        """Whether `peer` is still to be kept away from."""
        return self.left_s(peer, now) > 0

    def left_s(self, peer: str, now: float) -> float:
        """For how many seconds `peer` is still to be kept away from; 0 when it is not."""
        return max(0.0, self._terms[peer][0] - now) if peer in self._terms else 0.0
