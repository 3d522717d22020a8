"""The head: the swarm's root and the run's keeper, one trio process. Wires the parts together; decides little itself.

Nodes join and report here; the publisher signs versions; the rollouts keep trajectories; the trainer asks for batches.
Must not know torch.
"""

from __future__ import annotations

import logging
import math
import os
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import trio

from learner.admission.head_door import HeadDoor
from learner.config import LearnerConfig
from learner.dispatch.dispatcher import NodeView
from learner.economy.local_rollout import LocalRollout
from learner.evaluation.problems import Evaluation
from learner.head.audits import Audits
from learner.head.evaluating import HeadEvaluations
from learner.head.freed_memory import give_back_now_and_then
from learner.head.latest import MAX_GONE, MAX_REPORTS, MAX_ROWS, KeptTally, Latest
from learner.head.local_engine import LocalEngine
from learner.head.node_state import NodeState
from learner.head.pool_keeper import PoolKeeper
from learner.head.probing import Probing
from learner.head.provider import Provider
from learner.head.sample_file import SampleFile
from learner.head.status_checks import check_status
from learner.head.trainer_requests import TrainerRequests
from learner.head.trust import Trust
from learner.journal.journal import Journal
from learner.publish.leftovers import clear_leftovers
from learner.publish.publisher import Publisher
from learner.requests.swarm_requests import SwarmRequests
from learner.rollouts.controller import Rollouts
from p2p.channel.port import Network
from p2p.complaints import MAX_LINE, complain, remark
from p2p.errors import Refusal
from p2p.identity import Identity
from p2p.membership.links import MAX_REASON, Link
from p2p.protocol.generation import NodeStatus, Rejected, Tokens
from p2p.protocol.join import Bye
from p2p.protocol.prices import MAX_PRICE, Terms
from p2p.protocol.rollout import DRAINING, PAST, RESTING, UPDATING
from p2p.protocol.versions import Catalog, Installed, Report
from p2p.swarm import SourceRole, Swarm, SwarmOwner
from p2p.version import Version
from p2p.weights.store import ChunkStore

log = logging.getLogger("shoal.head")

TICK_S = 0.5
"""Seconds between two looks at what no event announces: half a second is little against what nodes and people notice."""
STALL_TICKS = 4
"""Every so many ticks the head looks for sequences that make no progress: a look at all of them, for what takes minutes."""


