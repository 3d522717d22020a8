"""What a person is told of a long download. Pure: the time is passed in; must not know where chunks come from."""

from __future__ import annotations

from p2p.quantities import human_seconds

TELL_S = 10.0
"""Seconds between two lines about a download that goes on: often enough that nobody takes it for dead, and 360 lines an hour."""


def spell_out_bytes(size: int) -> str:
    """Bytes for people, in the units that disks are sold in: "930 B", "45.0 MB", "1.2 GB"."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} B"


class DownloadProgress:
    """A download in `parts` of `what`, which began at `now`. Times are seconds of any one clock."""

    def __init__(self, what: str, parts: int, now: float) -> None:
        self._what, self._parts, self._done = what, max(1, parts), 0
        self._began = self._told = now

    def part(self, now: float, received: int) -> str:
        """Another part is here, and `received` bytes in all. What to tell; mostly ""."""
        self._done += 1
        if now - self._told < TELL_S:
            return ""
        self._told = now
        rate = spell_out_bytes(int(received / max(now - self._began, 1e-9)))
        return f"{self._what}: {self._done / self._parts:.0%} is here ({spell_out_bytes(received)}, {rate}/s)"

    def done(self, now: float, received: int) -> str:
        """Everything is here."""
        return f"{self._what} is here: {spell_out_bytes(received)} in {human_seconds(now - self._began)}"
