"""Which peers fell behind the others with one manifest. Pure: the time is passed in (seconds of one clock).

Must not know what follows for those who did.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

LAG_S = 2.0
"""Seconds. A peer lags that holds less than the middle one held this long ago. It is served after the others, and distributes
nothing."""

LAG_PEERS, LAG_TICK_S = 12, 0.05
"""Who lags is looked at so much less often for every so many peers: all have to be counted for it."""

LAG_CHUNKS = 4
"""Fewer chunks than that behind is not lagging."""


class Laggards:
    def __init__(self) -> None:
        self._look_at = -1e18
        self._middle: deque[tuple[float, int]] = deque()

    def due(self, peers: int, now: float) -> bool:
        """Whether to look again, among so many peers."""
        if now < self._look_at:
            return False
        self._look_at = now + LAG_TICK_S * (peers // LAG_PEERS)
        return True

    def among(self, held: Mapping[str, int], now: float) -> set[str]:
        """Who lags of these peers, who hold so many chunks each."""
        if not held:
            return set()
        counts, middle = sorted(held.values()), self._middle
        middle.append((now, counts[len(counts) // 2]))
        while len(middle) > 1 and now - middle[1][0] >= LAG_S:
            middle.popleft()
        then = middle[0][1]
        if counts[0] + LAG_CHUNKS >= then:
            return set()
        return {peer for peer, count in held.items() if count + LAG_CHUNKS < then}