class Head(SwarmOwner):
    """One epoch of one run. `open_rollouts(head)` makes its rollouts when everything else of the head is there, `door` says who
    may come. `now` counts seconds, `wall` reads the Unix time."""

    def __init__(
        self, *, config: LearnerConfig, run: str, run_dir: Path, identity: Identity, network: Network, journal: Journal,
        open_rollouts: Callable[[Head], Rollouts], door: HeadDoor | None = None, now: Callable[[], float] = trio.current_time,
        wall: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self.config, self.run_id, self.run_dir, self.identity = config, run, run_dir, identity
        self.journal, self.now, self.wall = journal, now, wall
        self.epoch = journal.new_epoch()
        clear_leftovers(run_dir)
        self.store = ChunkStore(run_dir / "versions" / "chunks", limit=1 << 62)
        role = SourceRole(run, self.epoch, doorkeeper=door)
        self.swarm = Swarm(network, identity, self.store, role, self, name="learner", now=now, wall=wall)
        self.local_engine: LocalEngine | None = None
        self.audits: Audits | None = None
        self.publisher = Publisher(
            identity, run, run_dir, self.swarm, epoch=self.epoch, segment_bytes=config.swarm.segment_bytes,
            chunk_bytes=config.swarm.chunk_bytes, now=now, wall=wall,
        )  # fmt: skip
        self.nodes: dict[str, NodeState] = {}
        self.gone, self.reports = Latest(MAX_GONE), deque[str](maxlen=MAX_REPORTS)
        self.refusals = 0
        """how often something was reported in this epoch"""
        self._door = door
        self.trust = Trust(config.standing.rules(), self.nodes, door, config.rollout.max_staleness, wall=wall, expel=self._expel)
        self.swarm.conduct = self.trust
        self.keeper = PoolKeeper(config, run_dir, self.nodes, self.send, now, door=door, proven=self.trust.standing.proven)
        self.trainer_requests = TrainerRequests(self, config.trainer_config().steps)
        self.started, self.tally = now(), KeptTally(journal)
        self.final_nodes: dict[str, dict[str, Any]] = {}
        """the nodes as they were when the run ended"""
        self.final_pool: dict[str, Any] = {}
        self.provider: Provider | None = None
        self.finished, self.trainer_gone = self.trainer_requests.finished, self.trainer_requests.trainer_gone
        self._moved = trio.Event()
        """set, and replaced, when a node reports or goes"""
        self._fault: sqlite3.Error | None = None
        self._faulted = trio.Event()
        self.rollouts = open_rollouts(self)
        self.rollouts.rescue.took_from = self.trust.back_offs.more
        self.requests = SwarmRequests(
            config.requests, self.rollouts.collector.vocab_size, epoch=self.epoch, send=self.send, nodes=self._request_views,
            training_wants=lambda: not self.rollouts.held_back, report=self.report,
            beside=self.rollouts.settings.groups_per_step > 0, now=now,
        )  # fmt: skip
        self.requests.book.credible = self.trust.credible
        self.probing = self.rollouts.beside = Probing(
            self.requests, self.rollouts, self.trust, nodes=self._plain_views, send=self.send, now=now
        )
        self.trust.take_back = self.probing.take_back
        self.evaluations = HeadEvaluations(self, ())
        self.samples = SampleFile(
            run_dir, config.status.samples_per_step, config.seed, tokenizer=self.rollouts.tokenizer, name_of=journal.node_name,
            in_thread=self.rollouts.buffers.in_thread,
        )  # fmt: skip

    def audit(self, audits: Audits) -> None:
        """Have what nodes generate checked. Call it before `run`."""
        self.audits = self.probing.checks = audits
        self.rollouts.buffers.on_whole, self.rollouts.rescue.waits_for = audits.whole, audits.waited_for

    def evaluate(self, those: Iterable[Evaluation]) -> None:
        """Make these evaluations beside training. Call it before `run`."""
        self.evaluations = HeadEvaluations(self, those)

    def expect_local_engine(self, peer: str) -> None:
        """`peer` is a node on this machine, with the learner's local engine. Call it before `run`, and before any version."""
        s = self.config.local_engine
        local_rollout = LocalRollout(floor_s=s.floor_s, most_s=s.most_s or math.inf)
        self.trust.answer_for(peer)
        self.local_engine = LocalEngine(peer, local_rollout, self.nodes, pool=self.keeper.pool, send=self.send, now=self.now)
        self.swarm.keep_apart(peer)

    async def run(self, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        """Serve the swarm until cancelled. sqlite3.Error when the journal cannot be written."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self.swarm.run)
            for part in (
                self.rollouts.buffers.score_whole, self.rollouts.keep_dispatched, self.rollouts.keep_migrating,
                self.rollouts.keep_hedged, self.rollouts.keep_answered, self.rollouts.tokens.run, self.requests.run,
                self.probing.run, self.evaluations.runner.run, self.samples.run, self._tick, give_back_now_and_then,
                self._until_faulted,
            ):  # fmt: skip
                nursery.start_soon(part)
            if self.audits is not None:
                nursery.start_soon(self.audits.run)
            if self.provider is not None:
                nursery.start_soon(self.provider.run)
            task_status.started()

    @contextmanager
    def _keeping_books(self) -> Iterator[None]:
        """Around what a node brings about. A journal that cannot be written (a full disk) is not the node's fault, and would
        end its link alone: it must end the run, before memory and journal drift apart. The run is resumed from the journal."""
        try:
            yield
        except sqlite3.Error as error:
            self._fault = error
            self._faulted.set()

    async def _until_faulted(self) -> None:
        await self._faulted.wait()
        assert self._fault is not None
        raise self._fault

    async def _tick(self) -> None:
        """Catches what no event announces: a node that went quiet, room that a timeout opened."""
        ticks = 0
        while True:
            await trio.sleep(TICK_S)
            ticks += 1
            if ticks % STALL_TICKS == 0:
                self.rollouts.rescue.look(self.now(), self.node_views)
            self.rollouts.buffers.truncate_stuck(self.now())
            self.requests.tick()
            self.trust.tick()
            self.keeper.tick(self.rollouts)
            if self.local_engine is not None:
                self.local_engine.look(self.rollouts)
            self.rollouts.need_dispatch()

    # --- nodes -------------------------------------------------------------------------------------------------------

    def node_views(self) -> list[NodeView]:
        """The dispatcher's view of the nodes."""
        rollouts, now, epoch, active, counts = self.rollouts, self.now(), self.epoch, self.generates, self.trust.credible
        withheld = self.trust.withheld
        load, beside, delivers = rollouts.load, rollouts.beside.footprint, rollouts.rescue.delivers(now)
        limits = self.trust.limits(load, lambda node: node.serves(epoch, now) and active(node.link.peer), rollouts.steering.slow)
        return [
            node.view(
                load(peer), epoch, now, active(peer) and not withheld(peer), beside=beside(peer), limit=limits.get(peer),
                credible=counts(peer), delivers=delivers(peer),
            ) for peer, node in self.nodes.items()
        ]

    def _plain_views(self) -> list[NodeView]:
        """The same without what follows from their standing."""
        load, beside, active, now = self.rollouts.load, self.rollouts.beside.footprint, self.generates, self.now()
        views = (node.view(load(p), self.epoch, now, active(p), beside=beside(p)) for p, node in self.nodes.items())
        return list(map(self.rollouts.steering.forecast.view, views))

    def _request_views(self) -> list[NodeView]:
        """The same with what training's forecast knows of each."""
        return [self.rollouts.steering.forecast.view(node) for node in self.node_views()]

    def generates(self, peer: str) -> bool:
        """Whether this node is given work."""
        if self.local_engine is not None and self._is_local(peer):
            return self.local_engine.generates
        return self.keeper.pool.active(peer)

    def _is_local(self, peer: str) -> bool:
        return self.local_engine is not None and peer == self.local_engine.peer

    def send(self, peer: str, message: object) -> None:
        if peer in self.nodes:
            self.nodes[peer].link.post(message)

    def report(self, peer: str, refusal: Refusal) -> None:
        """Something a node did was refused: said once in the log, kept for the status page."""
        self.reports.append(text := f"{refusal.at(peer=peer)!s:.{MAX_LINE}}")
        complain(log, peer, text)
        self.refusals += 1

    async def on_up(self, link: Link) -> None:
        """A node's link is up: it takes part from here on. What an older link of the same node held goes to others."""
        if self.nodes.pop(link.peer, None) is not None:
            with self._keeping_books():
                self.rollouts.on_node_lost(link.peer)
        catalog = self.publisher.catalog()
        oldest = min((e.version for e in catalog.entries if e.kind != "descriptor"), default=None) if catalog else None
        self.nodes[link.peer] = NodeState(link, self.now(), oldest, heard=self.now(), back_off=self.trust.back_offs.of(link.peer))
        self.gone.pop(link.peer, None)
        if not self._is_local(link.peer):
            self.keeper.joined(link.peer, link.name)
        with self._keeping_books():
            self.journal.record_node(link.peer, link.name)
        if self.audits is not None:
            self.audits.joined()
        remark(log, link.peer, f"node {link.name} ({link.peer}) joined")

    async def on_down(self, link: Link, reason: str) -> None:
        """A node's link is closed: what the node held goes to others, and its row stays on the status page as gone."""
        if (node := self.nodes.pop(link.peer, None)) is None:
            return  # its arrival failed half way
        self._wake()
        self.gone[link.peer] = self.describe(node) | {"alive": False, "reason": reason[:MAX_REASON]}
        self.keeper.pool.left(link.peer, self.now())
        moved = 0
        with self._keeping_books():
            self.journal.record_node(link.peer, link.name, node.tokens, node.bytes_from_peers + node.bytes_from_head)
            moved = self.rollouts.on_node_lost(link.peer)
        remark(log, link.peer, f"node {link.name} ({link.peer}) is gone: {reason}; {moved} sequences go elsewhere")

    def _wake(self) -> None:
        self._moved.set()
        self._moved = trio.Event()

    def still_follows(self, node: NodeState) -> bool:
        """Whether it takes new versions."""
        return not node.draining and not self.keeper.pool.sleeps(node.link.peer)

    async def moved(self) -> None:
        """Wait until a node reports or goes."""
        await self._moved.wait()

    def on_refusal(self, peer: str, refusal: Refusal) -> None:
        self.report(peer, refusal)

    def _expel(self, peer: str, why: str) -> None:
        """Its link ends, and it may not come for a while."""
        self.swarm.peering.keep_away(peer, f"expelled: {why}", ban=self._door is None)

    def catalog(self) -> Catalog | None:
        return self.publisher.catalog()

    async def on_message(self, link: Link, message: object) -> None:
        if self._fault is None:
            with self._keeping_books():
                self._handle(link, message)

    def _handle(self, link: Link, message: object) -> None:
        node = self.nodes[link.peer]
        match message:
            case Tokens():
                accepted = self.rollouts.on_tokens(link.peer, message)
                node.on_tokens(accepted)
                self.keeper.pool.accepted(link.peer, accepted)
            case NodeStatus():
                self._on_status(node, message)
            case Installed():
                self._on_installed(node, message)
            case Rejected():
                if message.cause not in (PAST, UPDATING, DRAINING, RESTING) or not self.trust.credible(link.peer):
                    node.back_off.more(self.now())
                node.draining = node.draining or message.cause == DRAINING
                self.rollouts.on_rejected(link.peer, message)
            case Terms() if self._is_local(link.peer):
                pass  # the learner's machine has its price in the config
            case Terms() if message.sound:
                self.keeper.on_terms(link.peer, message)
            case Terms():
                raise Refusal(f"no prices (0 <= idle <= active <= {MAX_PRICE:g}): {message}", fatal=True)
            case Report():  # weighed by a person: one node's word never evicts another
                what = Refusal(f"{link.name} reports: {message.reason[:MAX_REASON]}", peer=message.peer, version=message.version)
                self.report(link.peer, what)
            case Bye():
                node.draining = True
                self._wake()
                if not message.draining:
                    link.post(Bye("everything of yours is here", done=False))
            case _:
                raise Refusal(f"a node does not send {type(message).__name__}", fatal=True)

    def tell_catalog(self) -> None:
        """To every node: for the epoch's first version, which those who are here wait for."""
        for node in self.nodes.values():
            self.swarm.send_catalog(node.link)

    def _on_status(self, node: NodeState, message: NodeStatus) -> None:
        check_status(message, self.publisher.current or Version(self.epoch, 0), self.trust.is_checked(node.link.peer))
        was_open = node.ready and not node.updating and node.version == message.version
        node.on_status(message, self.now())
        self._wake()
        seen = node.believed(message, self.rollouts.load(node.link.peer))
        if seen is not None:
            self.rollouts.steering.forecast.observe(node.link.peer, seen.running, seen.tokens_per_s)
        if node.ready and not node.updating and not was_open:
            self.rollouts.need_dispatch()

    def _on_installed(self, node: NodeState, message: Installed) -> None:
        expected = self.publisher.state_digest(message.version)
        node.on_installed(message, expected, self.publisher.current)
        if expected is not None and not node.digest_ok:
            self.report(node.link.peer, Refusal("installed state has another digest", version=message.version))
        if self._is_local(node.link.peer):
            return  # how long others wait for a version is another matter
        from_peers = min(message.bytes_from_peers, self.publisher.kept_bytes)
        if (took := self.publisher.installed(node.link.peer, message.version, from_peers)) is not None:
            self.keeper.pool.received(node.link.peer, from_peers)
            self.keeper.pool.installed(node.link.peer, took, self.now())

    # --- what a person sees ------------------------------------------------------------------------------------------

    def describe(self, node: NodeState) -> dict[str, Any]:
        """A node's row of the status."""
        more = self.local_engine.describe() if self.local_engine is not None and self._is_local(node.link.peer) else {}
        more |= self.trust.describe(node.link.peer)
        return node.describe() | self.keeper.pool.describe(node.link.peer, self.now()) | more

    def pool_status(self) -> dict[str, Any]:
        """The pool's part of the status."""
        return self.keeper.pool.status(self.now()) | {"asked": self.provider.said if self.provider is not None else ""}

    def status(self) -> dict[str, Any]:
        """Everything `shoal status` shows, as plain values."""
        self.publisher.count_traffic()
        tally, trainer = self.tally.count(self.now(), anew=self.finished.is_set()), self.trainer_requests
        nodes = self.final_nodes or {p: self.describe(n) for p, n in self.nodes.items()}
        return {
            "run": self.run_id, "epoch": self.epoch, "pid": os.getpid(), "trainer_pid": trainer.trainer_pid,
            "step": trainer.step, "steps": trainer.steps, "seconds": self.now() - self.started,
            "version": str(self.publisher.current) if self.publisher.current else None,
            "nodes": [*islice(nodes.values(), MAX_ROWS), *(g for p, g in self.gone.items() if p not in nodes)],
            "max_staleness": self.config.rollout.max_staleness,
            "max_staleness_seen": self.rollouts.buffers.max_staleness_seen,
            "refusals": self.refusals, "turned_away": self.swarm.turned_away, "pairs": self.swarm.pairs(),
            "unscored": {"groups": self.rollouts.buffers.unscored_groups, "last": self.rollouts.buffers.unscored_last},
            "trajectories": {
                "reserved": tally.reserved, "consumed": tally.consumed, "aborted": tally.aborted,
                "outstanding": tally.outstanding + tally.finished, "lost": tally.lost,
            },
            "requests": self.requests.status(), "evaluations": self.evaluations.runner.running(),
            "moved": dict(self.rollouts.steering.moves),
            "resumed": {"groups": self.rollouts.resumed_groups, "tokens": self.rollouts.resumed_tokens},
            "pool": self.final_pool or self.pool_status(),
            "local_engine": self.local_engine.status() if self.local_engine is not None else {},
            "caught": self.trust.caught_status(), "audits": self.audits.status() if self.audits is not None else {},
            "redundancy": self.rollouts.buffers.redundancy.total.values(),
            **self.publisher.published.summary(),
            "metrics": trainer.evaluation | trainer.latest,
            "evals": {str(step): value for step, value in trainer.evals.items()},
            "checkpoint": trainer.checkpoint, "reports": list(self.reports)[-10:], "samples": self.samples.newest,
            **trainer.history.status(),
        }  # fmt: skip
