"""The agent: one node's life in the swarm. Joins, relays, installs versions, runs the engine, streams tokens back.

Thin shell around the exchange (relay), the installer (versions) and the engine port (tokens). Must not know rewards, the
ledger or the trainer. Whatever goes wrong with a version, the one before stays whole and serves.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import trio

from node.base_model import BaseModel
from node.batcher import TokenBatcher
from node.engine.base import Engine, EngineDied
from node.installer import Installer
from node.shadow import Shadow
from p2p.admission import Ticket
from p2p.broadcast.exchange import Exchange
from p2p.channel.base import Network
from p2p.errors import ChannelClosed, Refusal, UsageError, first_of
from p2p.identity import Identity
from p2p.peering import REDIAL_S, JoinRefused, Link, Peering
from p2p.protocol.messages import (
    STATES,
    Abort,
    Activate,
    Assign,
    Bye,
    Catalog,
    Grouping,
    Installed,
    Interrupt,
    NodeStatus,
    Rejected,
    Report,
    Request,
    Roster,
    Terms,
)  # fmt: skip
from p2p.protocol.rollout import DRAINING, UPDATING, TokenEvent
from p2p.rosters import places_of
from p2p.store import ChunkStore
from p2p.version import Version

log = logging.getLogger("shoal.node")

STATUS_S = 1.0
STEADY_S = 10.0
"""A link to the head that lived so long was a good one: the next is dialled at once."""

ENGINE_RESTART_S = 1.0
MAX_ENGINE_FAILURES = 5
"""Engine deaths in a row, without one token between them, before the node gives up with the last reason."""

DRAIN_S = 20.0
"""How long a node that leaves may take to hand over: clouds give 30 s (Azure, GCP) to 120 s (AWS) of notice."""

STILL_S = 1.0
"""How often a leaving node asks an engine that still holds something again: a request may have come in past the first time."""

FREE = Terms(0.0)

EngineFactory = Callable[[], AbstractAsyncContextManager[Engine]]


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """What one node was told to do. `capacity` is how many sequences its engine decodes at once."""

    ticket: Ticket
    ticket_text: str
    directory: Path
    name: str
    capacity: int
    store_limit: int
    dialable: bool = True
    exit_when_done: bool = True
    agent: str = "shoal/0.1"
    site: str = ""
    """nodes of one site share a fast LAN: a version crosses the WAN to them once"""
    base_model: BaseModel | None = None
    """what the run began with, if it is on this node's disk"""
    terms: Terms = FREE


@dataclass(slots=True)
class Held:
    """A request that this node was given and has not answered to the end."""

    finish_s: float
    """a newer version may be held back for so long that it ends under the weights it began with; 0: not at all"""
    began: bool = False
    """tokens were made for it here"""


