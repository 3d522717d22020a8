"""Members who are handed chunks to pass on, say that they have them, and then send one every few seconds or none: how long the
honest nodes take for a version, beside how long they take alone. Real agents in memory, on a mock clock."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from pathlib import Path
from statistics import fmean

import pytest
import trio

from p2p.broadcast.exchange_core import STRANGERS_LATER_S
from p2p.membership.conduct import RefusalCounts
from p2p.protocol.versions import Parts
from p2p.version import Version
from tests.attacks.probe import probing
from tests.support.harness import CHUNK, HeadUnderTest, NodeUnderTest, SwarmUnderTest, changed_state, make_state, open_swarm
from tests.support.nightly import NIGHTLY

TRICKLE_S = 4.0
"""Between two chunks of a relay: less than what a peer must be silent for to be taken for dead."""

HONEST = 3

LEAST = 0.7
"""Versions take at most so much longer than among the honest nodes alone, as a factor, once those who came have fetched what they
lack."""

STEP_S = 5.0
"""Seconds from one version to the next."""

UPLINK = 200_000
"""Bytes a second of the head, and where said of each honest node: a version's 80 KiB take half a second if they go out once."""

SETTLE_S = 30.0
"""Seconds from when they came: each fetches an anchor, over the uplinks of the head and of three nodes."""


class Known(RefusalCounts):
    """As the head's own: strangers pass nothing on while somebody proven is there."""

    def __init__(self, head: HeadUnderTest, proven: list[NodeUnderTest]) -> None:
        super().__init__(head.swarm.peering.gate.banned)
        self._proven = {n.peer for n in proven}

    def passes_on(self, peer: str) -> bool:
        return peer in self._proven


class Versions:
    """Publishes one after the other, each as soon as all honest nodes have the one before, but no oftener than each STEP_S."""

    def __init__(self, swarm: SwarmUnderTest, honest: list[NodeUnderTest]) -> None:
        self.swarm, self.honest, self.step, self.state = swarm, [n.peer for n in honest], 1, make_state(1)
        swarm.head.publish(1, self.state)

    async def arrive(self, count: int) -> list[float]:
        """Seconds that each of so many took until the last honest node had it in place."""
        took = []
        for _ in range(count):
            old, self.state = self.state, changed_state(self.state, self.step + 1)
            began = trio.current_time()
            self.swarm.head.publish(self.step + 1, self.state, base=self.step, old=old)
            self.step += 1
            await self.swarm.head.until_installed(self.honest, Version(1, self.step), 120)
            took.append(trio.current_time() - began)
            await trio.sleep(max(0.0, STEP_S - took[-1]))
        return took


async def relay(swarm: SwarmUnderTest, number: int, honest: set[str], pause_s: float) -> None:
    """A real node, but for what it sends to the honest ones."""
    node = await swarm.start_node(number)
    pump = node.agent.swarm.exchange._pump  # what it sends is late, whatever it says
    read, at_once = pump._read_job, pump._send_at_once  # the same

    async def late(peer, job) -> list[bytes]:
        if peer.name in honest:
            await trio.sleep(pause_s)
        return await read(peer, job)

    pump._send_at_once = lambda peer: peer.name not in honest and at_once(peer)  # type: ignore[method-assign]
    pump._read_job = late  # type: ignore[method-assign]


@pytest.mark.parametrize("count", [1, 8, 60] if NIGHTLY else [8])
@pytest.mark.parametrize("pause_s", [TRICKLE_S, 1e6] if NIGHTLY else [TRICKLE_S], ids=str)
async def test_versions_come_as_they_did(tmp_path, autojump_clock, count: int, pause_s: float) -> None:
    await versions_beside(tmp_path, count, pause_s, uplink=inf)


@pytest.mark.parametrize("count", [8, 28] if NIGHTLY else [8])
async def test_who_takes_and_gives_nothing_does_not_use_up_the_uplinks_of_the_honest(
    tmp_path, autojump_clock, monkeypatch, count: int
) -> None:
    monkeypatch.setattr("p2p.channel.stream.QUEUE_LIMIT", 2 * CHUNK)  # what is chosen leaves soon, as on a paced uplink
    await versions_beside(tmp_path, count, TRICKLE_S, uplink=UPLINK)


async def versions_beside(folder: Path, count: int, pause_s: float, *, uplink: float) -> None:
    """`uplink`: bytes a second of each honest node."""
    async with open_swarm(folder) as swarm:
        head = await swarm.start_head()
        honest = await swarm.start_nodes(HONEST)
        head.swarm.conduct = Known(head, honest)
        swarm.switch.set_node(swarm.head_identity.peer_id, uplink=UPLINK)
        for node in honest:
            swarm.switch.set_node(node.peer, uplink=uplink)
        versions = Versions(swarm, honest)
        await head.until_installed(versions.honest, Version(1, 1))
        alone = await versions.arrive(4)
        for i in range(count):
            await relay(swarm, 20 + i, set(versions.honest), pause_s)
        began = trio.current_time()
        first = await versions.arrive(3)
        while trio.current_time() < began + SETTLE_S:
            first += await versions.arrive(1)
        with probing() as probe:
            under = await versions.arrive(4)
        assert all(peer in head.links for peer in versions.honest)
        print(f"{count} relays: {fmean(alone):.2f} s alone (at most {max(alone):.2f}); at first {max(first):.2f} s, "
              f"then {fmean(under):.2f} s (at most {max(under):.2f}); longest step {probe.step_s:.3f} s")  # fmt: skip
        assert fmean(under) <= fmean(alone) / LEAST
        assert probe.step_s < 0.5


async def test_strangers_are_told_of_a_version_after_the_others(tmp_path, autojump_clock) -> None:
    """To tell sixty of a version of 80 KiB takes the head's uplink a third of the time that the version does. Where nobody is
    proven all hear at once."""
    async with open_swarm(tmp_path) as swarm:
        head = await swarm.start_head()
        proven = await swarm.start_nodes(2)
        strangers = [await swarm.start_node(20 + i) for i in range(3)]
        everybody = [n.peer for n in proven + strangers]
        versions = Versions(swarm, proven + strangers)
        await head.until_installed(everybody, Version(1, 1))
        told: dict[str, list[float]] = {}

        def recorded(name: str, post: Callable[[object], None]) -> Callable[[object], None]:
            def note(message: object) -> None:
                if isinstance(message, Parts):
                    told.setdefault(name, []).append(trio.current_time() - began)
                post(message)

            return note

        for name, neighbour in head.swarm.exchange.peers.items():
            neighbour.post = recorded(name, neighbour.post)
        for known in proven, []:
            head.swarm.conduct = Known(head, known)
            await trio.sleep(2)  # the head looks twice a second
            told.clear()
            began = trio.current_time()
            await versions.arrive(1)
            assert told.keys() == set(everybody), "of its header and its end"
            for name, times in told.items():
                later = STRANGERS_LATER_S if known and name not in {n.peer for n in known} else 0.0
                assert len(times) == 2 and all(later <= at < later + 0.3 for at in times), (name, times)
