"""The live channels of a host, and the queue of channels that others opened. Must not know how channels are made."""

from __future__ import annotations

import math

import trio

from p2p.channel.port import Channel
from p2p.channel.stream import CLOSE_WAIT_S, StreamChannel

MAX_CHANNELS_PER_PEER = 32
"""Channels one peer may hold open, both directions together: with CHANNEL_WINDOW it bounds what it can make us keep.
Two are in use in normal life."""


class ChannelTable:
    """One host's live channels by peer, and its `incoming` queue."""

    def __init__(self) -> None:
        self._live: dict[str, set[StreamChannel]] = {}
        # unbounded, because the peers' channels are: the table's limit per peer bounds the queue too
        self._arrivals, self.incoming = trio.open_memory_channel[Channel](math.inf)

    def has_room(self, peer: str) -> bool:
        return len(self._live.get(peer, ())) < MAX_CHANNELS_PER_PEER

    def add(self, channel: StreamChannel) -> None:
        self._live.setdefault(channel.peer, set()).add(channel)

    def announce(self, channel: StreamChannel) -> None:
        """Hand a channel that the peer opened to the application; it is aborted later if nobody listens any more."""
        try:
            self._arrivals.send_nowait(channel)
        except trio.BrokenResourceError:
            pass

    def discard(self, channel: StreamChannel) -> None:
        """Called by the channel when it has ended."""
        peers = self._live.get(channel.peer, set())
        peers.discard(channel)
        if not peers:
            self._live.pop(channel.peer, None)

    def of(self, peer: str) -> list[StreamChannel]:
        return [channel for channel in self._live.get(peer, ()) if not channel.closed]

    async def close_all(self, reason: str, peer: str | None = None) -> None:
        """Close every channel, or those of one peer, side by side, and give the peers a moment to hear why."""
        doomed = [c for name, group in self._live.items() if peer in (None, name) for c in group]
        async with trio.open_nursery() as nursery:
            for channel in doomed:
                nursery.start_soon(channel.aclose, reason)
        with trio.move_on_after(CLOSE_WAIT_S):
            for channel in doomed:
                await channel.wait_done()

    def close_arrivals(self) -> None:
        self._arrivals.close()
