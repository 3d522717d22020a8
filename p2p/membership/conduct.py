"""Which peers are to go for what they send, and how long they stay away. Pure: the time is passed in (seconds of one clock).

A refusal that is fatal expels at once: no honest peer causes one. Others are counted by peer, not by link, and forgotten one
by one: an honest peer causes some when it loses a race with a restart. Who is expelled may come again after a while that doubles
each time (`banlist`). Whoever knows more of peers than what they send, as the head does, puts its own `PeerConduct` here. Must
not know links, nor what was refused.
"""

from __future__ import annotations

from typing import Protocol

from p2p.membership.banlist import Banlist

REFUSALS, REFUSALS_S = 64, 60.0
"""So many refused messages expel a peer, forgotten one by one over so many seconds. A segment whose record was lost on the way
makes some 32 at once, each chunk one."""

MAX_COUNTED = 4096
"""Peers whose refusals are counted at once. Identities are free; beyond it those are forgotten that were refused longest ago."""


class PeerConduct(Protocol):
    """What a swarm asks about its peers. `now` is in seconds of one clock."""

    def refused(self, peer: str, why: str, now: float, *, fatal: bool) -> bool:
        """Something that it sent was refused. Whether that expels it."""

    def barred_s(self, peer: str, now: float) -> float:
        """Seconds for which it may not come; 0 when it may."""

    def passes_on(self, peer: str) -> bool:
        """Whether the source hands it chunks that others are to get through it."""


class RefusalCounts(PeerConduct):
    """By what is refused alone. Terms are kept in `banned`."""

    def __init__(self, banned: Banlist) -> None:
        self._banned = banned
        self._counts: dict[str, tuple[float, float]] = {}
        """peer -> (refusals, at what time), refused longest ago first"""

    def __len__(self) -> int:
        return len(self._counts)

    def refused(self, peer: str, why: str, now: float, *, fatal: bool) -> bool:
        """As in PeerConduct."""
        count, at = self._counts.pop(peer, (0.0, now))
        count = max(0.0, count - (now - at) * REFUSALS / REFUSALS_S) + 1.0
        if fatal or count >= REFUSALS:
            self._banned.add(peer, now)
            return True
        if len(self._counts) >= MAX_COUNTED:
            del self._counts[next(iter(self._counts))]
        self._counts[peer] = (count, now)
        return False

    def barred_s(self, peer: str, now: float) -> float:
        return self._banned.left_s(peer, now)

    def passes_on(self, peer: str) -> bool:
        """Nothing is known of it but refusals."""
        return True
