"""How much of the event loop's time each peer's messages take, and who is read more slowly for it. Pure: told the time.

While the loop has time to spare nobody is held up. When it has not, whoever takes more than its share waits between two messages,
and the others do not notice it: what it sends stays in its own channel. Must not know messages or links.
"""

from __future__ import annotations

from math import exp

WINDOW_S = 10.0
"""Seconds over which a share is taken; what lies further back fades."""

BUSY = 0.5
"""Of the time, what all peers' messages may take together before anyone is read more slowly: the rest is for work of our own."""

MOST = 0.2
"""Of the time, what one peer's messages may take at the most while others have something to say. With n others it is BUSY / n, if
that is less: identities are free."""

LONGEST_S = 5.0
"""Seconds between two messages of one peer, at the most: it is to be heard still, and its keepalives do not depend on it."""

FORGOTTEN = 1e-4
"""A share so small counts for none."""


class PeerLoad:
    """The shares of all peers."""

    def __init__(self) -> None:
        self._shares: dict[str, float] = {}
        self._at = 0.0

    def spent(self, peer: str, seconds: float, now: float) -> float:
        """A message of `peer` took so long to handle. For how many seconds nothing more is to be read of it."""
        if now - self._at > WINDOW_S / 20:
            fade = exp((self._at - now) / WINDOW_S)
            self._shares = {p: share * fade for p, share in self._shares.items() if share * fade > FORGOTTEN}
            self._at = now
        share = self._shares[peer] = self._shares.get(peer, 0.0) + seconds / WINDOW_S
        if share < MOST and share * len(self._shares) < BUSY:  # most messages: no sum over all peers for them
            return 0.0
        if len(self._shares) < 2 or sum(self._shares.values()) < BUSY:
            return 0.0
        allowed = min(MOST, BUSY / len(self._shares))
        return min(seconds / allowed, LONGEST_S) if share > allowed else 0.0
