"""One simulated peer: what the broadcast's shell (`pump`, `exchange`) does, over a simulated network and clock.

The session, its policy and the uplink are production's own objects; this only carries out what they decide, in the same
order and at the same times as the real shell. Must not know faults, results or when a round is over.

What it leaves out: bytes, digests and disks (a chunk costs a constant time), the trainer's encoding, credits of channels, and
everything about links but their delay: a neighbour is there or is not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Any, NamedTuple

from netem.flows import Arrival, Network
from netem.profile import Host
from p2p.broadcast.exchange import ANSWER_AFTER, GOSSIP_S, TICK_S
from p2p.broadcast.pump import LONGEST_PAUSE_S, SHORTEST_PAUSE_S
from p2p.broadcast.session import Session
from p2p.broadcast.spread import ASK_PARTS_S
from p2p.broadcast.uplink import Uplink
from p2p.channel.stream import PIECE, QUEUE_LIMIT
from p2p.limits import DEFAULT_SEGMENT, KIB

CHANNEL_ROOM = QUEUE_LIMIT + 64 * KIB
"""Bytes that a channel takes before they leave: its queue, and what the kernel takes (UNSENT of the libp2p adapter)."""

PACKET_HEAD = 52
"""Bytes of IP and TCP in a packet: 20 + 20, and 12 of timestamps."""

RECORD_HEAD = 30
"""Bytes of yamux (12) and Noise (18) in a record that holds PIECE bytes."""

CHUNK_HEAD = 55
"""Bytes of a chunk's message beside its data."""

SMALL = 100
"""Bytes of a control message. Nothing follows from it: control messages take no part in the sharing of links."""


def wire_bytes(payload: int, mtu: int) -> int:
    """What `payload` bytes of a chunk take on a link of that MTU."""
    size = payload + CHUNK_HEAD
    size += RECORD_HEAD * ceil(size / PIECE)
    return size + PACKET_HEAD * ceil(size / (mtu - PACKET_HEAD))


