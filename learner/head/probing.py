"""Probes as a part of a run: beside training's and others' sequences, at proven nodes with free places, while there is an alert.

A thin shell around `ProbeBook`. Must not know what a check is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import SystemRandom
from typing import Protocol

import trio

from learner.dispatch.node_table import NodeView
from learner.head.trust import Trust
from learner.rollouts.beside import BesideTraining, Footprint, GivenOut, Taken
from learner.rollouts.controller import Rollouts
from learner.rollouts.probe import FreeNode, Probe
from learner.rollouts.probes import MOST_AT_ONCE, ProbeBook
from learner.rollouts.taking_back import TakenBack, take_back
from p2p.protocol.generation import Abort, Rejected
from p2p.protocol.rollout import TokenEvent
from p2p.version import Version

LOOK_S = 0.25
"""Seconds between two looks at what is under way."""


class ProbeChecks(Protocol):
    """Whoever checks probes."""

    @property
    def has_room(self) -> bool:
        """Whether more may be begun now."""

    def probe(self, probe: Probe) -> None:
        """There is more of a probe, or it is over."""


class Probing(BesideTraining):
    """Beside `others`, which nodes hold too. `nodes()`: views of them as they are, whatever is kept from them."""

    def __init__(
        self, others: BesideTraining, rollouts: Rollouts, trust: Trust, *, nodes: Callable[[], Sequence[NodeView]],
        send: Callable[[str, object], None], now: Callable[[], float],
    ) -> None:  # fmt: skip
        self._others, self._rollouts, self._trust = others, rollouts, trust
        self._nodes, self._send, self._now = nodes, send, now
        # Who keeps an update back until all that it has is over is not held up by more of what it had.
        self.book = ProbeBook(
            rollouts.collector.vocab_size, rollouts.settings.sampling.stop, SystemRandom().random,
            behind=not rollouts.settings.finish_s,
        )  # fmt: skip
        self.checks: ProbeChecks | None = None
        """without it there are none"""

    # ---- work out

    def given(self, out: GivenOut) -> None:
        """On alert, with copies of it: an original and its copies come in no order that tells which is which."""
        if not self._trust.on_alert():
            self.book.rest()
            return
        if out and self.checks is not None and self.checks.has_room and self.book.under_way < MOST_AT_ONCE:
            given = [(peer, request) for peer, requests in out.items() for request in requests]
            for peer, request in self.book.give(given, self._free(), self._now()):
                out.setdefault(peer, []).append(request)
                self._trust.probes_given()
        for requests in out.values():  # all of them, or those would tell that have a copy among them
            requests.sort(key=lambda r: r.request_id)

    async def run(self) -> None:
        """For ever: give up those that are late."""
        while True:
            await trio.sleep(LOOK_S)
            if self.book.under_way:
                self._trust.probes_given()
                self._stop(self.book.expire(now := self._now(), self._rollouts.rescue.impatience(now)))

    def _free(self) -> list[FreeNode]:
        standing = self._trust.standing
        return [
            FreeNode(
                n.peer, n.version, standing.may_hold(n.peer, n.capacity) - n.load,
                found_wrong=standing.found_wrong(n.peer), holds=Footprint(n.context, n.growth), room=n.room,
            ) for n in self._nodes()
            if n.live and not n.draining and standing.proven(n.peer) and not standing.trusts(n.peer)
        ]  # fmt: skip

    def published(self, version: Version) -> None:
        self.book.published(version)
        self._others.published(version)

    # ---- work in

    def owns(self, peer: str, request_id: str) -> bool:
        return self.book.owns(peer, request_id) or self._others.owns(peer, request_id)

    def on_tokens(self, peer: str, run: TokenEvent) -> Taken:
        """Those of a probe are checked, and go nowhere else."""
        if not self.book.owns(peer, run.request_id):
            return self._others.on_tokens(peer, run)
        heard = self.book.tokens(peer, run, self._now())
        for node, request_id in heard.taken.cancel:
            self._send(node, Abort((request_id,)))
        if heard.probe is not None:
            self._look(heard.probe)
        if heard.taken.made:
            self._trust.standing.ended(peer, heard.taken.made)  # beside what the unproven have a share of
        return heard.taken._replace(made=0)  # it was not silent, or quick, in anybody's place

    def on_rejected(self, peer: str, message: Rejected) -> None:
        """A probe that was not taken is over."""
        if not self.book.owns(peer, message.request_id):
            self._others.on_rejected(peer, message)
        elif (probe := self.book.working(peer).get(message.request_id)) is not None:
            self.book.drop(probe, self._now())
            self._look(probe)

    def take(self, peer: str, request_id: str, reason: str) -> None:
        if not self.book.owns(peer, request_id):
            self._others.take(peer, request_id, reason)

    def on_node_lost(self, peer: str) -> int:
        for probe in self.book.lost(peer, self._now()):
            self._look(probe)
        return self._others.on_node_lost(peer)

    def take_back(self, peer: str) -> TakenBack:
        """What `peer` made is not believed: see `take_back`. Its probe is over."""
        self._stop(self.book.lost(peer, self._now()))
        self.book.anew(peer)
        return take_back(self._rollouts, peer)

    def _stop(self, probes: Sequence[Probe]) -> None:
        for probe in probes:
            self._send(probe.node, Abort((probe.request.request_id,)))
            self._look(probe)

    def _look(self, probe: Probe) -> None:
        if self.checks is not None:
            self.checks.probe(probe)

    # ---- what nodes hold

    def load(self, peer: str) -> int:
        return self._others.load(peer) + len(self.book.working(peer))

    def working(self, peer: str) -> list[str]:
        return [*self._others.working(peer), *self.book.working(peer)]

    def footprint(self, peer: str) -> Footprint:
        """What all of it takes."""
        those = [self._others.footprint(peer), *(probe.footprint for probe in self.book.working(peer).values())]
        return Footprint(*map(sum, zip(*those, strict=True)))

    def progress(self) -> dict[str, dict[str, int]]:
        """Without probes: nobody waits for them, so none is late."""
        return self._others.progress()
