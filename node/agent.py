"""The agent: one node's life in the swarm. Joins, relays, installs versions, runs the engine, streams tokens back.

Thin shell around the swarm (links, relay), the installer (versions) and the engine port (tokens). Must not know rewards, the
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

from node.engine.port import EngineStats
from node.install.base_model import BaseModel
from node.install.engine_slot import EngineSlot
from node.install.installer import Installer
from node.install.room import InstallRoom
from node.install.shadow import Shadow
from node.serving.serving import EngineFactory, Serving
from p2p.allowance.keeper import AllowanceKeeper
from p2p.channel.port import Network
from p2p.identity import Identity
from p2p.membership.admission import Ticket
from p2p.membership.links import Link
from p2p.protocol.generation import Abort, Assign, ComputesWith, Interrupt, NodeStatus, OwnerWord
from p2p.protocol.join import Bye
from p2p.protocol.prices import Activate, Terms
from p2p.protocol.versions import Catalog, Installed
from p2p.swarm import FollowerRole, Swarm, SwarmOwner
from p2p.uplink_file import keep_uplink, recall_uplink
from p2p.version import Version
from p2p.weights.store import ChunkStore

log = logging.getLogger("shoal.node")

STATUS_S = 1.0
"""Seconds between two reports to the head. The dispatcher's picture of a node is as old as that, and a report costs little."""

DRAIN_S = 20.0
"""Seconds that a node which leaves may take to hand over: clouds give 30 s (Azure, GCP) to 120 s (AWS) of notice."""

STILL_S = 1.0
"""Seconds after which a leaving node asks its engine again to give back what it still holds. A request may have come in past
the first time."""

NO_ENGINE = EngineStats(0, 0, 0, tokens_per_s=0.0, kv_bytes=0, version=Version(0, 0))
"""What the head hears of a node's engine while there is none."""

FREE = Terms(0.0)
"""What a node costs that names no price."""


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """What one node was told to do. `capacity` is how many sequences its engine decodes at once."""

    ticket: Ticket
    directory: Path
    """for shadow, chunks and model files; made when it is not there"""
    name: str
    capacity: int
    store_limit: int
    """bytes of chunks that are kept"""
    dialable: bool = True
    """whether other nodes can open connections to this one"""
    exit_when_done: bool = True
    """leave when the head says that the run is over; otherwise stay connected"""
    site: str = ""
    """nodes of one site share a fast LAN: a version crosses the WAN to them once"""
    base_model: BaseModel | None = None
    """what the run began with, if it is on this node's disk"""
    terms: Terms = FREE