class Agent:
    """One node. `run()` returns when the run is over (the head said so), and raises UsageError when the head refuses."""

    def __init__(
        self,
        settings: NodeSettings,
        identity: Identity,
        network: Network,
        engine_factory: EngineFactory,
        *,
        wall: Callable[[], float] = time.time,
        in_thread: Callable[..., Awaitable[object]] = trio.to_thread.run_sync,
    ) -> None:
        s = settings
        self.settings, self._identity, self._network, self._engine_factory = s, identity, network, engine_factory
        s.directory.mkdir(parents=True, exist_ok=True)
        self.store = ChunkStore(s.directory / "chunks", s.store_limit)
        self.shadow = Shadow.open(s.directory / "shadow", s.ticket.run)
        self.peering = Peering(
            network, identity, run=s.ticket.run, head=s.ticket.head, name=s.name, agent=s.agent, wall=wall,
            ticket=s.ticket_text, dialable=s.dialable, site=s.site, on_up=self._on_up, on_down=self._on_down,
            on_message=self._on_message, on_refusal=self._on_refusal,
        )  # fmt: skip
        self.exchange = Exchange(
            me=identity.peer_id, run=s.ticket.run, head=s.ticket.head, head_key=self.peering.gate.head_key, store=self.store,
            is_source=False, now=trio.current_time, wall=wall, on_refusal=self._on_refusal,
        )  # fmt: skip
        self.installer = Installer(
            self.exchange, self.shadow, s.directory / "model", in_thread, self._on_installed, s.base_model, self._before_commit
        )
        self.engine: Engine | None = None
        self._assigned: dict[str, Held] = {}
        self._released = trio.Event()
        """set, and replaced, when something leaves `_assigned`"""
        self._updating = False
        """no new work: a version waits for what runs here to end"""
        self._ready = False
        self._batch = TokenBatcher()
        self.tokens = 0
        self._failures = 0
        self._done = trio.Event()
        self._done_reason = ""
        self._draining = False
        """no new work: this node leaves"""
        self._may_go = trio.Event()
        """the head has everything of ours, or is not there"""
        self.made = 0
        """tokens that the engine made since it started, as it said when this node left; `tokens` went out to the head"""
        self._nursery: trio.Nursery | None = None

    async def run(self) -> str:
        """Take part until the run is over; returns the reason the head gave."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            await nursery.start(self.exchange.run)
            await nursery.start(self.peering.run)
            nursery.start_soon(self._keep_head)
            nursery.start_soon(self.installer.run)
            nursery.start_soon(self._keep_engine)
            nursery.start_soon(self._report_status)
            await self._done.wait()
            await self._goodbye()
            nursery.cancel_scope.cancel()
        return self._done_reason

    def stop(self, reason: str) -> None:
        """End this node in good order (a signal, a person)."""
        self._done_reason = self._done_reason or reason
        self._done.set()

    async def _goodbye(self) -> None:
        """Leave without losing a token: the engine stops, what it made goes out, and the head says that it has it."""
        self._draining = True
        log.info("leaving; %d sequences go back to the learner", len(self._assigned))
        with trio.move_on_after(DRAIN_S) as patience:
            self._to_head(Bye(self._done_reason, done=False, draining=True))
            while self._assigned:
                released = self._released
                await self._hand_back(list(self._assigned))
                with trio.move_on_after(STILL_S):
                    await released.wait()
            if self.engine is not None and self._ready:
                try:
                    self.made = (await self.engine.stats()).tokens
                except EngineDied:
                    pass  # it was a number for a person
            self._may_go = trio.Event()
            self._flush()
            if self.settings.ticket.head in self.peering.links:
                self._to_head(Bye(self._done_reason, done=False))
                await self._may_go.wait()
        if patience.cancelled_caught:
            log.warning("leaving with %d sequences not handed over: the learner gave no answer in time", len(self._assigned))
        for peer in list(self.peering.links):
            await self.peering.close(peer, self._done_reason or "this node stops")

    # --- the head ----------------------------------------------------------------------------------------------------

    async def _keep_head(self) -> None:
        """Stay connected to the head, through restarts of either side."""
        ticket, attempt = self.settings.ticket, 0
        up_since: float | None = None
        while True:
            if ticket.head in self.peering.links:
                await trio.sleep(0.2)
                continue
            if up_since is not None:
                if trio.current_time() - up_since > STEADY_S:
                    attempt = 0
                else:  # a link that breaks as soon as it is up must not be made again without a pause
                    await trio.sleep(REDIAL_S[min(attempt, len(REDIAL_S) - 1)])
                up_since = None
            try:
                await self.peering.connect(ticket.head, ticket.addresses)
                log.info("joined run %s at epoch %d as %s", ticket.run, self.peering.epoch, self._identity.peer_id)
                up_since = trio.current_time()
            except JoinRefused as refused:
                if not refused.retryable:
                    raise UsageError(f"the learner refused this node: {refused.reason}") from None
                log.warning("%s; trying again", refused)
                await trio.sleep(REDIAL_S[min(attempt, len(REDIAL_S) - 1)])
            except (ChannelClosed, Refusal) as error:
                log.log(logging.WARNING if attempt == 0 else logging.INFO, "cannot reach the learner: %s; trying again", error)
                await trio.sleep(REDIAL_S[min(attempt, len(REDIAL_S) - 1)])
            attempt += 1

    def _to_head(self, message: object) -> None:
        link = self.peering.links.get(self.settings.ticket.head)
        if link is not None:
            link.post(message)

    async def _on_up(self, link: Link) -> None:
        if link.peer == self.settings.ticket.head:
            self.installer.new_epoch(self.peering.epoch)
            self.exchange.arrange(None)  # it may be another head, and says anew what groups there are, and who is active
            self._activate(Activate("active", ""))
            await self._forget_requests()
            link.post(self.settings.terms)
        log.info("link to %s (%s) is up", link.name, link.peer)
        self.exchange.add_peer(link.peer, link.post, link.bulk)

    async def _on_down(self, link: Link, reason: str) -> None:
        log.info("link to %s (%s) is down: %s", link.name, link.peer, reason)
        entry = self.exchange.peers.get(link.peer)
        if entry is None or entry.bulk is not link.bulk:
            return  # a newer link has taken its place
        self.exchange.remove_peer(link.peer)
        if link.peer == self.settings.ticket.head:
            # The head hands our sequences to others the moment it misses us: what we would still make is of no use.
            await self._forget_requests()
            self._may_go.set()

    async def _on_refusal(self, peer: str, refusal: Refusal) -> None:
        self._to_head(Report(peer, refusal.version or Version(0, 0), refusal.chunk or 0, refusal.reason[:500]))
        # The head is never dropped for one bad manifest: what it sent is not accepted, and there is no other head.
        if refusal.fatal and peer != self.settings.ticket.head:
            await self.peering.expel(peer, str(refusal))

    async def _on_message(self, link: Link, message: object) -> None:
        if await self.exchange.handle(link.peer, message):
            return
        if link.peer != self.settings.ticket.head:
            refusal = Refusal(f"{type(message).__name__} from a peer that is not the head", peer=link.peer, fatal=True)
            log.warning("%s", refusal)
            await self._on_refusal(link.peer, refusal)
            return
        match message:
            case Roster():
                self.peering.keep_connected(message.members)
            case Grouping():
                try:
                    self.exchange.arrange(places_of(message))
                    self.peering.shed(message.apart)
                except Refusal as refusal:
                    await self._on_refusal(link.peer, refusal)
            case Catalog():
                self.installer.set_catalog(message)
            case Assign():
                await self._assign(message.requests, message.finish_s)
            case Abort():
                await self._abort(message.request_ids)
            case Interrupt():
                await self._hand_back([r for r in message.request_ids if r in self._assigned])
            case Activate():
                self._activate(message)
            case Bye():
                log.info("the head says goodbye: %s", message.reason)
                if self._draining:
                    self._may_go.set()
                if message.done and self.settings.exit_when_done:
                    self.stop(message.reason)

    def _activate(self, asked: Activate) -> None:
        """What is under way here comes back by the head's own `Interrupt`: only what is new depends on this."""
        if asked.state not in STATES:
            log.warning("the head says %r, which is none of %s", asked.state, ", ".join(STATES))
            return
        if asked.why:
            log.info("%s from here on: %s", asked.state, asked.why)
        if asked.state == "asleep":
            self.installer.sleep()
        else:
            self.installer.wake()

    # --- generating --------------------------------------------------------------------------------------------------

    async def _assign(self, requests: tuple[Request, ...], finish_s: float) -> None:
        # All at once: the engine answers between two decoding steps, and groups prefill their prompt together.
        async with trio.open_nursery() as nursery:
            for wire in requests:
                nursery.start_soon(self._assign_one, wire, finish_s)

    async def _assign_one(self, wire: Request, finish_s: float) -> None:
        version = self.shadow.version or Version(0, 0)
        engine = self.engine
        if self._draining:
            self._to_head(Rejected(wire.request_id, version, "this node leaves", retryable=True, cause=DRAINING))
            return
        if engine is None or not self._ready:
            self._to_head(Rejected(wire.request_id, version, "no engine serves yet", retryable=True))
            return
        if self._updating and wire.exact_version != self.installer.serving:
            reason = "this node finishes what it runs before it commits a newer version"
            self._to_head(Rejected(wire.request_id, version, reason, retryable=True, cause=UPDATING))
            return
        try:
            self._assigned[wire.request_id] = Held(finish_s)
            await engine.add(wire.generate())
        except (Refusal, ValueError) as error:
            self._release(wire.request_id)
            reason, cause = (error.reason, error.cause) if isinstance(error, Refusal) else (str(error), "")
            self._to_head(Rejected(wire.request_id, version, reason[:500], retryable=bool(cause), cause=cause))
        except EngineDied as died:
            # _keep_engine tells the head about everything that was assigned, this one included.
            log.info("engine died while taking %s: %s", wire.request_id, died)

    async def _abort(self, request_ids: tuple[str, ...]) -> None:
        gone = request_ids or tuple(self._assigned)
        self._batch.drop(gone)
        for request_id in gone:
            self._release(request_id)
        if self.engine is not None:
            try:
                await self.engine.abort(list(request_ids) or None)
            except EngineDied:
                pass  # nothing left to abort; _keep_engine reports the death

    def _release(self, request_id: str) -> None:
        """Nothing more is to come of this request."""
        if self._assigned.pop(request_id, None) is not None:
            self._released.set()
            self._released = trio.Event()

    @asynccontextmanager
    async def _before_commit(self, version: Version) -> AsyncIterator[None]:
        """Around the engine's commit: sequences that are to end under the weights they began with may do so first, and nothing
        new begins meanwhile. What has not begun goes back to the head at once, what has not ended in time does then."""
        patience = max((held.finish_s for held in self._assigned.values()), default=0.0)
        if not patience:
            yield
            return
        log.info("version %s waits for %d sequences, at most %.0f s", version, len(self._assigned), patience)
        self._updating = True
        try:
            await self._send_status()  # before anything comes back, or it would come here again
            await self._hand_back([r for r, held in self._assigned.items() if held.finish_s and not held.began])
            with trio.move_on_after(patience):
                while any(held.finish_s for held in self._assigned.values()):
                    await self._released.wait()
            await self._hand_back([r for r, held in self._assigned.items() if held.finish_s])
            yield
        finally:
            self._updating = False

    async def _hand_back(self, request_ids: list[str]) -> None:
        """Have the engine end these; the pump brings their last events to the head."""
        if request_ids and self.engine is not None:
            try:
                await self.engine.interrupt(request_ids)
            except EngineDied:
                pass  # _keep_engine tells the head

    async def _forget_requests(self) -> None:
        if self._assigned:
            await self._abort(())

    async def _keep_engine(self) -> None:
        """Start the engine once there is something to serve; restart it, at the current version, when it dies."""
        await self.installer.wait_servable()
        while True:
            reason = ""
            try:
                async with self._engine_factory() as engine:
                    await self.installer.attach(engine)
                    self.engine, self._ready = engine, True
                    await self._send_status()
                    await self._pump(engine)
                    reason = "it closed its stream"
            except* EngineDied as group:  # a group, since the engine's own nursery is inside the block
                reason = str(first_of(group))
            except* Refusal as group:
                raise UsageError(f"the engine cannot run this model: {first_of(group)}") from None
            finally:
                self.engine, self._ready = None, False
                self.installer.detach()
            log.error("the engine died: %s", reason)
            version = self.shadow.version or Version(0, 0)
            # Not retryable for free: one of these may be what killed it, and would go on to kill every other engine.
            for request_id in list(self._assigned):
                self._to_head(Rejected(request_id, version, f"engine died: {reason}"[:500], retryable=False))
                self._release(request_id)
            self._failures += 1
            if self._failures >= MAX_ENGINE_FAILURES:
                raise UsageError(f"the engine died {self._failures} times in a row, last: {reason}")
            await self._send_status()
            await trio.sleep(ENGINE_RESTART_S)

    async def _pump(self, engine: Engine) -> None:
        """Tokens from the engine to the head, in batches (see `batcher`)."""
        try:
            while True:
                with trio.move_on_at(self._batch.due):
                    self._gather(await engine.events.receive())
                if trio.current_time() >= self._batch.due:
                    self._flush()
        except trio.EndOfChannel:
            pass  # the engine is gone; the reason comes another way
        finally:
            self._flush()

    def _gather(self, events: list[TokenEvent]) -> None:
        now = trio.current_time()
        for event in events:
            held = self._assigned.get(event.request_id)
            if held is None:
                continue  # aborted meanwhile
            held.began = True
            if event.finish:
                self._release(event.request_id)
            if event.finish == "error":
                self._flush()  # what it made until then comes first
                self._to_head(Rejected(event.request_id, event.version, event.message[:500], retryable=False))
                continue
            self.tokens += len(event.ids)
            self._failures = 0
            self._batch.add(event, now)

    def _flush(self) -> None:
        for message in self._batch.take():
            self._to_head(message)

    # --- reporting ---------------------------------------------------------------------------------------------------

    async def _on_installed(self, installed: Installed) -> None:
        self._to_head(installed)
        await self._send_status()

    async def _report_status(self) -> None:
        while True:
            await self._send_status()
            await trio.sleep(STATUS_S)

    async def _send_status(self) -> None:
        running = waiting = 0
        rate = 0.0
        engine = self.engine
        if engine is not None and self._ready:
            try:
                stats = await engine.stats()
                running, waiting, rate = stats.running, stats.waiting, stats.tokens_per_s
            except EngineDied:
                pass  # _keep_engine reports it
        self._to_head(NodeStatus(
            ready=self._ready and self.shadow.version is not None, version=self.installer.serving or Version(0, 0),
            running=running, waiting=waiting, capacity=self.settings.capacity, tokens=self.tokens, tokens_per_s=rate,
            pid=os.getpid(), rss_bytes=psutil.Process().memory_info().rss, updating=self._updating,
            sent_bytes=self.exchange.sent_bytes,
        ))  # fmt: skip

