"""The learner's local engine: a node on the trainer's device. It generates in its turns, else the trainer has the device.

Thin shell: whose turn it is is `economy.turns`'s business, what the node is given the dispatcher's. When its turn is over it
hands back what it holds, tokens and all, and others go on from there. Must not know the trainer's socket or processes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import trio

from learner.economy.local_rollout import LocalRollout
from learner.economy.pool import Pool
from learner.economy.turns import Turns
from learner.head.node_state import NodeState
from learner.rollouts.buffers import StepGroups
from learner.rollouts.controller import Rollouts
from p2p.protocol.generation import Interrupt
from p2p.protocol.prices import Activate

log = logging.getLogger("shoal.local_engine")

NAME = "local-engine"
"""The name that its node joins under."""

LOOK_S = 0.02
"""Seconds between two looks whose turn it is, while the trainer waits for its own: little against a step."""

HAND_BACK_S = 5.0
"""Seconds that the engine has to hand over. After that the trainer begins all the same, and the log says so."""


class LocalEngine:
    """`peer`: its node's; `nodes` and `pool`: the head's, of the other nodes."""

    def __init__(
        self, peer: str, local_rollout: LocalRollout, nodes: Mapping[str, NodeState], pool: Pool,
        send: Callable[[str, object], None], now: Callable[[], float],
    ) -> None:  # fmt: skip
        self.peer, self.turns = peer, Turns(local_rollout)
        self._nodes, self._pool, self._send, self._now = nodes, pool, send, now
        self._waits = False
        """the trainer has nothing to do"""
        self._off_at = -math.inf
        self._begun = False
        self.last: dict[str, float] = {}
        """of the last step, as metrics"""

    @property
    def generates(self) -> bool:
        return self.turns.on

    def begin(self, rollouts: Rollouts) -> None:
        """The trainer is about to begin a step; the one before is over."""
        turns = self.turns
        if self._begun:
            self.last = {
                "local_engine/seconds": turns.generated_s, "local_engine/trainer_wait_s": turns.waited_s,
                "local_engine/remote_wait_s": turns.remote_wait_s,
            }  # fmt: skip
            self.last["local_engine/next_s"] = turns.stepped(holds=self._pool.enough)
        self._begun = True
        turns.begin(self._now(), self._remote(rollouts))

    def stay_on(self, rollouts: Rollouts) -> None:
        """Training is complete, and the device is the engine's from now on."""
        self.turns.over = True
        self.look(rollouts)

    async def next_groups(self, rollouts: Rollouts, step: int, seen: int) -> StepGroups:
        """As `TrainingBuffers.next_groups`, with the device free for the trainer when it returns."""
        await self._free(rollouts)
        began, seeded = self._now(), self.turns.generated_s
        self._waits = True
        try:
            found = await rollouts.buffers.next_groups(step, seen)
        finally:
            self._waits = False
        self.turns.waited(max(0.0, self._now() - began - (self.turns.generated_s - seeded)))
        await self._free(rollouts)
        return found

    async def _free(self, rollouts: Rollouts) -> None:
        while True:
            self.look(rollouts)
            if not self.turns.on:
                load = rollouts.load(self.peer)
                if not load:
                    return
                if self._now() - self._off_at > HAND_BACK_S:
                    log.warning("the learner's local engine still holds %d sequences; the trainer begins all the same", load)
                    return
            await trio.sleep(LOOK_S)

    def look(self, rollouts: Rollouts) -> None:
        """Whose turn it is now; to be called every now and then."""
        now, node, was = self._now(), self._nodes.get(self.peer), self.turns.on
        remote, load = self._remote(rollouts), rollouts.load
        trains = rollouts.collector.load(self.peer)
        back = rollouts.held_back
        idle = [p for p in remote if load(p) < self._nodes[p].capacity] if back else []
        on = self.turns.look(
            now, able=node is not None and node.serves(rollouts.epoch, now), remote=remote,
            whole=rollouts.ledger.ready(rollouts.ledger.step), plenty=back and not trains, waits=self._waits,
            idle=len(idle) / len(remote) if remote else 0.0,
        )  # fmt: skip
        if on == was:
            return
        if on:
            self._send(self.peer, Activate("active", self.turns.why))
            rollouts.need_dispatch()
            return
        self._off_at = now
        self._send(self.peer, Activate("warm", "the trainer's turn"))
        if held := rollouts.working(self.peer):
            self._send(self.peer, Interrupt(tuple(held)))

    def _remote(self, rollouts: Rollouts) -> Sequence[str]:
        now, epoch = self._now(), rollouts.epoch
        return [p for p, n in self._nodes.items() if p != self.peer and self._pool.active(p) and n.serves(epoch, now)]

    def status(self) -> dict[str, Any]:
        """Plain values for the status page."""
        return {
            "there": self.peer in self._nodes, "generates": self.turns.on, "why": self.turns.why if self.turns.on else "",
            "next_s": self.turns.local_rollout.turn_s, "last": dict(self.last),
        }  # fmt: skip

    def describe(self) -> dict[str, Any]:
        """Its part in its node's row."""
        active = self.turns.on
        why = self.turns.why or "while others are too few"
        return {"activity": "active" if active else "warm", "why": why if active else "the trainer's turn", "why_active": why}
