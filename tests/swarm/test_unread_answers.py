"""Who asks faster than it reads: its questions wait for what was answered before, and nobody else waits for anything. Who says
more than can be heard goes."""

from __future__ import annotations

import trio
from hypothesis import given
from hypothesis import strategies as st

from p2p.channel.port import BULK
from p2p.errors import ChannelClosed
from p2p.limits import CHANNEL_WINDOW, CREDIT_PROGRESS_S, MIB
from p2p.membership.inboxes import ALL_BYTES, EACH_BYTES, LOOK_S, overfull
from p2p.membership.links import ANSWER_BELOW, Link
from p2p.protocol.generation import Rejected
from p2p.protocol.versions import Catalog, GetCatalog, GetParts
from p2p.protocol.wire import encode, prefix_of
from p2p.version import Version
from tests.support.harness import make_state, open_swarm
from tests.support.rogue import greet, hello, membership

CATALOG = prefix_of(Catalog)
BIG = Rejected("x", Version(0, 0), "y" * 60_000, False)


async def fill(link: Link) -> None:
    """More than may be under way, so that it waits."""
    for _ in range(CHANNEL_WINDOW // 60_000 + 10):
        link.post(BIG)
    await trio.sleep(1)
    assert ANSWER_BELOW < link.queued < MIB


async def test_an_answer_comes_when_what_was_said_before_is_read(tmp_path, autojump_clock) -> None:
    async with open_swarm(tmp_path, rate=1 << 30) as swarm:
        head = await swarm.start_head()
        (node,) = await swarm.start_nodes(1)
        head.publish(0, make_state(0))
        network = await swarm.peer(60)
        proof, victim = membership(swarm, network.peer_id), head.identity.peer_id
        control, _ = await greet(network, victim, hello(proof))
        bulk, _ = await greet(network, victim, hello(proof), BULK)
        await trio.sleep(0.5)
        link = head.links[network.peer_id]
        await fill(link)
        waits = link.queued
        for _ in range(100):
            await control.send(encode(GetCatalog()))
            await control.send(encode(GetParts(b"unknown manifest")))
        await trio.sleep(2)
        assert link.queued == waits, "nothing was answered"
        catalogs = 0
        with trio.move_on_after(5):
            while True:
                catalogs += (await control.receive()).startswith(CATALOG)
        assert catalogs >= 100 and link.queued == 0
        assert network.peer_id in head.links and node.peer in head.links
        await bulk.aclose()


async def test_a_question_that_waits_ends_with_its_link(tmp_path, autojump_clock) -> None:
    async with open_swarm(tmp_path, rate=1 << 30) as swarm:
        head = await swarm.start_head()
        network = await swarm.peer(60)
        proof, victim = membership(swarm, network.peer_id), head.identity.peer_id
        control, _ = await greet(network, victim, hello(proof))
        await greet(network, victim, hello(proof), BULK)
        await trio.sleep(0.5)
        link = head.links[network.peer_id]
        await fill(link)
        await control.send(encode(GetCatalog()))
        await trio.sleep(CREDIT_PROGRESS_S + 10)
        assert network.peer_id not in head.links and link.over.is_set()
        with trio.fail_after(60):
            try:
                while True:
                    assert not (await control.receive()).startswith(CATALOG)
            except ChannelClosed:
                pass


async def test_who_says_more_than_can_be_heard_goes_and_nobody_else(tmp_path, autojump_clock) -> None:
    async with open_swarm(tmp_path, rate=1 << 30) as swarm:
        head = await swarm.start_head()
        (node,) = await swarm.start_nodes(1)
        victim, rogues = head.identity.peer_id, []
        for i in range(ALL_BYTES // CHANNEL_WINDOW + 4):
            network = await swarm.peer(60 + i)
            proof = membership(swarm, network.peer_id)
            control, _ = await greet(network, victim, hello(proof))
            await greet(network, victim, hello(proof), BULK)
            rogues.append((network.peer_id, control))
        await trio.sleep(0.5)
        links = {peer: head.links[peer] for peer, _ in rogues}
        for peer, control in rogues:
            await fill(links[peer])
            with trio.move_on_after(1):  # its question waits, and all that it says behind it
                await control.send(encode(GetCatalog()))
                while True:
                    await control.send(encode(BIG))
        await trio.sleep(2 * LOOK_S)
        gone = [peer for peer, _ in rogues if peer not in head.links]
        assert 1 <= len(gone) <= 6 and all("more than the head can hear" in links[peer].closing for peer in gone)
        assert MIB < sum(link.control.unheard() for link in head.links.values()) <= ALL_BYTES
        assert node.peer in head.links


@given(st.dictionaries(st.integers(0, 40).map(str), st.integers(0, 2 * CHANNEL_WINDOW)))
def test_those_go_who_have_most_and_no_more_than_need_be(unheard: dict[str, int]) -> None:
    gone = overfull(unheard)
    left = {peer: nbytes for peer, nbytes in unheard.items() if peer not in gone}
    assert sum(left.values()) <= ALL_BYTES or max(left.values()) <= EACH_BYTES
    assert all(unheard[peer] > EACH_BYTES and unheard[peer] >= max(left.values(), default=0) for peer in gone)
    assert not gone or sum(left.values()) + unheard[gone[-1]] > ALL_BYTES
