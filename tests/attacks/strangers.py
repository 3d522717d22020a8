"""Strangers at a live head: each has a membership, says what a test wants as fast as the head reads it, and comes again."""

from __future__ import annotations

from collections.abc import Iterable

import trio

from learner.client.messages import CommitStep
from p2p.channel.port import BULK, Channel
from p2p.errors import ChannelClosed, Unreachable
from p2p.identity import Identity
from p2p.membership.admission import Membership, sign_membership
from p2p.protocol.join import Welcome
from p2p.protocol.messages import decode
from p2p.protocol.wire import encode
from p2p.version import Version
from tests.support.harness import RUN, WALL
from tests.support.rogue import greet, hello
from tests.swarm.test_head import HEAD, Bench, good, publish


class Stranger:
    """One identity."""

    def __init__(self, bench: Bench, number: int, proof: bytes = b"") -> None:
        """`proof`: its membership; without one it gets what the head gives today."""
        self.bench, self.who, self.proof = bench, Identity.from_seed(number.to_bytes(4, "big") * 8), proof
        self.admitted = self.sent_bytes = self.heard_bytes = self.said = 0
        """links that the head let it have, and bytes and messages of it"""

    async def attack(
        self, frames: Iterable[bytes], pause_s: float = 0.0, *, stay_s: float = 1e9, again_s: float = 0.15
    ) -> None:
        """For ever: link, say all of `frames` over and over, until the head closes; link again, `again_s` later. With `stay_s` it
        goes by itself after so long."""
        proof = self.proof or sign_membership(HEAD, Membership(RUN, self.bench.head.epoch, self.who.peer_id, int(WALL + 1e6)))
        async with self.bench.switch.network(self.who.peer_id) as network:
            while True:
                try:
                    control, answer = await greet(network, HEAD.peer_id, hello(proof))
                    if isinstance(answer, Welcome):
                        bulk, _ = await greet(network, HEAD.peer_id, hello(proof), BULK)
                        self.admitted += 1
                        await self._link(control, bulk, list(frames), pause_s, stay_s)
                    else:
                        await control.aclose("refused")
                except (ChannelClosed, Unreachable):
                    pass
                await trio.sleep(again_s)

    async def _link(self, control: Channel, bulk: Channel, frames: list[bytes], pause_s: float, stay_s: float) -> None:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._hear, control)
                nursery.start_soon(self._hear, bulk)
                with trio.move_on_after(stay_s):
                    while True:
                        for frame in frames:
                            await control.send(frame)
                            self.sent_bytes += len(frame)
                            self.said += 1
                            await trio.sleep(pause_s)
                nursery.cancel_scope.cancel()
        except* (ChannelClosed, Unreachable):
            pass
        finally:
            with trio.CancelScope(shield=True):
                await control.aclose("bye")
                await bulk.aclose("bye")

    async def _hear(self, channel: Channel) -> None:
        while True:
            self.heard_bytes += len(await channel.receive())


async def steps_made(bench: Bench, steps: int, first: int = 0) -> float:
    """Seconds of the head's clock that so many steps take, one after the other, with one honest node that joins for it."""
    node = await bench.join(good)
    start = trio.current_time()
    for step in range(first, first + steps):
        await bench.batch(step, 120)
        bench.head.trainer_requests.on_commit(CommitStep(step + 1, ""))
        await publish(bench.head, step + 1)
        node.version = Version(bench.head.epoch, step + 1)
    assert not node.closed, "the honest node lost its link"
    return trio.current_time() - start


def frame(message: object) -> bytes:
    """A legal message as it is on the wire."""
    data = encode(message)
    decode(data)
    return data
