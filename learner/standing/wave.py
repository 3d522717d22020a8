"""Several proven nodes that turn at about the same time. Pure: told who was found and when.

Each of sixty that turn together holds a step up once before it is found, so the run is slow for as long as there are some left
that were not looked at. Where a few were found, the others are put in question too: all of theirs is checked until some of it was
sound, and their word does not count until then. Who is honest has shown it within seconds. Who is wrong only now and then passes
that. So from a wave on the head is on alert: what the trainer waits for is checked while it is made, nodes are given copies of
sequences that nobody waits for, and who was found wrong nothing but these until enough of them was sound. Must not know what was
found, or what a record is.
"""

from __future__ import annotations

WAVE_S = 60.0
"""Seconds within which those that were found count together, for which others are in question at the most, and before which they
are not again."""

WAVE_LEAST, WAVE_SHARE = 3, 0.05
"""So many proven nodes, and this share of those that are here, make a wave: one node's fault says nothing of others."""

WAVE_COMPLETIONS = 2
"""Completions of its own making, each from its first token to its last, that a node in question must show to be sound."""

ALERT_COMPLETIONS = 16
"""The same of one that was found wrong itself, on alert: who cheats in one of ten shows so many in one case of six."""

ALERT_S = 600.0
"""Seconds for which an alert lasts from the wave on, and anew from each proven node that is found for the first time in it."""


class WaveWatch:
    """`found` says when it is one."""

    def __init__(self) -> None:
        self._found: dict[str, float] = {}
        self._over = self._alert_until = float("-inf")
        self._alerted = set[str]()
        """whom the present alert is for"""

    def found(self, peer: str, proven: int, now: float) -> bool:
        """A proven node was found wrong, where so many are here. Whether a wave begins."""
        self._found = {other: at for other, at in self._found.items() if 0 <= now - at < WAVE_S} | {peer: now}
        self._over = min(self._over, now + WAVE_S)  # a clock may be set back
        if self.alert(now):
            if peer in self._alerted:  # else a few of them keep one up for ever
                return False
            self._alerted.add(peer)
            self._alert_until = now + ALERT_S
        if now < self._over or len(self._found) < max(WAVE_LEAST, WAVE_SHARE * proven):
            return False
        if not self.alert(now):
            self._alerted = set(self._found)
        self._over, self._alert_until = now + WAVE_S, now + ALERT_S
        return True

    def alert(self, now: float) -> bool:
        """Whether more of them may be wrong now and then."""
        self._alert_until = min(self._alert_until, now + ALERT_S)
        return now < self._alert_until
