"""How many runs of tokens in one message may bring nothing. Pure. Must not know what a run says.

Honest nodes send such runs when they lose a race: what they made was cancelled, or moved, while it was on its way. They cannot be
more than the node held, twice for a new version in between. Each costs the head microseconds and the node nothing, so there is an
end to it.
"""

from __future__ import annotations

SLACK = 256
"""Runs beyond what a node can have held by what is known of it: the head may have been restarted and know nothing."""


class IdleRuns:
    """What each node held at the most while its link was up."""

    def __init__(self) -> None:
        self._most: dict[str, int] = {}

    def allowed(self, peer: str, held: int) -> int:
        """How many idle runs one message of `peer`, which holds so many sequences now, may have."""
        most = self._most[peer] = max(held, self._most.get(peer, 0))
        return 2 * most + SLACK

    def forget(self, peer: str) -> None:
        """Its link is down."""
        self._most.pop(peer, None)
