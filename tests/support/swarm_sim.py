"""Sessions of many peers driven by a tiny deterministic event loop: chunks are numbers, time is a float.

What the exchange and its pump do around a session is done here in the fewest lines that keep what sessions can tell apart:
one uplink per peer that carries one chunk at a time, channels that take few chunks ahead, news in batches.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from p2p.broadcast.exchange import TICK_S
from p2p.broadcast.gossip import ANSWER_AFTER, GOSSIP_S
from p2p.broadcast.leases import MAX_WANTS, MAX_WANTS_PER_PEER
from p2p.broadcast.policies.registry import DEFAULT
from p2p.broadcast.session import MAX_INFLIGHT, Session

SOURCE = "source"

CHANNEL_CHUNKS = 6
"""Chunks on their way to one neighbour; at that, its channel has no room for another."""


@dataclass
class SimPeer:
    name: str
    session: Session
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
    order: list[str] = field(default_factory=list)
    """neighbours, the one served longest ago first"""
    on_way: Counter = field(default_factory=Counter)
    """chunks that its channel to a neighbour holds"""
    gossip: list[int] = field(default_factory=list)
    gossip_at: float = 0.0
    unanswered: dict[str, list[int]] = field(default_factory=dict)
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
        peer = self.peers[name] = SimPeer(name, session, chunk_s, withholds, down_s)
        for chunk in holds:
            session.hold(chunk, None, duty=False, now=self.now)
        mine = frozenset(session.held)
        for other in self.others(name):
            peer.session.join(other.name, (), self.now)
            peer.order.append(other.name)
            have = frozenset(other.session.held)
            if other.name != SOURCE:  # it answers our Subscribe with what it holds
                self.message(other.name, name, lambda p, o=other.name, h=have: p.session.peer_has(o, h, self.now))
            other.session.join(name, (), self.now)
            other.order.append(name)
            self.message(name, other.name, lambda p: p.session.peer_has(name, mine, self.now))
        if self.sealed and name != SOURCE:
            session.learn(range(self.chunks), self.now)
            session.close(self.chunks)
        self.at(self.now + TICK_S * (1 + self.random.random()), lambda: self.tick(name))
        return peer

    def kill(self, name: str, noticed_after: float = 0.1) -> None:
        self.peers[name].alive = False
        for other in self.others(name):
            self.at(self.now + noticed_after, lambda o=other: self._left(o, name))

    def _left(self, peer: SimPeer, gone: str) -> None:
        peer.session.leave(gone, self.now)
        peer.order.remove(gone)
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
        pulls = peer.session._pulls
        assert len(pulls.leases) == sum(len(s.asked) for s in pulls._suppliers.values()) <= MAX_WANTS
        assert all(len(s.asked) <= MAX_WANTS_PER_PEER for s in pulls._suppliers.values())
        assert len(pulls._first) == sum(len(s.due) for s in pulls._suppliers.values())
        self.pump(name)
        self.at(self.now + TICK_S, lambda: self.tick(name))

    def _tell(self, peer: SimPeer) -> None:
        """The source hears at each tick, the others less often."""
        news = peer.session.news()
        if SOURCE in peer.session.peers():
            self._have(peer, SOURCE, news)
        peer.gossip += news
        if peer.gossip and (self.now >= peer.gossip_at or peer.session.complete):
            for other in peer.session.peers():
                if other != SOURCE:
                    self._have(peer, other, peer.gossip)
            peer.gossip, peer.gossip_at = [], self.now + GOSSIP_S
            peer.unanswered.clear()

    def _have(self, peer: SimPeer, to: str, chunks: Iterable[int]) -> None:
        told = tuple(chunks)
        if told and not peer.deaf and self.random.random() >= self.deafness:
            self.message(peer.name, to, lambda p: p.session.peer_has(peer.name, told, self.now))

    def pump(self, name: str) -> None:
        """Start the next transfer if the uplink is free."""
        peer = self.peers[name]
        if peer.busy or not peer.alive or peer.withholds:
            return
        ready = [other for other in peer.order if peer.on_way[other] < CHANNEL_CHUNKS]
        found = peer.session.next(ready, self.now) if ready else None
        if found is None:
            return
        other, chunk, seed = found
        assert other in ready and chunk in peer.session.held and (name == SOURCE or not seed)
        assert len(peer.session._peers[other].sent) <= MAX_INFLIGHT
        peer.order.remove(other)
        peer.order.append(other)
        peer.on_way[other] += 1
        peer.busy = True
        self.at(self.now + peer.chunk_s, lambda: self._sent(name, other, chunk, seed))
        for whom, taken in peer.session.relieved():
            assert name == SOURCE
            if self.random.random() >= self.deafness:
                self.message(name, whom, lambda p, c=taken: p.session.relieve([c]))

    def _sent(self, src: str, dst: str, chunk: int, seed: bool) -> None:
        sender = self.peers[src]
        sender.busy = False
        if not sender.alive:
            return
        sender.sent[chunk] += 1
        to = self.peers[dst]
        to.down_free = max(self.now, to.down_free) + to.down_s
        lost = self.random.random() < self.loss
        self.at(to.down_free + self.latency, lambda: self._arrived(sender, to, chunk, seed, lost))
        self.pump(src)

    def _arrived(self, sender: SimPeer, peer: SimPeer, chunk: int, seed: bool, lost: bool) -> None:
        if not (sender.alive and peer.alive):
            return
        sender.on_way[peer.name] -= 1
        self.pump(sender.name)
        if lost:
            return
        peer.arrived += 1
        if peer.full:
            return
        session, src = peer.session, sender.name
        session.learn([chunk], self.now)
        if session.hold(chunk, src, duty=seed and src == SOURCE, now=self.now):
            peer.got_from[src] += 1
            waiting = peer.unanswered.setdefault(src, [])
            waiting.append(chunk)
            if len(waiting) >= ANSWER_AFTER:
                self._have(peer, src, waiting)
                waiting.clear()
        else:
            self._have(peer, src, [chunk])
        if session.complete and peer.done_at is None:
            peer.done_at = self.now
        self.pump(peer.name)
