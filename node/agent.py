"""The agent: one node's life in the swarm. Joins, relays, installs versions, runs the engine, streams tokens back.

Thin shell around the exchange (relay), the installer (versions) and the engine port (tokens). Must not know rewards, the
ledger or the trainer. Whatever goes wrong with a version, the one before stays whole and serves.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import trio

from node.engine.port import EngineDied
from node.install.base_model import BaseModel
from node.install.engine_slot import EngineSlot
from node.install.installer import Installer
from node.install.shadow import Shadow
from node.serving.serving import EngineFactory, Serving
from p2p.broadcast.exchange import Exchange
from p2p.broadcast.rosters import places_of
from p2p.channel.port import Network
from p2p.errors import ChannelClosed, Refusal, UsageError
from p2p.identity import Identity
from p2p.membership.admission import Ticket
from p2p.membership.peering import REDIAL_S, JoinRefused, Link, Peering
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
    Report,
    Roster,
    Terms,
)  # fmt: skip
from p2p.version import Version
from p2p.weights.store import ChunkStore

log = logging.getLogger("shoal.node")

STATUS_S = 1.0
STEADY_S = 10.0
"""A link to the head that lived so long was a good one: the next is dialled at once."""

DRAIN_S = 20.0
"""How long a node that leaves may take to hand over: clouds give 30 s (Azure, GCP) to 120 s (AWS) of notice."""

STILL_S = 1.0
"""How often a leaving node asks an engine that still holds something again: a request may have come in past the first time."""

FREE = Terms(0.0)


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
        self.settings, self._identity, self._network = s, identity, network
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
        self.slot = EngineSlot(self.shadow, s.directory / "model", in_thread)
        self.serving = Serving(self.slot, engine_factory, self._to_head, self._send_status)
        self.installer = Installer(self.exchange, self.slot, in_thread, self._on_installed, s.base_model)
        self._done = trio.Event()
        self._done_reason = ""
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
            nursery.start_soon(self.serving.keep_engine)
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
        self.serving.draining = True
        log.info("leaving; %d sequences go back to the learner", len(self.serving.assigned))
        with trio.move_on_after(DRAIN_S) as patience:
            self._to_head(Bye(self._done_reason, done=False, draining=True))
            while self.serving.assigned:
                released = self.serving.released
                await self.serving.hand_back(list(self.serving.assigned))
                with trio.move_on_after(STILL_S):
                    await released.wait()
            if self.serving.engine is not None and self.serving.ready:
                try:
                    self.made = (await self.serving.engine.stats()).tokens
                except EngineDied:
                    pass  # it was a number for a person
            self._may_go = trio.Event()
            self.serving.flush()
            if self.settings.ticket.head in self.peering.links:
                self._to_head(Bye(self._done_reason, done=False))
                await self._may_go.wait()
        if patience.cancelled_caught:
            left = len(self.serving.assigned)
            log.warning("leaving with %d sequences not handed over: the learner gave no answer in time", left)
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
            await self.serving.forget()
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
            await self.serving.forget()
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
                await self.serving.assign(message.requests, message.finish_s)
            case Abort():
                await self.serving.abort(message.request_ids)
            case Interrupt():
                await self.serving.hand_back([r for r in message.request_ids if r in self.serving.assigned])
            case Activate():
                self._activate(message)
            case Bye():
                log.info("the head says goodbye: %s", message.reason)
                if self.serving.draining:
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

    # --- reporting ---------------------------------------------------------------------------------------------------

    async def _on_installed(self, installed: Installed) -> None:
        self._to_head(installed)
        await self._send_status()

    async def _report_status(self) -> None:
        while True:
            await self._send_status()
            await trio.sleep(STATUS_S)

    async def _send_status(self) -> None:
        running = waiting = kv_tokens = 0
        rate = 0.0
        engine = self.serving.engine
        if engine is not None and self.serving.ready:
            try:
                stats = await engine.stats()
                running, waiting, rate, kv_tokens = stats.running, stats.waiting, stats.tokens_per_s, stats.kv_tokens
            except EngineDied:
                pass  # _keep_engine reports it
        self._to_head(NodeStatus(
            ready=self.serving.ready and self.shadow.version is not None, version=self.slot.serving or Version(0, 0),
            running=running, waiting=waiting, capacity=self.settings.capacity, tokens=self.serving.tokens, tokens_per_s=rate,
            pid=os.getpid(), rss_bytes=psutil.Process().memory_info().rss, updating=self.serving.updating,
            sent_bytes=self.exchange.sent_bytes, kv_tokens=kv_tokens,
        ))  # fmt: skip

