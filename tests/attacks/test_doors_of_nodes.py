"""What strangers send to honest nodes, and not to the head: floods of what is legal between nodes, and readers who never read.
What waits for them is bounded, and nodes have their versions as soon as without them. Real agents in memory, on a mock clock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import pytest
import trio

from p2p.channel.port import BULK
from p2p.errors import ChannelClosed, Unreachable
from p2p.protocol.join import Welcome
from p2p.protocol.versions import GetParts, Have, Subscribe, Want
from p2p.version import Version
from tests.attacks.probe import probing
from tests.attacks.strangers import frame
from tests.attacks.test_relays import LEAST, UPLINK, Known, Versions
from tests.support.harness import CHUNK, NodeUnderTest, SwarmUnderTest, identity, open_swarm
from tests.support.nightly import HOW_MANY
from tests.support.rogue import greet, hello, membership

HONEST = 2

FIRST = 100
"""Of the strangers' identities."""

STAYS_S = 6.0
"""Seconds of a link of one that floods: a link that is made anew is no better."""

def floods(node: NodeUnderTest) -> list[bytes]:
    """All that a node may say to this one of the versions that it has, over and over."""
    some = []
    for mid, transfer in node.agent.swarm.transfers.items():
        chunks = tuple(range(min(8, transfer.session.total or 0)))
        some += [frame(Subscribe(mid, b"")), frame(Have(mid, chunks)), frame(Want(mid, chunks)), *[frame(GetParts(mid))] * 8]
    return some


class Flooder:
    """A member that links to an honest node, says all of it as fast as that reads, and comes again when its link ends."""

    def __init__(self, swarm: SwarmUnderTest, number: int, victim: NodeUnderTest, *, deaf: bool) -> None:
        self.swarm, self.who, self.victim, self.deaf = swarm, identity(number), victim, deaf
        self.linked = self.said = 0

    async def attack(self, pause_s: float) -> None:
        proof = membership(self.swarm, self.who.peer_id)
        async with self.swarm.switch.network(self.who.peer_id) as network:
            while True:
                try:
                    control, answer = await greet(network, self.victim.peer, hello(proof))
                    if isinstance(answer, Welcome):
                        bulk, _ = await greet(network, self.victim.peer, hello(proof), BULK)
                        self.linked += 1
                        if self.deaf:
                            self.swarm.switch.stall(self.victim.peer, self.who.peer_id)
                        with trio.move_on_after(1e9 if self.deaf else STAYS_S):
                            async with trio.open_nursery() as nursery:
                                for channel in control, bulk:
                                    nursery.start_soon(self._read, channel.receive)
                                while True:
                                    for words in floods(self.victim):
                                        await control.send(words)
                                        self.said += 1
                                        await trio.sleep(pause_s)
                        for channel in control, bulk:
                            await channel.aclose("bye")
                except* (ChannelClosed, Unreachable):
                    pass
                if self.deaf:
                    self.swarm.switch.resume(self.victim.peer, self.who.peer_id)
                await trio.sleep(0.5)

    async def _read(self, receive: Callable[[], object]) -> None:
        while True:
            await receive()  # type: ignore[misc]


@pytest.mark.parametrize("count", HOW_MANY)
@pytest.mark.parametrize("deaf", [True, False], ids=["never read", "flood"])
async def test_honest_nodes_have_their_versions(
    tmp_path: Path, autojump_clock, monkeypatch, count: int, deaf: bool
) -> None:
    monkeypatch.setattr("p2p.channel.stream.QUEUE_LIMIT", 2 * CHUNK)  # what is chosen leaves soon, as on a paced uplink
    async with open_swarm(tmp_path) as swarm, trio.open_nursery() as nursery:
        head = await swarm.start_head()
        honest = await swarm.start_nodes(HONEST)
        victim = honest[0]
        head.swarm.conduct = Known(head, honest)
        for peer in (swarm.head_identity.peer_id, *(n.peer for n in honest)):
            swarm.switch.set_node(peer, uplink=UPLINK)
        versions = Versions(swarm, honest)
        await head.until_installed(versions.honest, Version(1, 1))
        alone = await versions.arrive(4)
        there = [Flooder(swarm, FIRST + i, victim, deaf=deaf) for i in range(count)]
        for one in there:
            nursery.start_soon(one.attack, 0.002 * count)
        strange, waiting = {one.who.peer_id for one in there}, [0]

        async def look() -> None:
            while True:
                waiting.append(sum(link.queued for peer, link in victim.agent.swarm.links.items() if peer in strange))
                await trio.sleep(0.1)

        nursery.start_soon(look)
        await trio.sleep(10)
        with probing() as probe:
            under = await versions.arrive(6)
        print(f"{count} at a node, deaf {deaf}: {fmean(alone):.2f} s alone, {fmean(under):.2f} s (at most {max(under):.2f})")
        print(f"{max(waiting)} bytes waited; {sum(o.said for o in there)} messages; longest step {probe.step_s:.3f} s")
        assert set(versions.honest) <= head.links.keys()
        assert set(versions.honest) - {victim.peer} <= victim.agent.swarm.links.keys()
        nursery.cancel_scope.cancel()
    assert all(one.linked for one in there) and sum(one.said for one in there) > 100
    assert max(waiting) == 0, "who is in no roster is given nothing"
    given = sum(swarm.switch.bytes_moved.get((victim.peer, peer), 0) for peer in strange)
    print(f"{given} bytes to them over {sum(one.linked for one in there)} links")
    assert given <= 10_000 * sum(one.linked for one in there), "words, and no chunk or manifest"
    assert fmean(under) <= fmean(alone) / LEAST