class Agent(SwarmOwner):
    """One node. `allowance` is what its owner allows, kept by whoever runs it. `wall` reads the Unix time; `in_thread(fn, *args)`
    runs blocking work off the event loop."""

    def __init__(
        self,
        settings: NodeSettings,
        identity: Identity,
        network: Network,
        engine_factory: EngineFactory,
        *,
        allowance: AllowanceKeeper | None = None,
        wall: Callable[[], float] = time.time,
        in_thread: Callable[..., Awaitable[object]] = trio.to_thread.run_sync,
    ) -> None:
        s = self.settings = settings
        s.directory.mkdir(parents=True, exist_ok=True)
        self.store = ChunkStore(s.directory / "chunks", s.store_limit)
        self.shadow = Shadow.open(s.directory / "shadow", s.ticket.run)
        self.slot = EngineSlot(self.shadow, s.directory / "model", in_thread)
        self.swarm = Swarm(
            network, identity, self.store, FollowerRole(s.ticket, dialable=s.dialable, site=s.site), self, name=s.name, wall=wall
        )
        self.serving = Serving(self.slot, engine_factory, self._to_head, self._send_status)
        self.room = InstallRoom(self.store, s.store_limit)
        self.installer = Installer(self.swarm.exchange, self.slot, in_thread, self._on_installed, s.base_model, room=self.room)
        self.allowance = allowance
        self.rested = False
        """it ended for its owner's limits, and is to come back"""
        self._done = trio.Event()
        self._done_reason = ""
        self._named: tuple[Link, Version] | None = None
        """the version that the head was last proven, and over which link"""
        self._may_go = trio.Event()
        """set when the head has every token of this node, or is not there"""
        self.made = 0
        """tokens that the engine made since it started, as it said when this node left; `serving.tokens` went out to the head"""

    async def run(self) -> str:
        """Take part until the run is over or `stop`; returns the reason. UsageError when the head refuses this node for good."""
        async with trio.open_nursery() as nursery:
            recall_uplink(self.settings.directory, self.swarm)
            await nursery.start(self.swarm.run)
            nursery.start_soon(keep_uplink, self.settings.directory, self.swarm)
            nursery.start_soon(self.installer.run)
            nursery.start_soon(self.serving.keep_engine)
            nursery.start_soon(self._report_status)
            if self.allowance is not None:
                nursery.start_soon(self._keep_allowance, self.allowance)
            await self._done.wait()
            await self._goodbye()
            nursery.cancel_scope.cancel()
        return self._done_reason

    def stop(self, reason: str) -> None:
        """End this node in good order, since a signal or a person asks for it; `run` returns `reason` then."""
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
            if stats := await self.serving.stats():
                self.made = stats.tokens
            self._may_go = trio.Event()
            self.serving.flush()
            if self.swarm.head in self.swarm.links:
                self._to_head(Bye(self._done_reason, done=False))
                await self._may_go.wait()
        if patience.cancelled_caught:
            left = len(self.serving.assigned)
            log.warning("leaving with %d sequences not handed over: the learner gave no answer in time", left)
        await self.swarm.leave(self._done_reason or "this node stops")

    # --- what its owner allows ---------------------------------------------------------------------------------------

    async def _keep_allowance(self, allowance: AllowanceKeeper) -> None:
        """Rest, idle and come back as the owner's limits say."""
        allowance.tell(self.swarm)
        try:
            while True:
                changed, may = allowance.changed, allowance.permission
                if may.rests:
                    self.rested = not self._done_reason
                    self.stop(may.rests)
                    return
                self.room.allow(allowance.limits)
                if may.idles != self.serving.rests:
                    self.serving.rests = may.idles
                    await self._send_status()  # before anything comes back, or it would come here again
                    if may.idles:
                        await self.serving.hand_back(list(self.serving.assigned))
                await changed.wait()
        finally:
            allowance.tell(None)

    # --- the head ----------------------------------------------------------------------------------------------------

    def _to_head(self, message: object) -> None:
        self.swarm.send(self.swarm.head, message)

    async def on_up(self, link: Link) -> None:
        """A link opened. With the head's, what an earlier head asked for is over."""
        if link.peer == self.swarm.head:
            self.installer.new_epoch(self.swarm.epoch)
            self._activate(Activate("active", ""))  # it may be another head, and says anew who is active
            await self.serving.forget()
            link.post(self.settings.terms)
            self._prove(link)
        log.info("link to %s (%s) is up", link.name, link.peer)
        if link.peer == self.swarm.head and self.shadow.version is None:
            log.info("waiting for the learner's first version; its trainer may still be loading the model")

    def _prove(self, link: Link) -> None:
        """What serves, and was not proven over this link to the head: a head that was started anew, a new link, a node that came
        back with its state on the disk. It counts no bytes."""
        serves, digest = self.slot.serving, self.shadow.digest
        if serves is None or serves != self.shadow.version or digest is None or self._named == (link, serves):
            return
        self._named = link, serves
        link.post(Installed(
            serves, digest, pause_s=0.0, apply_s=0.0, transfer_s=0.0, bytes_from_head=0, bytes_from_peers=0,
        ))  # fmt: skip

    async def on_down(self, link: Link, reason: str) -> None:
        """A link closed. With the head's, all requests of this node are dropped."""
        log.info("link to %s (%s) is down: %s", link.name, link.peer, reason)
        if link.peer == self.swarm.head:
            # The head hands our sequences to others the moment it misses us: what we would still make is of no use.
            await self.serving.forget()
            self._may_go.set()

    async def on_message(self, link: Link, message: object) -> None:
        """Do what the head asks: a node hears messages of this kind from nobody else."""
        match message:
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
        """Sleep or wake as the head asks. The head takes back what runs here by an `Interrupt` of its own: this decides only
        about new versions."""
        if asked.why:
            log.info("%s from here on: %s", asked.state, asked.why)
        if asked.state == "asleep":
            self.installer.sleep()
        else:
            self.installer.wake()

    # --- reporting ---------------------------------------------------------------------------------------------------

    async def _on_installed(self, installed: Installed) -> None:
        if (link := self.swarm.links.get(self.swarm.head)) is not None:
            self._named = link, installed.version
        self._to_head(installed)
        await self._send_status()

    async def _report_status(self) -> None:
        while True:
            await self._send_status()
            await trio.sleep(STATUS_S)

    async def _send_status(self) -> None:
        stats = await self.serving.stats() or NO_ENGINE
        if (link := self.swarm.links.get(self.swarm.head)) is not None:
            self._prove(link)
        self._to_head(NodeStatus(
            ready=self.serving.engine is not None and self.shadow.version is not None,
            version=self.slot.serving or Version(0, 0), running=stats.running, waiting=stats.waiting,
            capacity=self.settings.capacity, tokens=self.serving.tokens, tokens_per_s=stats.tokens_per_s,
            pid=os.getpid(), rss_bytes=psutil.Process().memory_info().rss, updating=self.serving.updating,
            sent_bytes=self.swarm.exchange.sent_bytes, kv_tokens=stats.kv_tokens,
            computes=ComputesWith(stats.arithmetic, stats.keeps),
            owner=OwnerWord(self.serving.rests, str(self.allowance.limits) if self.allowance is not None else ""),
        ))  # fmt: skip

