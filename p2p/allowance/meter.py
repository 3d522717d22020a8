"""All bytes of a host, both directions: what may leave or be read now, and what went over the wire.

One for all connections. What a channel writes asks here first: bulk waits for its turn, control messages are charged and leave,
so that they never wait behind chunks. What is read asks here before it is taken from the kernel: a peer that sends too much
fills the kernel's small buffer, and TCP stops it. What the kernel adds (headers, acknowledgements, what is sent again) is
charged as soon as it is counted (`settle`). Must not know peers, channels or messages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import trio

from p2p.allowance.bucket import TokenBucket

LOOK_S = 0.25
"""Seconds of a wait after which it is looked at again: the rate may have been changed."""

WINDOW_S = 0.3
"""Seconds of the rate that peers may have under way to a host with a limit, all together: what is sent before TCP stops them."""

LEAST_WINDOW = 8192
"""Bytes that each peer may have under way at the least: with less, TCP sends packets that are not full."""


@dataclass(frozen=True, slots=True)
class WireCount:
    """What the kernel counted of one connection since it began."""

    sent: int
    """bytes of payload, what was sent again included"""
    resent: int
    received: int
    """bytes of payload, each once"""
    headers_out: int
    """bytes of the headers of all packets that left"""
    headers_in: int


NOTHING_YET = WireCount(0, 0, 0, 0, 0)
"""The count of a connection before it was looked at."""


class HostMeter:
    """`limit` sets the rates. Without limits nothing waits. `now` counts seconds."""

    def __init__(self, now: Callable[[], float] = trio.current_time) -> None:
        self._now = now
        self.up, self.down = TokenBucket(), TokenBucket()
        self.counts = False
        """whether the kernel's counts are looked at, although there is no limit"""
        self.sent = self.received = 0
        """bytes on the wire so far, where the kernel's counts are looked at"""
        self._turns_up, self._turns_down = trio.Lock(), trio.Lock()
        self._unpaid_up = 0
        """bytes of payload that were charged before the kernel counted them as sent"""

    def limit(self, up: float, down: float) -> None:
        """Bytes a second from now on; 0 for no limit."""
        self.up.set_rate(self._now(), up)
        self.down.set_rate(self._now(), down)

    @property
    def looks(self) -> bool:
        """Whether connections are to be looked at (`settle`)."""
        return bool(self.counts or self.up.rate or self.down.rate)

    def piece(self, most: int) -> int:
        """Bytes that one write may have, at most `most`."""
        return self.up.piece(most)

    async def may_send(self, nbytes: int, *, urgent: bool) -> None:
        """Wait until so many bytes may be written; they are charged. `urgent`: they wait only where much is owed."""
        if urgent:
            while wait := self.up.wait_urgent(self._now()):  # noqa: ASYNC110 (a clock is no event)
                await trio.sleep(min(wait, LOOK_S))
            self._spend(nbytes)
            return
        if not self.up.rate:
            return
        async with self._turns_up:  # first come, first served
            while wait := self.up.wait(self._now(), nbytes):  # noqa: ASYNC110
                await trio.sleep(min(wait, LOOK_S))
            self._spend(nbytes)

    def _spend(self, nbytes: int) -> None:
        if self.up.rate:
            self.up.charge(self._now(), nbytes)
            self._unpaid_up += nbytes

    async def may_read(self, most: int) -> int:
        """Wait until something may be read; how many bytes at most. They are charged: what was not there is given back by
        `read`."""
        if not self.down.rate:
            return most
        async with self._turns_down:
            size = self.down.piece(most)
            while wait := self.down.wait(self._now(), size):
                await trio.sleep(min(wait, LOOK_S))
                size = self.down.piece(most)
            self.down.charge(self._now(), size)
            return size

    def read(self, allowed: int, nbytes: int) -> None:
        """Of `allowed` bytes, `nbytes` were there."""
        if self.down.rate:
            self.down.charge(self._now(), nbytes - allowed)

    def window(self, connections: int) -> int:
        """Bytes that each of so many peers may have under way to this host; 0 for no bound."""
        rate = self.down.rate
        return max(LEAST_WINDOW, int(WINDOW_S * rate / max(1, connections))) if rate else 0

    def settle(self, before: WireCount, count: WireCount) -> None:
        """A connection was looked at, whose count was `before`. What nobody has charged yet is charged."""
        headers_out, headers_in = count.headers_out - before.headers_out, count.headers_in - before.headers_in
        resent = count.resent - before.resent
        sent, received = count.sent - before.sent, count.received - before.received
        self.sent += sent + headers_out
        self.received += received + headers_in
        if self.up.rate:
            self._unpaid_up -= sent - resent
            beside = max(0, -self._unpaid_up)  # handshakes, window updates: written past the channels
            self._unpaid_up += beside
            self.up.charge(self._now(), headers_out + resent + beside)
        else:
            self._unpaid_up = 0
        if self.down.rate:
            self.down.charge(self._now(), headers_in)
