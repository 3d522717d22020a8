"""Sessions of many peers driven by a tiny deterministic event loop: chunks are numbers, time is a float.

Who gets the next chunk and who is told what is production's (`PumpCore`, `Gossip`). What else the exchange does around a session
is done here in the fewest lines that keep what sessions can tell apart: one uplink per peer that carries one chunk at a time,
channels that take few chunks ahead, messages that may get lost.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

from p2p.broadcast.exchange_core import TICK_S
from p2p.broadcast.gossip import Gossip
from p2p.broadcast.leases import MAX_WANTS, MAX_WANTS_PER_PEER
from p2p.broadcast.policies.registry import DEFAULT
from p2p.broadcast.pump_core import PumpCore
from p2p.broadcast.session import MAX_INFLIGHT, Session
from p2p.broadcast.transfer import Neighbour, Traffic, Transfer
from p2p.channel.port import Channel
from p2p.version import Version

SOURCE = "source"

CHANNEL_CHUNKS = 6
"""Chunks on their way to one neighbour; at that, its channel has no room for another."""


class _Pump(PumpCore):
    """Of one session. `Sim.pump` carries out what it chooses, one chunk at a time instead of at a pace."""

    def __init__(self, session: Session) -> None:
        of_chunk = session.chunk_bytes
        manifest: Any = SimpleNamespace(
            version=Version(1, 1), mid=b"mid", chunk_size=lambda chunk: of_chunk, size=1000 * of_chunk
        )
        super().__init__({manifest.mid: Transfer(manifest, session, Traffic(), wanted=True)})

    def wake(self) -> None:
        """The Sim looks after every event."""


@dataclass
class SimPeer:
    name: str
    session: Session
    carrier: _Pump
    chunk_s: float
    """seconds its uplink needs for a chunk"""
    withholds: bool = False
    """acknowledges and announces, and hands on nothing"""
    down_s: float = 0.0
    """seconds its downlink needs for a chunk; what comes faster waits in order"""
    down_free: float = 0.0
    full: bool = False
    """its disk keeps nothing: what arrives is neither held nor acknowledged"""
    deaf: bool = False
    """never says that it holds anything"""
    alive: bool = True
    busy: bool = False
    on_way: Counter = field(default_factory=Counter)
    """chunks that its channel to a neighbour holds"""
    news: Gossip = field(default_factory=Gossip)
    got_from: Counter = field(default_factory=Counter)
    sent: Counter = field(default_factory=Counter)
    arrived: int = 0
    """chunks that reached it, wanted or not"""
    done_at: float | None = None


class Sim:
    """Everybody is linked to everybody. `loss` is the chance that a chunk never arrives; `deafness`, that a Have or a
    Relieve does not."""

    def __init__(
        self, seed: int, chunks: int, *, latency: float = 0.02, loss: float = 0.0, deafness: float = 0.0, policy: str = DEFAULT
    ) -> None:
        self.random, self.chunks, self.latency, self.loss = random.Random(seed), chunks, latency, loss
        self.deafness, self.policy = deafness, policy
        self.now = 0.0
        self.peers: dict[str, SimPeer] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.sealed = False
        self.not_before = 0.0
        """nothing counts as finished earlier: more is to happen"""

    # --- the loop

    def at(self, time: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (time, self._count, action))

    def run(self, until: float) -> None:
        """To the first moment when every live peer is complete, or to `until`."""
        while self._events and self._events[0][0] <= until and not self.finished:
            self.now, _, action = heapq.heappop(self._events)
            action()

    @property
    def finished(self) -> bool:
        return self.sealed and self.now >= self.not_before and all(p.session.complete for p in self.peers.values() if p.alive)

    def message(self, src: str, dst: str, action: Callable[[SimPeer], None]) -> None:
        """What `action` does at `dst`, one latency later, if both still live."""

        def deliver() -> None:
            if self.peers[src].alive and self.peers[dst].alive:
                action(self.peers[dst])
                self.pump(dst)

        self.at(self.now + self.latency, deliver)

    # --- peers

    def add(
        self,
        name: str,
        chunk_s: float,
        *,
        withholds: bool = False,
        catching: bool = False,
        down_s: float = 0.0,
        holds: Iterable[int] = (),
        memory: dict[str, float] | None = None,
    ) -> SimPeer:
        """`holds`: chunks that it has from the start, and says so."""
        source = None if name == SOURCE else SOURCE
        session = Session(me=name, source=source, now=self.now, catching=catching, policy=self.policy, memory=memory)
        peer = self.peers[name] = SimPeer(name, session, _Pump(session), chunk_s, withholds, down_s)
        for chunk in holds:
            session.hold(chunk, None, duty=False, now=self.now)
        mine = frozenset(session.held)
        for other in self.others(name):
            peer.session.join(other.name, (), self.now)
            self._link(peer, other.name)
            have = frozenset(other.session.held)
            if other.name != SOURCE:  # it answers our Subscribe with what it holds
                self.message(other.name, name, lambda p, o=other.name, h=have: p.session.peer_has(o, h, self.now))
            other.session.join(name, (), self.now)
            self._link(other, name)
            self.message(name, other.name, lambda p: p.session.peer_has(name, mine, self.now))
        if self.sealed and name != SOURCE:
            session.learn(range(self.chunks), self.now)
            session.close(self.chunks)
        self.at(self.now + TICK_S * (1 + self.random.random()), lambda: self.tick(name))
        return peer

    def _link(self, peer: SimPeer, other: str) -> None:
        peer.carrier.enter(Neighbour(other, partial(self._relieve, peer.name, other), Channel(), self.now))

    def _relieve(self, src: str, whom: str, message: Any) -> None:
        assert src == SOURCE
        if self.random.random() >= self.deafness:
            self.message(src, whom, lambda p: p.session.relieve(message.chunks))

    def kill(self, name: str, noticed_after: float = 0.1) -> None:
        self.peers[name].alive = False
        for other in self.others(name):
            self.at(self.now + noticed_after, lambda o=other: self._left(o, name))

    def _left(self, peer: SimPeer, gone: str) -> None:
        peer.session.leave(gone, self.now)
        peer.carrier.drop(peer.carrier.order[gone])
        self.pump(peer.name)

    def others(self, name: str) -> list[SimPeer]:
        return [p for p in self.peers.values() if p.name != name and p.alive]

    def make(self, every: float) -> None:
        """The source makes one chunk after another, then seals."""
        for chunk in range(self.chunks):
            self.at(self.now + every * chunk, lambda c=chunk: self._made(c))
        self.at(self.now + every * self.chunks, self._seal)

    def _made(self, chunk: int) -> None:
        session = self.peers[SOURCE].session
        session.learn([chunk], self.now)
        session.hold(chunk, None, duty=False, now=self.now)
        self.pump(SOURCE)

    def _seal(self) -> None:
        self.sealed = True
        self.peers[SOURCE].session.close(self.chunks)
        for peer in self.others(SOURCE):
            self.message(SOURCE, peer.name, self._sealed)

    def _sealed(self, peer: SimPeer) -> None:
        peer.session.learn(range(self.chunks), self.now)
        peer.session.close(self.chunks)

    # --- what the exchange does

    def tick(self, name: str) -> None:
        peer = self.peers[name]
        if not peer.alive:
            return
        peer.session.tick(self.now)
        self._tell(peer)
        for other, chunks in peer.session.wants(self.now).items():
            assert 0 < len(chunks) <= MAX_WANTS_PER_PEER
            self.message(name, other, lambda p, c=tuple(chunks): p.session.peer_wants(name, c, self.now))
        # Bounds on what is remembered: no message shows it.
        pulls = peer.session._pulls
        suppliers, first = pulls._suppliers.values(), pulls._first  # as above
        assert len(pulls.leases) == sum(len(s.asked) for s in suppliers) <= MAX_WANTS
        assert all(len(s.asked) <= MAX_WANTS_PER_PEER for s in suppliers)
        assert len(first) == sum(len(s.due) for s in suppliers)
        self.pump(name)
        self.at(self.now + TICK_S, lambda: self.tick(name))

    def _tell(self, peer: SimPeer) -> None:
        for others, chunks in peer.news.due(peer.session, self.now, peer.session.peers()):
            for other in others:
                self._have(peer, other, chunks)

    def _have(self, peer: SimPeer, to: str, chunks: Iterable[int]) -> None:
        told = tuple(chunks)
        if told and not peer.deaf and self.random.random() >= self.deafness:
            self.message(peer.name, to, lambda p: p.session.peer_has(peer.name, told, self.now))

    def pump(self, name: str) -> None:
        """Start the next transfer if the uplink is free."""
        peer = self.peers[name]
        if peer.busy or not peer.alive or peer.withholds:
            return
        to = peer.carrier.next(self.now)
        if to is None:
            return
        assert to.job is not None
        other, _, chunk, duty = to.name, *to.job
        assert peer.on_way[other] < CHANNEL_CHUNKS and chunk in peer.session.held and (name == SOURCE or not duty)
        assert len(peer.session._peers[other].sent) <= MAX_INFLIGHT  # a bound on what is remembered
        peer.on_way[other] += 1
        self._make_room(peer, other)
        peer.busy = True
        self.at(self.now + peer.chunk_s, lambda: self._sent(name, other, chunk, duty))

    def _make_room(self, peer: SimPeer, other: str) -> None:
        """Another chunk may go to `other` if its channel has room."""
        if peer.on_way[other] < CHANNEL_CHUNKS and other in peer.carrier.order:
            peer.carrier.order[other].job = None

    def _sent(self, src: str, dst: str, chunk: int, duty: int) -> None:
        sender = self.peers[src]
        sender.busy = False
        if not sender.alive:
            return
        sender.sent[chunk] += 1
        to = self.peers[dst]
        to.down_free = max(self.now, to.down_free) + to.down_s
        lost = self.random.random() < self.loss
        self.at(to.down_free + self.latency, lambda: self._arrived(sender, to, chunk, duty, lost))
        self.pump(src)

    def _arrived(self, sender: SimPeer, peer: SimPeer, chunk: int, duty: int, lost: bool) -> None:
        if not (sender.alive and peer.alive):
            return
        sender.on_way[peer.name] -= 1
        self._make_room(sender, peer.name)
        self.pump(sender.name)
        if lost:
            return
        peer.arrived += 1
        if peer.full:
            return
        session, src = peer.session, sender.name
        session.learn([chunk], self.now)
        if session.hold(chunk, src, duty=duty if src == SOURCE else 0, now=self.now):
            peer.got_from[src] += 1
            self._have(peer, src, peer.news.came_from(src, chunk))
        else:
            self._have(peer, src, [chunk])
        if session.complete and peer.done_at is None:
            peer.done_at = self.now
        self.pump(peer.name)
