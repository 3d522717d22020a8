"""What leaves one simulated peer: the shell that carries out what `pump_core` chooses, on simulated links.

Must not know what is received or announced, nor who gets the next chunk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from math import ceil, inf
from typing import NamedTuple, Protocol

from netem.networks.profile import Host
from netem.simulator.flows import FlowNetwork
from netem.simulator.wire import wire_bytes, zeros
from p2p.broadcast.exchange_core import TICK_S
from p2p.broadcast.pump import BURST
from p2p.broadcast.pump_core import PumpCore
from p2p.broadcast.transfer import Neighbour, Transfer
from p2p.channel.stream import QUEUE_LIMIT
from p2p.limits import KIB
from p2p.protocol.versions import Chunk, Have, Parts

CHANNEL_ROOM = QUEUE_LIMIT + 64 * KIB
"""Bytes that a channel takes before they leave: its queue, and what the kernel takes (UNSENT of the libp2p adapter)."""


class Bulk(NamedTuple):
    """What a simulated bulk channel carries at once."""

    ahead: list[Parts | Have]
    """what leaves ahead of the chunk"""
    chunk: Chunk


class Loop(Protocol):
    """What a peer needs of the simulation around it."""

    network: FlowNetwork
    now: float
    moved_at: float
    """when a host last got a chunk that it did not have"""

    def at(self, time: float, action: Callable[..., object], *arguments: object) -> None:
        """Call `action` at that time."""

    def worked(self, host: str) -> float:
        """When the host will have done the work of a chunk that came now."""

    def queueing(self, host: str) -> float:
        """Seconds that a packet waits in front of the host's uplink now."""

    def completed(self, host: str) -> None:
        """The host holds every chunk, for the first time."""


class SimPump(PumpCore):
    """`delay_s`: one way, the middle of its links. `busy` is called when a chunk leaves."""

    def __init__(
        self, transfers: Mapping[bytes, Transfer], loop: Loop, host: Host, *, delay_s: float, busy: Callable[[], None]
    ) -> None:
        super().__init__(transfers)
        self._loop, self._host, self._busy = loop, host, busy
        self.blocked = False
        """nothing leaves: the host is gone, or acknowledges what it gets and hands on nothing"""
        self.up = host.access.up
        """bit/s, kept up to date by the owner"""
        self.handed = 0
        """wire bytes given to the network, less what was lost with a host"""
        self._idle = True
        """at the last look there was nothing to hand out"""
        self._mtu = loop.network.profile.mtu
        self._heads = float(wire_bytes(1, self._mtu))
        """wire bytes for a byte of payload, of the chunk that left last"""
        self._round_trip_s = 2 * delay_s
        self._left: deque[tuple[float, float]] = deque([(-inf, 0.0)])
        """(when, wire bytes that had left by then), at ticks of the last round trip"""
        self._delivered = 0.0
        self._asleep_until = -inf
        self._smoothed, self._smoothed_at = 0.0, 0.0
        """wire bytes that the kernel held back at that time, so that no burst leaves"""

    @property
    def at_rest(self) -> bool:
        """Nothing to hand out, nothing that waits for room, nothing under way."""
        return self._idle and self.handed - self._delivered < 1 and all(peer.job is None for peer in self.order.values())

    def measure(self) -> None:
        """What production reads off its sockets, some 20 times a second.

        Delivered is what left a round trip ago, parts of chunks included. A packet's round trip is longer than the shortest
        by what waits in front of this uplink, and in front of the receiver's, through which its acknowledgement comes. Of the
        links in use, the one where that is least counts.
        """
        now, samples = self._loop.now, self._left
        backlog = self._loop.network.uplink_backlog(now, self._host.name)
        samples.append((now, float(self.handed - backlog)))
        then = now - self._round_trip_s
        while len(samples) > 1 and samples[1][0] <= then:
            samples.popleft()
        (t0, delivered), (t1, after) = samples[0], samples[-1] if len(samples) == 1 else samples[1]
        if t1 > max(t0, then) and t0 > -inf:
            delivered += (after - delivered) * (then - t0) / (t1 - t0)
        busy = delivered > self._delivered or self.handed > delivered
        self._delivered = max(self._delivered, delivered)
        queueing: float | None = None
        if busy:
            queueing = self.queueing()
            least = inf
            for peer in reversed(self.order.values()):  # the one served last first
                if peer.served_at < then - TICK_S or not least:
                    break
                least = min(least, self._loop.queueing(peer.name))
            queueing += least if least < inf else 0.0
        # The uplink counts what is inside packets, as the kernel does.
        self.uplink.observe(now, int(self._delivered / self._heads), queueing)

    def queueing(self) -> float:
        """Seconds that a packet waits in front of this uplink now: for what the uplink holds up, less what the kernel holds back,
        which lets no connection go over BURST times the pace; but never more than its queue holds."""
        self._smooth(0)
        backlog = max(0, ceil(self._loop.network.uplink_queue(self._loop.now, self._host.name) - self._smoothed))
        limit = self._host.access.queue
        return (min(8 * backlog / self.up, limit) if self.up > 0 else limit) if backlog else 0.0

    def _smooth(self, handed: int) -> None:
        now = self._loop.now
        left = (now - self._smoothed_at) * BURST * self.uplink.pace * self._heads
        self._smoothed, self._smoothed_at = max(0.0, self._smoothed - left) + handed, now

    # --- what leaves -------------------------------------------------------------------------------------------------

    def drained(self, other: str) -> None:
        """The network has sent something to `other`: what waits may go, and there may be room for the next."""
        peer = self.order.get(other)
        if peer is not None and peer.job is not None and self._send(peer):
            self.wake()

    def wake(self) -> None:
        """Hand out chunks for as long as the pace allows and there are any, as production's task does."""
        now = self._loop.now
        self._idle = self.blocked
        if self.blocked or now < self._asleep_until:
            return
        while not (pause := self.pause(now)):
            peer = self.next(now)
            if peer is None:
                self._idle = True
                return
            self._busy()
            self._send(peer)
        self._asleep_until = now + pause
        self._loop.at(self._asleep_until, self.wake)

    def _send(self, peer: Neighbour) -> bool:
        """Put the neighbour's chunk into its channel if there is room."""
        assert peer.job is not None
        network, now, name, job = self._loop.network, self._loop.now, self._host.name, peer.job
        manifest = job.transfer.manifest
        payload = manifest.chunk_size(job.chunk)
        size = wire_bytes(payload, self._mtu)
        waiting = network.backlog(now, name, peer.name)
        if waiting and waiting + size > CHANNEL_ROOM and waiting * self._unsent(now) + size > CHANNEL_ROOM:
            return False
        message = Chunk(manifest.mid, job.chunk, job.duty, zeros(payload))
        if not network.send(now, name, peer.name, size, Bulk(self.ahead(peer, job), message)):
            return False  # nobody is there any more: nothing will move until that is noticed
        self.handed += size
        self._smooth(size)
        self._heads = wire_bytes(manifest.header.chunk_bytes, self._mtu) / manifest.header.chunk_bytes
        self.count_sent(job)
        peer.job = None
        return True

    def _unsent(self, now: float) -> float:
        """The part of what waits here that is still in channels: the queue in front of the uplink holds the rest."""
        backlog = self._loop.network.uplink_backlog(now, self._host.name)
        return max(0.0, 1 - self._host.access.queue * self.up / 8 / backlog) if backlog else 0.0