@dataclass(frozen=True, slots=True)
class Plan:
    """A version of one round, as the manifest cuts it: `payload` bytes in segments of DEFAULT_SEGMENT, those in chunks."""

    number: int
    payload: int
    chunk_bytes: int

    @property
    def per_segment(self) -> int:
        return -(-DEFAULT_SEGMENT // self.chunk_bytes)

    @property
    def total(self) -> int:
        whole, rest = divmod(self.payload, DEFAULT_SEGMENT)
        return whole * self.per_segment - (-rest // self.chunk_bytes)

    def size(self, chunk: int) -> int:
        segment, index = divmod(chunk, self.per_segment)
        return min(self.chunk_bytes, min(DEFAULT_SEGMENT, self.payload - segment * DEFAULT_SEGMENT) - index * self.chunk_bytes)

    def segment(self, chunk: int) -> range:
        """All chunks of the segment that this one is in."""
        start = chunk - chunk % self.per_segment
        return range(start, min(start + self.per_segment, self.total))


class Chunk(NamedTuple):
    round: int
    index: int
    seed: bool


class Subscribe(NamedTuple):
    round: int
    have: Sequence[int]


class Have(NamedTuple):
    round: int
    chunks: Sequence[int]


class Want(NamedTuple):
    round: int
    chunks: Sequence[int]


class Relieve(NamedTuple):
    round: int
    chunks: Sequence[int]


class GetParts(NamedTuple):
    round: int


class Parts(NamedTuple):
    """All records of the manifest."""

    round: int


Message = Subscribe | Have | Want | Relieve | GetParts | Parts


class Loop:
    """What a peer needs of the simulation around it."""

    network: Network
    now: float
    process_s: float
    moved_at: float
    """when a host last got a chunk that it did not have"""

    def at(self, time: float, action: Callable[..., None], *arguments: object) -> None:
        """Call `action` at that time."""
        raise NotImplementedError

    def completed(self, peer: SimPeer) -> None:
        """It holds every chunk, for the first time."""
        raise NotImplementedError


class _Link:
    __slots__ = ("job", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.job: Chunk | None = None
        """waits for room in the channel"""


class SimPeer:
    """`source`: the source's name. `delay_s`: one way, the middle of its links. `phase`: seconds to its first tick."""

    def __init__(self, loop: Loop, host: Host, source: str, *, policy: str, delay_s: float, phase: float) -> None:
        self.loop, self.host, self.name, self.source, self.policy = loop, host, host.name, source, policy
        self.withholds = False
        """it acknowledges what it gets, and hands on nothing"""
        self.alive = True
        self.uplink = Uplink()
        self.up = host.access.up
        """bit/s, kept up to date by the owner"""
        self._round_trip_s = 2 * delay_s
        self.memory: dict[str, float] = {}
        self.links: dict[str, _Link] = {}
        """neighbours, the one served longest ago first"""
        self.plan: Plan | None = None
        self.session: Session | None = None
        self.sent_bytes = self.duplicate_bytes = 0
        """payload of this round's chunks"""
        self.handed = 0
        """wire bytes given to the network, less what was lost with a host"""
        self._per_payload = 1.0
        self._left: deque[tuple[float, float]] = deque([(-inf, 0.0)])
        """(when, wire bytes that had left by then), at ticks of the last round trip"""
        self._delivered = 0.0
        self._asleep_until = -inf
        self._busy_until = -inf
        self._segments: set[int] = set()
        self._gossip: list[int] = []
        self._gossip_at = 0.0
        self._unanswered: dict[str, list[int]] = {}
        self._greeted: set[str] = set()
        self._asked_parts = -1e9
        self._ask_parts_after = ASK_PARTS_S[0]
        self._on: dict[type, Callable[[Session, str, Any], None]] = {
            Subscribe: self._on_subscribe, Have: self._on_have, Want: self._on_want, Relieve: self._on_relieve,
            GetParts: self._on_get_parts, Parts: self._on_parts,
        }  # fmt: skip
        loop.at(phase, self.tick)

    @property
    def is_source(self) -> bool:
        return self.name == self.source

    # --- neighbours --------------------------------------------------------------------------------------------------

    def link(self, other: str) -> None:
        self.links[other] = _Link(other)

    def unlink(self, other: str) -> None:
        if self.links.pop(other, None) is not None and self.session is not None:
            self.session.leave(other, self.loop.now)
            self.pump()

    # --- versions ----------------------------------------------------------------------------------------------------

    def offer(self, plan: Plan) -> None:
        """The source makes a version, all of it at once."""
        now = self.loop.now
        session = self._open(plan)
        for other in self.links:
            session.join(other, (), now)
        session.learn(range(plan.total), now)
        for chunk in range(plan.total):
            session.hold(chunk, None, seed=False, now=now)
        session.close(plan.total)
        self.pump()

    def take(self, plan: Plan, *, catching: bool) -> None:
        """Take part in a version that was announced. `catching`: it joins late, and its records are there."""
        now = self.loop.now
        session = self._open(plan)
        session.catching = catching
        for other in self.links:
            if other == self.source or not catching:
                session.join(other, (), now)
            self._post(other, Subscribe(plan.number, ()))
        if catching:
            self._learn_all()

    def _open(self, plan: Plan) -> Session:
        self.plan = plan
        self.session = session = Session(
            me=self.name, source=None if self.is_source else self.source, now=self.loop.now, policy=self.policy,
            chunk_bytes=plan.chunk_bytes, memory=self.memory,
        )  # fmt: skip
        self.sent_bytes = self.duplicate_bytes = 0
        self._per_payload = plan.chunk_bytes / wire_bytes(plan.chunk_bytes, self.loop.network.profile.mtu)
        self._segments.clear()
        self._gossip, self._gossip_at = [], 0.0
        self._unanswered.clear()
        self._greeted.clear()
        self._asked_parts, self._ask_parts_after = -1e9, ASK_PARTS_S[0]
        for link in self.links.values():
            link.job = None
        return session

    def _learn(self, segment: range) -> None:
        assert self.session is not None and self.plan is not None
        if segment.start not in self._segments:
            self._segments.add(segment.start)
            self.session.learn(segment, self.loop.now)
            self._ask_parts_after = ASK_PARTS_S[0]
            if len(self._segments) == -(-self.plan.total // self.plan.per_segment):
                self.session.close(self.plan.total)

    def _learn_all(self) -> None:
        assert self.plan is not None
        for start in range(0, self.plan.total, self.plan.per_segment):
            self._learn(self.plan.segment(start))

    # --- messages ----------------------------------------------------------------------------------------------------

    def _post(self, other: str, message: Message) -> None:
        self.loop.network.send_small(self.loop.now, self.name, other, SMALL, message)

    def receive(self, arrival: Arrival) -> None:
        """What the network brought. Chunks are verified one after another, and acted on then."""
        message: Any = arrival.tag
        session, plan = self.session, self.plan
        if session is None or plan is None or message.round != plan.number or arrival.source not in self.links:
            return
        if type(message) is Chunk:
            self._busy_until = max(self._busy_until, self.loop.now) + self.loop.process_s
            self.loop.at(self._busy_until, self._on_chunk, arrival.source, message)
        else:
            self._on[type(message)](session, arrival.source, message)

    def _on_chunk(self, source: str, message: Chunk) -> None:
        session, plan = self.session, self.plan
        if not self.alive or session is None or plan is None or plan.number != message.round or source not in self.links:
            return
        now, chunk = self.loop.now, message.index
        self._learn(plan.segment(chunk))
        if chunk in session.held:
            session.hold(chunk, source, seed=False, now=now)
            self.duplicate_bytes += plan.size(chunk)
            self._post(source, Have(plan.number, (chunk,)))
            return
        session.hold(chunk, source, seed=message.seed and source == self.source, now=now)
        self.loop.moved_at = now
        waiting = self._unanswered.setdefault(source, [])
        waiting.append(chunk)
        if len(waiting) >= ANSWER_AFTER:
            self._post(source, Have(plan.number, tuple(waiting)))
            waiting.clear()
        if session.complete:
            self.loop.completed(self)
        self.pump()

    def _on_have(self, session: Session, source: str, message: Have) -> None:
        session.join(source, (), self.loop.now)
        session.peer_has(source, message.chunks, self.loop.now)
        self.pump()

    def _on_want(self, session: Session, source: str, message: Want) -> None:
        session.join(source, (), self.loop.now)
        session.peer_wants(source, message.chunks, self.loop.now)
        self.pump()

    def _on_subscribe(self, session: Session, source: str, message: Subscribe) -> None:
        session.join(source, message.have, self.loop.now)
        if not self.is_source and source not in self._greeted:
            self._greeted.add(source)
            self._post(source, Have(message.round, tuple(session.held)))
        self.pump()

    def _on_relieve(self, session: Session, source: str, message: Relieve) -> None:
        if source == self.source:
            session.relieve(message.chunks)

    def _on_get_parts(self, session: Session, source: str, message: GetParts) -> None:
        self._post(source, Parts(message.round))

    def _on_parts(self, session: Session, source: str, message: Parts) -> None:
        self._learn_all()

    # --- timers ------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        if not self.alive:
            return
        now, session = self.loop.now, self.session
        self._measure(now)
        if session is not None:
            session.tick(now)
            self._tell(session, now)
            if not self.is_source:
                assert self.plan is not None
                for other, chunks in session.wants(now).items():
                    self._post(other, Want(self.plan.number, chunks))
                self._ask_for_parts(session, now)
        self.pump()
        self.loop.at(now + TICK_S, self.tick)

    def _tell(self, session: Session, now: float) -> None:
        assert self.plan is not None
        news = session.news()
        if news and self.source in self.links:
            self._post(self.source, Have(self.plan.number, news))
        self._gossip.extend(news)
        if self._gossip and (now >= self._gossip_at or session.complete):
            message = Have(self.plan.number, self._gossip)
            for other in session.peers():
                if other != self.source:
                    self._post(other, message)
            self._gossip, self._gossip_at = [], now + GOSSIP_S
            self._unanswered.clear()

    def _ask_for_parts(self, session: Session, now: float) -> None:
        if session.total is None and session.missing == 0 and now - self._asked_parts > self._ask_parts_after:
            assert self.plan is not None
            if self._asked_parts > 0 and self.links:
                self._post(self.source if self.source in self.links else next(iter(self.links)), GetParts(self.plan.number))
                self._ask_parts_after = min(2 * self._ask_parts_after, ASK_PARTS_S[1])
            self._asked_parts = now

    def _measure(self, now: float) -> None:
        """What production reads off its sockets. Delivered is what left a round trip ago; what waits is a queue in front of
        the uplink, and nowhere else."""
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
        limit = self.host.access.queue
        queueing = (min(8 * backlog / self.up, limit) if self.up > 0 else limit) if busy else None
        self.uplink.observe(now, int(self._delivered * self._per_payload), queueing)

    # --- what leaves -------------------------------------------------------------------------------------------------

    def sent(self, other: str) -> None:
        """The network has sent something to `other`: what waits may go, and there may be room for the next."""
        link = self.links.get(other)
        if link is not None and link.job is not None and self._enter(link):
            self.pump()

    def pump(self) -> None:
        """Hand out chunks for as long as the pace allows and the session knows any."""
        loop, session, uplink = self.loop, self.session, self.uplink
        now = loop.now
        if now < self._asleep_until or self.withholds or not self.alive:
            return
        while True:
            pause = uplink.wait(now)
            if pause > SHORTEST_PAUSE_S:
                self._asleep_until = now + min(pause, LONGEST_PAUSE_S)
                loop.at(self._asleep_until, self.pump)
                return
            ready = [name for name, link in self.links.items() if link.job is None]
            found = session.next(ready, now) if ready and session is not None else None
            if found is None:
                if len(ready) == len(self.links):
                    uplink.idle(now)
                return
            assert session is not None and self.plan is not None
            name, chunk, seed = found
            link = self.links[name] = self.links.pop(name)
            link.job = Chunk(self.plan.number, chunk, seed)
            uplink.spent(now, self.plan.chunk_bytes)
            self._enter(link)
            for whom, taken in session.relieved():
                if whom in self.links:
                    self._post(whom, Relieve(self.plan.number, (taken,)))

    def _enter(self, link: _Link) -> bool:
        """Put the waiting chunk into its channel if there is room."""
        assert self.plan is not None and link.job is not None
        network, now, payload = self.loop.network, self.loop.now, self.plan.size(link.job.index)
        size = wire_bytes(payload, network.profile.mtu)
        waiting = network.backlog(now, self.name, link.name)
        if waiting and waiting + size > CHANNEL_ROOM and waiting * self._unsent(now) + size > CHANNEL_ROOM:
            return False
        network.send(now, self.name, link.name, size, link.job)
        if not network.backlog(now, self.name, link.name):
            return False  # nobody is there any more: nothing will move until that is noticed
        self.handed += size
        self.sent_bytes += payload
        link.job = None
        return True

    def _unsent(self, now: float) -> float:
        """The part of what waits here that is still in channels: the queue in front of the uplink holds the rest."""
        backlog = self.loop.network.uplink_backlog(now, self.name)
        return max(0.0, 1 - self.host.access.queue * self.up / 8 / backlog) if backlog else 0.0
