"""What peers sent and the head has not heard yet, bounded for all of them together. Pure.

A channel holds up to CHANNEL_WINDOW of it. Sixty strangers that reported without end had 175 MB lie there, at a head that was
short of a core. Must not know links or clocks.
"""

from __future__ import annotations

from collections.abc import Mapping

from p2p.limits import KIB, MIB

ALL_BYTES, EACH_BYTES = 64 * MIB, 512 * KIB
"""Bytes of all peers together beyond which whoever has most has to go, if it is more than EACH_BYTES. A node that is quick says
some KiB a second; of thousands at a head that stands still for a while each has less."""

LOOK_S = 0.25
"""Seconds between two looks."""

REASON = "{} bytes of messages wait to be heard: it says more than the head can hear"
"""Why such a peer's link ends."""


def overfull(unheard: Mapping[str, int]) -> list[str]:
    """Of peers with so many bytes each, those that have to go."""
    left, out = sum(unheard.values()), []
    for peer in sorted(unheard, key=lambda one: -unheard[one]):
        if left <= ALL_BYTES or unheard[peer] <= EACH_BYTES:
            break
        out.append(peer)
        left -= unheard[peer]
    return out
