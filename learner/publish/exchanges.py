"""The head's exchanges: one towards the swarm and, where the learner has an engine of its own, one towards that engine's node.

That node is on this very machine. In the swarm's exchange it would be handed chunks to distribute over the uplink that it shares
with the head, its loopback would be taken for that uplink's rate, and what it gets for learner egress. So it is the one
neighbour of an exchange of its own, and nobody is told of it. Must not know the publisher or the trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import trio

from p2p.broadcast.exchange import Exchange
from p2p.broadcast.transfer import Transfer
from p2p.weights.store import ChunkStore


class Exchanges:
    """As one `Exchange` to the publisher; manifests are in all of them, numbers are the swarm's."""

    def __init__(self, swarm: Exchange, local_engine: Exchange | None = None, local_peer: str = "") -> None:
        self.swarm, self.local_engine, self.local_peer = swarm, local_engine, local_peer

    @property
    def store(self) -> ChunkStore:
        return self.swarm.store

    @property
    def spreads(self) -> Mapping[bytes, Transfer]:
        return self.swarm.spreads

    def of(self, peer: str) -> Exchange:
        """The exchange that `peer` is a neighbour in."""
        return self.local_engine if self.local_engine is not None and peer == self.local_peer else self.swarm

    async def run(self, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            for exchange in self._all:
                await nursery.start(exchange.run)
            task_status.started()

    def offer(self, header_part: bytes, *, announce: bool) -> None:
        for exchange in self._all:
            exchange.offer(header_part, announce=announce)

    def extend(self, mid: bytes, part: bytes, *, announce: bool) -> None:
        for exchange in self._all:
            exchange.extend(mid, part, announce=announce)

    def forget(self, mid: bytes) -> list[bytes]:
        """As `Exchange.forget`."""
        digests = self.swarm.forget(mid)
        if self.local_engine is not None:
            self.local_engine.forget(mid)
        return digests

    @property
    def _all(self) -> list[Exchange]:
        return [self.swarm] if self.local_engine is None else [self.swarm, self.local_engine]
