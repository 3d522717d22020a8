"""A live neighbour: its two channels, and the queue of control messages that wait for it. Must not know who posts what.

`p2p.peering` makes links and runs their tasks.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import trio

from p2p.channel.base import Channel
from p2p.limits import MIB
from p2p.protocol.wire import encode

log = logging.getLogger("shoal.peering")

OUTBOX = 8192
"""Control messages that may wait for one peer. A peer that lets more pile up is not draining and is dropped."""

OUTBOX_BYTES = 64 * MIB
"""The same limit in bytes: answers can be as large as a frame, and who asks for many reads few."""


@dataclass
class Link:
    """A live neighbour."""

    peer: str
    name: str
    addresses: tuple[str, ...]
    control: Channel
    bulk: Channel
    outbox: trio.MemorySendChannel[bytes] = field(repr=False)
    site: str = ""
    """what the peer said of itself when it opened the link"""
    proven: float = 0.0
    """wall time at which the head gave this peer its membership (at the head only)"""
    closing: str = ""
    queued: int = 0
    """bytes in the outbox"""
    doomed: trio.Event = field(default_factory=trio.Event, repr=False)
    """set when the link must close although its writer may be stuck"""

    def post(self, message: object) -> None:
        """Queue a control message without waiting; never raises. A link that is closing drops it; one whose peer does
        not drain closes."""
        try:
            data = encode(message)
        except ValueError as error:  # too long for a frame: a limit of ours is wrong, and no reason to end the caller
            log.error("cannot send to %s: %s", self.peer, error)
            return
        try:
            if self.queued + len(data) > OUTBOX_BYTES:
                raise trio.WouldBlock
            self.outbox.send_nowait(data)
            self.queued += len(data)
        except trio.WouldBlock:
            self.closing = self.closing or f"{self.queued} bytes of control messages pile up unread"
            self.doomed.set()
        except (trio.ClosedResourceError, trio.BrokenResourceError):
            pass
