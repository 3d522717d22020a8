"""Sessions of many peers driven by a tiny deterministic event loop: chunks are numbers, time is a float."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from p2p.broadcast.leases import MAX_INFLIGHT, MAX_WANTS, MAX_WANTS_PER_PEER
from p2p.broadcast.session import Session

SOURCE = "source"
TICK_S = 0.05


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
    alive: bool = True
    busy: bool = False
    turn: int = 0
    got_from: Counter = field(default_factory=Counter)
    sent: Counter = field(default_factory=Counter)
    arrived: int = 0
    """chunks that reached it, wanted or not"""
    done_at: float | None = None


class Sim:
    """Everybody is linked to everybody. `loss` is the chance that a chunk never arrives."""

    def __init__(self, seed: int, chunks: int, *, latency: float = 0.02, loss: float = 0.0) -> None:
        self.random, self.chunks, self.latency, self.loss = random.Random(seed), chunks, latency, loss
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

    def add(self, name: str, chunk_s: float, *, withholds: bool = False, catching: bool = False, down_s: float = 0.0) -> SimPeer:
        session = Session(is_source=name == SOURCE, source=None if name == SOURCE else SOURCE, now=self.now, catching=catching)
        peer = self.peers[name] = SimPeer(name, session, chunk_s, withholds, down_s)
        for other in self.others(name):
            peer.session.join(other.name, (), self.now)
            have = frozenset(other.session.held)
            if other.name != SOURCE:  # it answers our Subscribe with what it holds
                self.message(other.name, name, lambda p, o=other.name, h=have: p.session.peer_has(o, h, self.now))
            other.session.join(name, (), self.now)
        if self.sealed and name != SOURCE:
            session.learn(range(self.chunks), self.now)
            session.close(self.chunks)
        self.at(self.now + TICK_S * (1 + self.random.random()), lambda: self.tick(name))
        return peer

    def kill(self, name: str, noticed_after: float = 0.1) -> None:
        self.peers[name].alive = False
        for other in self.others(name):
            self.at(self.now + noticed_after, lambda o=other: (o.session.leave(name), self.pump(o.name)))

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
        session.hold(chunk, None, seed=False, now=self.now)
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
        news = peer.session.news()
        for other in peer.session.peers() if news else ():
            self.message(name, other, lambda p: p.session.peer_has(name, news, self.now))
        for other, chunks in peer.session.wants(self.now).items():
            assert 0 < len(chunks) <= MAX_WANTS_PER_PEER
            self.message(name, other, lambda p, c=tuple(chunks): p.session.peer_wants(name, c, self.now))
        pulls = peer.session._pulls
        assert len(pulls.leases) == sum(len(s.asked) for s in pulls._suppliers.values()) <= MAX_WANTS
        assert all(len(s.asked) <= MAX_WANTS_PER_PEER for s in pulls._suppliers.values())
        assert len(pulls._first) == sum(len(s.due) for s in pulls._suppliers.values())
        self.pump(name)
        self.at(self.now + TICK_S, lambda: self.tick(name))

    def pump(self, name: str) -> None:
        """Start the next transfer if the uplink is free: the neighbours take turns."""
        peer = self.peers[name]
        if peer.busy or not peer.alive or peer.withholds:
            return
        names = peer.session.peers()
        for i in range(len(names)):
            other = names[(peer.turn + i) % len(names)]
            found = peer.session.next_for(other, self.now)
            assert len(peer.session._peers[other].sent) <= MAX_INFLIGHT
            if found is None:
                continue
            peer.turn, peer.busy = (peer.turn + i + 1) % len(names), True
            self.at(self.now + peer.chunk_s, lambda o=other, f=found: self._sent(name, o, *f))
            return

    def _sent(self, src: str, dst: str, chunk: int, seed: bool) -> None:
        sender = self.peers[src]
        sender.busy = False
        if not sender.alive:
            return
        sender.sent[chunk] += 1
        if self.random.random() >= self.loss:
            to = self.peers[dst]
            to.down_free = max(self.now, to.down_free) + to.down_s
            self.at(to.down_free, lambda: self.message(src, dst, lambda p: self._arrived(p, src, chunk, seed)))
        self.pump(src)

    def _arrived(self, peer: SimPeer, src: str, chunk: int, seed: bool) -> None:
        peer.arrived += 1
        if peer.full:
            return
        peer.session.learn([chunk], self.now)
        if peer.session.hold(chunk, src, seed=seed and src == SOURCE, now=self.now):
            peer.got_from[src] += 1
        self.message(peer.name, src, lambda p: p.session.peer_has(peer.name, [chunk], self.now))
        if peer.session.complete and peer.done_at is None:
            peer.done_at = self.now
