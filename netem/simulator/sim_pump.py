"""What leaves one simulated peer, as production's `pump` does it: one chunk after another, at the pace of its own uplink.

Must not know what is received or announced; the uplink's model, the session and its policy are production's own objects.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf

from netem.networks.profile import Host
from netem.simulator.flows import FlowNetwork
from netem.simulator.wire import Message, SimChunk, SimRelieve, SimVersion, wire_bytes
from p2p.broadcast.exchange import TICK_S
from p2p.broadcast.pump import LONGEST_PAUSE_S, SHORTEST_PAUSE_S
from p2p.broadcast.session import Session
from p2p.broadcast.uplink import Uplink
from p2p.channel.stream import QUEUE_LIMIT
from p2p.limits import KIB

CHANNEL_ROOM = QUEUE_LIMIT + 64 * KIB
"""Bytes that a channel takes before they leave: its queue, and what the kernel takes (UNSENT of the libp2p adapter)."""


class Loop:
    """What a peer needs of the simulation around it."""

    network: FlowNetwork
    now: float
    moved_at: float
    """when a host last got a chunk that it did not have"""

    def at(self, time: float, action: Callable[..., object], *arguments: object) -> None:
        """Call `action` at that time."""
        raise NotImplementedError

    def worked(self, host: str) -> float:
        """When the host will have done the work of a chunk that came now."""
        raise NotImplementedError

    def queueing(self, host: str) -> float:
        """Seconds that a packet waits in front of the host's uplink now."""
        raise NotImplementedError

    def completed(self, host: str) -> None:
        """The host holds every chunk, for the first time."""
        raise NotImplementedError


class SimLink:
    """A neighbour: the channel to it, with one slot in front of it."""

    __slots__ = ("at", "job", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.at = -inf
        """when a chunk was last put in"""
        self.job: SimChunk | None = None
        """waits for room in the channel"""


class SimPump:
    """`delay_s`: one way, the middle of its links."""

    def __init__(self, loop: Loop, host: Host, delay_s: float) -> None:
        self.loop, self.host, self.name = loop, host, host.name
        self.alive = True
        self.withholds = False
        """it acknowledges what it gets, and hands on nothing"""
        self.uplink = Uplink()
        self.up = host.access.up
        """bit/s, kept up to date by the owner"""
        self.links: dict[str, SimLink] = {}
        """neighbours, the one served longest ago first"""
        self._waiting: set[str] = set()
        """neighbours with a chunk that waits for room; some may be gone"""
        self.plan: SimVersion | None = None
        self.session: Session | None = None
        self.sent_bytes = 0
        """payload of this round's chunks"""
        self.handed = 0
        """wire bytes given to the network, less what was lost with a host"""
        self._round_trip_s = 2 * delay_s
        self._left: deque[tuple[float, float]] = deque([(-inf, 0.0)])
        """(when, wire bytes that had left by then), at ticks of the last round trip"""
        self._delivered = 0.0
        self._heads = float(wire_bytes(1, loop.network.profile.mtu))
        self._asleep_until = -inf

    def post(self, other: str, message: Message) -> None:
        raise NotImplementedError

    def wake_up(self) -> None:
        """There is work: no more skipping of ticks."""
        raise NotImplementedError

    @property
    def all_delivered(self) -> bool:
        return self.handed - self._delivered < 1

    def start(self, plan: SimVersion, session: Session) -> None:
        """What was not handed to a channel yet belongs to the past."""
        self.plan, self.session, self.sent_bytes = plan, session, 0
        self._heads = wire_bytes(plan.chunk_bytes, self.loop.network.profile.mtu) / plan.chunk_bytes
        for link in self.links.values():
            link.job = None
        self._waiting.clear()

    def measure(self, now: float) -> None:
        """What production reads off its sockets, some 20 times a second.

        Delivered is what left a round trip ago, parts of chunks included. A packet's round trip is longer than the shortest
        by what waits in front of this uplink, and in front of the receiver's, through which its acknowledgement comes. Of the
        links in use, the one where that is least counts.
        """
        network, samples = self.loop.network, self._left
        backlog = network.uplink_backlog(now, self.name)
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
            queueing = self._wait_s(backlog)
            least = inf
            for name in reversed(self.links):  # the one served last first
                if self.links[name].at < then - TICK_S:
                    break
                least = min(least, self.loop.queueing(name))
                if not least:
                    break
            queueing += least if least < inf else 0.0
        # The uplink counts what is inside packets, as the kernel does.
        self.uplink.observe(now, int(self._delivered / self._heads), queueing)

    def queueing(self, now: float) -> float:
        """Seconds that a packet waits in front of this uplink: what is under way from here in all, but never more than its
        queue holds."""
        return self._wait_s(self.loop.network.uplink_backlog(now, self.name))

    def _wait_s(self, backlog: int) -> float:
        limit = self.host.access.queue
        return (min(8 * backlog / self.up, limit) if self.up > 0 else limit) if backlog else 0.0

    # --- what leaves -------------------------------------------------------------------------------------------------

    def sent(self, other: str) -> None:
        """The network has sent something to `other`: what waits may go, and there may be room for the next."""
        link = self.links.get(other)
        if link is not None and link.job is not None and self._enter(link):
            self.pump()

    def pump(self) -> bool:
        """Hand out chunks for as long as the pace allows and the session knows any. True when there is nothing to do."""
        loop, session, uplink = self.loop, self.session, self.uplink
        now = loop.now
        if self.withholds or not self.alive:
            return True
        if now < self._asleep_until:
            return False
        while True:
            pause = uplink.wait(now)
            if pause > SHORTEST_PAUSE_S:
                self._asleep_until = now + min(pause, LONGEST_PAUSE_S)
                loop.at(self._asleep_until, self.pump)
                return False
            ready = [name for name, link in self.links.items() if link.job is None] if self._waiting else list(self.links)
            found = session.next(ready, now) if ready and session is not None else None
            if found is None:
                if len(ready) < len(self.links):
                    return False
                uplink.idle(now)
                return True
            self.wake_up()
            assert session is not None and self.plan is not None
            name, chunk, duty = found
            link = self.links[name] = self.links.pop(name)
            link.job = SimChunk(self.plan.number, chunk, duty)
            self._waiting.add(name)
            uplink.spent(now, self.plan.chunk_bytes)
            self._enter(link)
            for whom, taken in session.relieved():
                if whom in self.links:
                    self.post(whom, SimRelieve(self.plan.number, (taken,)))

    def _enter(self, link: SimLink) -> bool:
        """Put the waiting chunk into its channel if there is room."""
        assert self.plan is not None and link.job is not None
        network, now, payload = self.loop.network, self.loop.now, self.plan.size(link.job.chunk)
        size = wire_bytes(payload, network.profile.mtu)
        waiting = network.backlog(now, self.name, link.name)
        if waiting and waiting + size > CHANNEL_ROOM and waiting * self._unsent(now) + size > CHANNEL_ROOM:
            return False
        network.send(now, self.name, link.name, size, link.job)
        if not network.backlog(now, self.name, link.name):
            return False  # nobody is there any more: nothing will move until that is noticed
        link.at = now
        self.handed += size
        self.sent_bytes += payload
        link.job = None
        self._waiting.discard(link.name)
        return True

    def _unsent(self, now: float) -> float:
        """The part of what waits here that is still in channels: the queue in front of the uplink holds the rest."""
        backlog = self.loop.network.uplink_backlog(now, self.name)
        return max(0.0, 1 - self.host.access.queue * self.up / 8 / backlog) if backlog else 0.0
