"""A peer that speaks the real protocol, with or without a valid membership, and says whatever a test wants."""

from __future__ import annotations

from collections.abc import Sequence

import trio

from p2p.channel.port import BULK, CONTROL, Channel
from p2p.errors import ChannelClosed
from p2p.limits import PROTOCOL_VERSION
from p2p.membership.admission import Membership, sign_membership
from p2p.protocol.join import Hello, Welcome
from p2p.protocol.messages import decode
from p2p.protocol.wire import encode
from tests.support.harness import RUN, WALL, SwarmUnderTest
from tests.support.memory_network import MemoryNetwork


def membership(swarm: SwarmUnderTest, peer: str, *, epoch: int = 1, run: str = RUN, lifetime: float = 1e6) -> bytes:
    """What the head would have given `peer`."""
    return sign_membership(swarm.head_identity, Membership(run, epoch, peer, int(WALL + lifetime)))


def hello(proof: bytes, *, protocol: int = PROTOCOL_VERSION, run: str = RUN, name: str = "rogue", addresses=()) -> Hello:
    return Hello(protocol, run, "", proof, tuple(addresses), name, "test", "")


async def greet(network: MemoryNetwork, peer: str, words: object, kind: str = CONTROL) -> tuple[Channel, object]:
    """Open one channel and say `words`; the channel and the answer."""
    channel = await network.open(peer, [f"/memory/{peer}"], kind)
    await channel.send(encode(words))
    return channel, decode(await channel.receive())


class Rogue:
    """A link to one victim. What the victim says is kept in `heard`."""

    def __init__(self, network: MemoryNetwork, victim: str) -> None:
        self.network, self.victim, self.peer = network, victim, network.peer_id
        self.heard: list[object] = []
        self.closed = ""
        self._gone = trio.Event()
        self.control: Channel
        self.bulk: Channel

    async def connect(self, nursery: trio.Nursery, proof: bytes, addresses: Sequence[str] = ()) -> Rogue:
        words = hello(proof, addresses=addresses)
        self.control, answer = await greet(self.network, self.victim, words)
        assert isinstance(answer, Welcome)
        self.bulk, answer = await greet(self.network, self.victim, words, BULK)
        assert isinstance(answer, Welcome)
        nursery.start_soon(self._listen, self.control)
        nursery.start_soon(self._listen, self.bulk)
        return self

    async def _listen(self, channel: Channel) -> None:
        try:
            while True:
                self.heard.append(decode(await channel.receive()))
        except ChannelClosed as closed:
            self.closed = self.closed or str(closed)
            self._gone.set()

    async def say(self, *messages: object) -> None:
        for message in messages:
            await self.control.send(encode(message))

    async def until_closed(self, seconds: float = 10.0) -> str:
        with trio.fail_after(seconds):
            await self._gone.wait()
        return self.closed
