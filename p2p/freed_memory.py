"""Gives back to the system what a long-lived process freed. Must not know what it is."""

from __future__ import annotations

import trio

from p2p.processes import give_back_what_is_freed

EVERY_S = 10.0
"""Seconds between two times. With sixty peers that sent 4 MiB each at once, 240 MiB that were free had stayed with the head for
good, between blocks that were not; to give them back takes up to 12 ms each time."""


async def give_back_now_and_then() -> None:
    """For ever."""
    while True:
        await trio.sleep(EVERY_S)
        give_back_what_is_freed()
