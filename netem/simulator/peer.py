"""One simulated peer: what the broadcast's `exchange` and `inbox` do, over a simulated network and clock; `simpump` is its pump.

The session, its policy and the uplink are production's own objects; this only carries out what they decide, in the same
order and at the same times as the real shell. Must not know faults, results or when a round is over.

What it leaves out: bytes, digests and disks (a chunk costs a constant time), the trainer's encoding, credits of channels, and
everything about links but their delay: a neighbour is there or is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import floor
from typing import Any

from netem.networks.profile import Host
from netem.simulator.flows import Arrival
from netem.simulator.sim_pump import Loop, SimLink, SimPump
from netem.simulator.wire import (
    Message,
    SimChunk,
    SimGetParts,
    SimHave,
    SimParts,
    SimRelieve,
    SimSubscribe,
    SimVersion,
    SimWant,
    have,
)
from p2p.broadcast.exchange import TICK_S
from p2p.broadcast.gossip import Gossip
from p2p.broadcast.peer_groups import EVERYWHERE, PeerPlaces
from p2p.broadcast.session import Session
from p2p.broadcast.transfer import ASK_PARTS_S

SMALL = 100
"""Bytes of a control message. Nothing follows from it: control messages take no part in the sharing of links."""


class SimPeer(SimPump):
    """`source`: the source's name. `delay_s`: one way, the middle of its links. `phase`: seconds to its first tick."""

    def __init__(self, loop: Loop, host: Host, source: str, *, policy: str, delay_s: float, phase: float) -> None:
        super().__init__(loop, host, delay_s)
        self.source, self.policy = source, policy
        self.memory: dict[str, float] = {}
        self.duplicate_bytes = 0
        """payload of chunks that came this round and were here already"""
        self._ticks_from = phase
        self._parked = False
        """has nothing to do until a version or a want comes: it does not tick"""
        self._segments: set[int] = set()
        self.places: PeerPlaces | None = None
        """which groups the peers are in; the owner sets it and calls `rearranged`"""
        self._news = Gossip()
        self._greeted: set[str] = set()
        self._asked_parts = -1e9
        self._ask_parts_after = ASK_PARTS_S[0]
        self._on: dict[type, Callable[[Session, str, Any], None]] = {
            SimSubscribe: self._on_subscribe, SimHave: self._on_have, SimWant: self._on_want, SimRelieve: self._on_relieve,
            SimGetParts: self._on_get_parts, SimParts: self._on_parts,
        }  # fmt: skip
        loop.at(phase, self.tick)

    @property
    def is_source(self) -> bool:
        return self.name == self.source

    # --- neighbours --------------------------------------------------------------------------------------------------

    def link(self, other: str) -> None:
        if other not in self.links:
            self.links[other] = SimLink(other)

    def greet(self, other: str) -> None:
        """Tell a new neighbour what is held here."""
        if self.session is not None and self.plan is not None and not self.is_source:
            self.post(other, SimSubscribe(self.plan.number, tuple(self.session.held)))

    def rearranged(self) -> None:
        """`places` are other ones."""
        if self.session is not None:
            self.session.places = self.places

    def unlink(self, other: str) -> None:
        if self.links.pop(other, None) is not None and self.session is not None:
            self.session.leave(other, self.loop.now)
            self.pump()

    # --- versions ----------------------------------------------------------------------------------------------------

    def offer(self, plan: SimVersion) -> None:
        """The source makes a version, all of it at once."""
        now = self.loop.now
        session = self._open(plan)
        for other in self.links:
            session.join(other, (), now)
        session.learn(range(plan.total), now)
        for chunk in range(plan.total):
            session.hold(chunk, None, duty=0, now=now)
        session.close(plan.total)
        self.pump()

    def take(self, plan: SimVersion, *, catching: bool) -> None:
        """Take part in a version that was announced. `catching`: it joins late, and its records are there."""
        now = self.loop.now
        session = self._open(plan)
        session.catching = catching
        for other in self.links:
            if other == self.source or not catching:
                session.join(other, (), now)
        self.post_all(list(self.links), SimSubscribe(plan.number, ()))
        if catching:
            self._learn_all()

    def _open(self, plan: SimVersion) -> Session:
        session = Session(
            me=self.name, source=None if self.is_source else self.source, now=self.loop.now, policy=self.policy,
            chunk_bytes=plan.chunk_bytes, memory=self.memory, places=self.places,
        )  # fmt: skip
        self.start(plan, session)
        self.wake_up()
        self.duplicate_bytes = 0
        self._segments.clear()
        self._news = Gossip()
        self._greeted.clear()
        self._asked_parts, self._ask_parts_after = -1e9, ASK_PARTS_S[0]
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

    def post(self, other: str, message: Message) -> None:
        now = self.loop.now
        wait = self.queueing(now)
        if wait:
            self.loop.at(now + wait, self._leave, other, message)
        else:
            self._leave(other, message)

    def post_all(self, others: Sequence[str], message: Message) -> None:
        now = self.loop.now
        wait = self.queueing(now)
        for other in others:
            if wait:
                self.loop.at(now + wait, self._leave, other, message)
            else:
                self._leave(other, message)

    def _leave(self, other: str, message: Message) -> None:
        self.loop.network.send_small(self.loop.now, self.name, other, SMALL, message)

    def receive(self, arrival: Arrival) -> None:
        """What the network brought. Chunks are verified one after another, and acted on then."""
        message: Any = arrival.tag
        session, plan = self.session, self.plan
        if session is None or plan is None or message.round != plan.number or arrival.source not in self.links:
            return
        if type(message) is SimChunk:
            self.loop.at(self.loop.worked(self.name), self._on_chunk, arrival.source, message)
        else:
            self._on[type(message)](session, arrival.source, message)

    def _on_chunk(self, source: str, message: SimChunk) -> None:
        session, plan = self.session, self.plan
        if not self.alive or session is None or plan is None or plan.number != message.round or source not in self.links:
            return
        now, chunk = self.loop.now, message.chunk
        self._learn(plan.segment(chunk))
        seed = message.seed if source == self.source or message.seed != EVERYWHERE else 0
        if chunk in session.held:
            session.hold(chunk, source, duty=seed, now=now)
            self.duplicate_bytes += plan.size(chunk)
            self.post(source, have(plan.number, (chunk,)))
            return
        session.hold(chunk, source, duty=seed, now=now)
        self.loop.moved_at = now
        answered = self._news.came_from(source, chunk)
        if answered:
            self.post(source, have(plan.number, answered))
        if session.complete:
            self.loop.completed(self.name)
        self.pump()

    def _on_have(self, session: Session, source: str, message: SimHave) -> None:
        now = self.loop.now
        if not session.takes_part(source):
            session.join(source, (), now)
        full = session.full(source)
        session.peer_has(source, message.chunks, now, message.bits)
        if full or self.is_source:  # elsewhere nothing else can be handed out for that
            self.pump()

    def _on_want(self, session: Session, source: str, message: SimWant) -> None:
        session.join(source, (), self.loop.now)
        session.peer_wants(source, message.chunks, self.loop.now)
        self.pump()

    def _on_subscribe(self, session: Session, source: str, message: SimSubscribe) -> None:
        session.join(source, message.have, self.loop.now)
        if not self.is_source and source not in self._greeted:
            self._greeted.add(source)
            self.post(source, have(message.round, tuple(session.held)))
        self.pump()

    def _on_relieve(self, session: Session, source: str, message: SimRelieve) -> None:
        if source == self.source:
            session.relieve(message.chunks)

    def _on_get_parts(self, session: Session, source: str, message: SimGetParts) -> None:
        self.post(source, SimParts(message.round))

    def _on_parts(self, session: Session, source: str, message: SimParts) -> None:
        self._learn_all()

    # --- timers ------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        if not self.alive:
            return
        now, session = self.loop.now, self.session
        self.measure(now)
        if session is not None:
            session.pace = self.uplink.pace
            session.tick(now)
            self._tell(session, now)
            if not self.is_source:
                assert self.plan is not None
                for other, chunks in session.wants(now).items():
                    self.post(other, SimWant(self.plan.number, chunks))
                self._ask_for_parts(session, now)
        idle = self.pump()
        done = session is None or (session.complete and not self._news.pending and self.all_delivered)
        if idle and done and not self.is_source:
            self._parked = True
        else:
            self.loop.at(now + TICK_S, self.tick)

    def wake_up(self) -> None:
        if self._parked:
            self._parked = False
            ticks = floor((self.loop.now - self._ticks_from) / TICK_S) + 1
            self.loop.at(self._ticks_from + ticks * TICK_S, self.tick)

    def _tell(self, session: Session, now: float) -> None:
        assert self.plan is not None
        for others, chunks in self._news.due(session, now, self.links):
            self.post_all(others, have(self.plan.number, chunks))

    def _ask_for_parts(self, session: Session, now: float) -> None:
        if session.total is None and session.missing == 0 and now - self._asked_parts > self._ask_parts_after:
            assert self.plan is not None
            if self._asked_parts > 0 and self.links:
                self.post(self.source if self.source in self.links else next(iter(self.links)), SimGetParts(self.plan.number))
                self._ask_parts_after = min(2 * self._ask_parts_after, ASK_PARTS_S[1])
            self._asked_parts = now
