"""The pool's shell: tells nodes who generates, has those that no longer do hand back what they hold, keeps the bill on disk.

What is decided, and why, is `economy.pool`'s business. Must not know the trainer or how versions travel.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from learner.admission.head_door import HeadDoor
from learner.config import LearnerConfig
from learner.economy.candidates import Rules
from learner.economy.pool import Pool
from learner.economy.priced_nodes import Seen
from learner.head.node_state import NodeState
from learner.rollouts.controller import Rollouts
from p2p.complaints import remark
from p2p.errors import UsageError
from p2p.files import write_whole
from p2p.protocol.generation import Interrupt
from p2p.protocol.prices import Terms

log = logging.getLogger("shoal.pool")

SAY_S = 600.0
"""Seconds until the same kind of hindrance is said again: a person reads it, and little changes in ten minutes."""
KEEP_S = 10.0
"""Seconds between two times that the bill is written down: a crash costs the budget's account so much at the most."""


class PoolKeeper:
    """`send(peer, message)` reaches a node; `now` and `nodes` are the head's. `door` knows by which ticket each came, `proven`
    whose word counts."""

    def __init__(
        self, config: LearnerConfig, run_dir: Path, nodes: Mapping[str, NodeState], send: Callable[[str, object], None],
        now: Callable[[], float], *, door: HeadDoor | None = None, proven: Callable[[str], bool],
    ) -> None:  # fmt: skip
        a = config.activation
        self._file = run_dir / "bill.json"
        self._nodes, self._send, self._now, self._door, self._proven = nodes, send, now, door, proven
        rules = Rules(
            margin=a.margin, release=a.release, dwell_s=a.dwell_s, explore_share=a.explore_share,
            max_usd_per_hour=a.max_usd_per_hour or math.inf, budget_usd=a.budget_usd or math.inf,
        )  # fmt: skip
        self.pool = Pool(
            rules, config.rollout.max_staleness, config.rollout.publish_every, prices=a.prices,
            learner_usd_per_hour=a.learner_usd_per_hour, spent_before=self._read(), most_usd_per_hour=a.most_usd_per_hour,
            most_usd_per_gb=a.most_usd_per_gb,
        )  # fmt: skip
        self._kept = now()
        self._said: dict[str, float] = {}
        """kind of hindrance -> when it was last said"""

    def _read(self) -> float:
        try:
            return float(json.loads(self._file.read_text())["usd"])
        except FileNotFoundError:
            return 0.0
        except (OSError, ValueError, KeyError, TypeError):
            raise UsageError(f"{self._file} cannot be read, so what the run has cost is not known: mend or remove it") from None

    def keep(self) -> None:
        """Write the bill down."""
        now = self._kept = self._now()
        usd = self.pool.spent_usd(now)
        if usd:
            rows = {row.peer: row.usd for row in self.pool.bill.rows(now)}
            write_whole(self._file, json.dumps({"usd": usd, "nodes_of_this_life": rows}))

    def joined(self, peer: str, name: str) -> None:
        """A node is here: what it costs may stand in the config, or on its ticket."""
        ticket = self._door.ticket_of(peer) if self._door is not None else None
        price = ticket.usd_per_hour if ticket is not None else None
        self.pool.joined(peer, name, self._now(), ticket=ticket.name if ticket is not None else "", usd_per_hour=price)

    def on_terms(self, peer: str, terms: Terms) -> None:
        told = self.pool.offered(peer, terms, self._now())
        if told is not None:
            self._send(peer, told)

    def tick(self, rollouts: Rollouts) -> None:
        """Decide, and carry it out."""
        now, load = self._now(), rollouts.load
        # What engines promise matters only where somebody may be let go.
        priced = self.pool.priced
        promise = rollouts.steering.forecast.full_rate if priced else lambda peer, sequences: 0.0
        seen = {
            peer: Seen(
                node.serves(rollouts.epoch, now),
                load(peer),
                node.capacity,
                sent_bytes=node.sent_bytes,
                full_rate=promise(peer, node.capacity),
                proven=self._proven(peer),
            )
            for peer, node in self._nodes.items()
        }
        self.pool.generation_s = rollouts.durations.generation_s
        orders = self.pool.tick(now, seen, held_back=priced and rollouts.held_back)
        for peer, order in orders:
            remark(log, peer, f"node {self._nodes[peer].link.name} is {order.state}: {order.why}")
            self._send(peer, order)
            if order.state != "active" and (held := rollouts.working(peer)):
                self._send(peer, Interrupt(tuple(held)))
        decision = self.pool.decision
        if decision is not None and (self.pool.known or not decision.short_by):
            self._say(decision.blocked, now)
        if now - self._kept >= KEEP_S:
            self.keep()
        if orders:
            rollouts.need_dispatch()

    def _say(self, blocked: str, now: float) -> None:
        """What stands in the way: when it is news, not each time that its numbers move."""
        kind = re.sub(r"[\d.,]+", "#", blocked)
        if kind and now - self._said.get(kind, -math.inf) >= SAY_S:
            self._said[kind] = now
            log.warning("%s", blocked)
