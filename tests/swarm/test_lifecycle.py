"""Corners of links, installs and stores that a long run meets: replaced links, pruned manifests, full disks, epochs."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest
import trio

from p2p.channel.port import BULK
from p2p.errors import ShoalError
from p2p.limits import CREDIT_PROGRESS_S, HANDSHAKE_S, KIB, MAX_FRAME, MIB
from p2p.membership.links import LOOK_S, Link, Unread
from p2p.membership.peering import RENEW_CHECK_S
from p2p.protocol.generation import Rejected
from p2p.protocol.join import Roster, RosterEntry
from p2p.protocol.versions import Have
from p2p.version import Version
from p2p.weights import store as chunk_store
from tests.support.harness import CHUNK, changed_state, identity, make_state, open_swarm, wall
from tests.support.rogue import Rogue, greet, hello, membership


@pytest.fixture(autouse=True)
def _log(caplog):
    caplog.set_level(logging.INFO, logger="shoal")


async def test_a_second_link_replaces_the_first_and_survives_its_end(tmp_path, autojump_clock) -> None:
    async with open_swarm(tmp_path) as swarm, trio.open_nursery() as nursery:
        await swarm.start_head()
        (node,) = await swarm.start_nodes(1)
        network = await swarm.peer(60)
        proof = membership(swarm, network.peer_id)
        first = await Rogue(network, node.peer).connect(nursery, proof)
        second = await Rogue(network, node.peer).connect(nursery, proof)
        assert "replaced by a newer link" in await first.until_closed()
        await trio.sleep(5)
        assert not second.closed and network.peer_id in node.agent.swarm.links
        assert network.peer_id in node.agent.swarm.exchange.peers
        async with trio.open_nursery() as burst:  # several at once: one stays, the others are closed
            rogues = [Rogue(network, node.peer) for _ in range(3)]
            for rogue in rogues:
                burst.start_soon(_connect_or_not, rogue, nursery, proof)
        await trio.sleep(HANDSHAKE_S + 5)
        link = node.agent.swarm.links[network.peer_id]
        assert node.agent.swarm.exchange.peers[network.peer_id].bulk is link.bulk
        assert len([c for c in swarm.switch.host(node.peer).table.of(network.peer_id)]) == 2
        nursery.cancel_scope.cancel()


async def _connect_or_not(rogue: Rogue, nursery: trio.Nursery, proof: bytes) -> None:
    from p2p.errors import ChannelClosed

    try:
        await rogue.connect(nursery, proof)
    except ChannelClosed:
        pass  # another of the three was faster


async def test_a_control_channel_without_a_bulk_channel_is_closed(tmp_path, autojump_clock) -> None:
    async with open_swarm(tmp_path) as swarm:
        await swarm.start_head()
        (node,) = await swarm.start_nodes(1)
        network = await swarm.peer(60)
        await greet(network, node.peer, hello(membership(swarm, network.peer_id)))
        await trio.sleep(HANDSHAKE_S + 5)
        assert network.peer_id not in node.agent.swarm.links
        assert swarm.switch.host(node.peer).table.of(network.peer_id) == []


async def test_a_peer_that_came_back_elsewhere_is_dialled_there(tmp_path, autojump_clock) -> None:
    async with open_swarm(tmp_path) as swarm:
        head = await swarm.start_head()
        (node,) = await swarm.start_nodes(1)
        other = identity(61).peer_id
        node.agent.swarm.peering.me = "0"  # the smaller id dials
        link = head.links[node.peer]
        link.post(Roster(1, (RosterEntry(other, ("/memory/nowhere",), "moved"),)))
        await trio.sleep(5)
        assert other not in node.agent.swarm.links
        dialled = await swarm.peer(61)
        link.post(Roster(1, (RosterEntry(other, (f"/memory/{other}",), "moved"),)))
        with trio.fail_after(20):
            channel = await dialled.incoming.receive()
        assert channel.peer == node.peer


async def test_a_manifest_that_the_head_pruned_meanwhile(tmp_path, autojump_clock, caplog) -> None:
    """The catalog that a joiner was given is stale before it asks: it takes the way that there is."""
    async with open_swarm(tmp_path) as swarm:
        head = await swarm.start_head()
        state = make_state(1)
        old = head.publish(1, state)
        original = head.publisher.catalog
        stale = original()
        head.publisher.catalog = lambda: stale  # type: ignore[method-assign]
        late = await swarm.start_node(1)
        await head.until(lambda: late.peer in head.links)
        new = head.publish(2, make_state(2))
        head.publisher.catalog = original  # type: ignore[method-assign]
        head.store.drop(head.swarm.exchange.forget(old.mid))
        del head.publisher._kept[old.mid]  # it is pruned while a node still asks for it
        await head.until_installed([late.peer], Version(1, 2))
        assert new.mid in late.agent.swarm.transfers and old.mid not in late.agent.swarm.transfers


async def test_a_store_too_small_lets_go_of_what_it_keeps_for_others(tmp_path, autojump_clock) -> None:
    async with open_swarm(tmp_path) as swarm:
        head = await swarm.start_head()
        nodes = await swarm.start_nodes(2, store_limit=420 * KIB)
        state = make_state(1)
        anchor = head.publish(1, state)
        assert anchor.size < 400 * KIB
        for step in range(2, 8):
            old, state = state, changed_state(state, step)
            head.publish(step, state, base=step - 1, old=old)
            await head.until_installed([n.peer for n in nodes], Version(1, step))
        for node in nodes:
            assert node.agent.shadow.digest == state.digest()
            assert node.agent.store.total <= 420 * KIB


async def test_a_store_that_cannot_hold_one_version_does_not_end_the_node(tmp_path, autojump_clock, caplog) -> None:
    async with open_swarm(tmp_path) as swarm:
        head = await swarm.start_head()
        small = await swarm.start_node(1, store_limit=64 * KIB)
        large = await swarm.start_node(2)
        head.publish(1, make_state(1))
        await head.until_installed([large.peer], Version(1, 1))
        await trio.sleep(60)
        assert small.agent.shadow.version is None and small.peer in head.links
        line = next(r.getMessage() for r in caplog.records if "cannot keep it" in r.getMessage())
        assert line.startswith("refused: peer=") and "version=1.1 chunk=" in line and "is full" in line


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE])
async def test_a_chunk_that_a_relay_cannot_read_just_then(tmp_path, autojump_clock, monkeypatch, code) -> None:
    monkeypatch.setattr("p2p.broadcast.pump.RECENT_BYTES", 0)  # every chunk is read from the disk
    async with open_swarm(tmp_path) as swarm:
        head = await swarm.start_head()
        nodes = await swarm.start_nodes(2)
        anchor = head.publish(1, make_state(1))
        await head.until_installed([n.peer for n in nodes], Version(1, 1))
        real, failures = chunk_store._read_file, []  # the disk fails at this very read

        def flaky(path: str | Path) -> bytes:
            if nodes[0].agent.store.root in Path(path).parents and not failures:
                failures.append(Path(path).name)
                raise OSError(code, os.strerror(code))
            return real(path)

        monkeypatch.setattr("p2p.weights.store._read_file", flaky)
        late = await swarm.start_node(3)
        await head.until_installed([late.peer], Version(1, 1))
        assert failures and late.agent.shadow.digest == make_state(1).digest()
        assert set(head.links) == {n.peer for n in swarm.nodes}  # it lives
        store = nodes[0].agent.store
        held = anchor.mid in nodes[0].agent.swarm.transfers and store.has(bytes.fromhex(failures[0]))
        assert held or code == errno.EIO  # short of handles, it did not throw the chunk away
        await trio.sleep(10)
        assert nodes[0].agent.swarm.transfers[anchor.mid].session.missing == 0  # what was lost came again


async def test_memberships_are_renewed_while_the_link_lives(tmp_path, autojump_clock, monkeypatch) -> None:
    monkeypatch.setattr("p2p.membership.gate.MEMBERSHIP_S", 100)  # seconds instead of a week
    monkeypatch.setattr("p2p.membership.peering.RENEW_CHECK_S", 12)  # seconds, in that proportion
    async with open_swarm(tmp_path) as swarm:
        await swarm.start_head()
        nodes = await swarm.start_nodes(2)
        first = [n.agent.swarm.peering.gate.membership for n in nodes]
        links = [n.agent.swarm.links[swarm.head_identity.peer_id] for n in nodes]
        await trio.sleep(1000)
        assert [n.agent.swarm.links[swarm.head_identity.peer_id] for n in nodes] == links
        assert all(n.agent.swarm.peering.gate.membership not in first for n in nodes)
        await nodes[0].agent.swarm.peering.close(nodes[1].peer, "a short fault")
        await trio.sleep(10)
        await swarm.meshed(nodes)
        late = await swarm.start_node(3)
        await swarm.meshed([*nodes, late])


async def test_a_membership_is_renewed_after_the_clock_was_set_back(tmp_path, autojump_clock) -> None:
    async with open_swarm(tmp_path) as swarm:
        head = await swarm.start_head()
        (node,) = await swarm.start_nodes(1)
        before = node.agent.swarm.peering.gate.membership
        head.swarm.peering.gate._wall = lambda: wall() - 3600  # the wall clock of the head alone goes back
        await trio.sleep(RENEW_CHECK_S + 5)
        assert node.agent.swarm.peering.gate.membership != before


async def unread_links(swarm, head, *numbers: int) -> list[Link]:
    """The head's links with peers of these numbers, who greet it and read nothing after that."""
    links = []
    for number in numbers:
        network = await swarm.peer(number)
        proof = membership(swarm, network.peer_id)
        await greet(network, head.identity.peer_id, hello(proof))
        await greet(network, head.identity.peer_id, hello(proof), BULK)
        await trio.sleep(0.5)
        links.append(head.links[network.peer_id])
    return links


async def test_a_peer_that_stopped_reading_is_dropped(tmp_path, autojump_clock) -> None:
    async with open_swarm(tmp_path, rate=1 << 30) as swarm:
        head = await swarm.start_head()
        victim = head.identity.peer_id
        many, few = await unread_links(swarm, head, 60, 61)
        big = Rejected("x", Version(0, 0), "y" * 60_000, False)
        for _ in range(1200):  # more than may pile up for it: closed at once
            many.post(big)
        for _ in range(100):  # more than it may have outstanding: closed when it takes nothing for a while
            few.post(big)
        await trio.sleep(5)
        assert "pile up unread" in many.closing
        assert many.peer not in head.links and many.peer not in head.swarm.links
        assert swarm.switch.host(victim).table.of(many.peer) == []
        many.post(big)  # into nothing
        assert few.peer in head.links
        await trio.sleep(CREDIT_PROGRESS_S + 5)
        assert few.peer not in head.links and swarm.switch.host(victim).table.of(few.peer) == []


async def test_a_message_too_long_for_a_frame_does_not_end_who_posts_it(tmp_path, autojump_clock, caplog) -> None:
    async with open_swarm(tmp_path) as swarm:
        head = await swarm.start_head()
        (node,) = await swarm.start_nodes(1)
        head.links[node.peer].post(Rejected("x", Version(0, 0), "y" * MAX_FRAME, False))
        assert f"cannot send to {node.peer}: Rejected of" in caplog.text
        head.publish(1, make_state(1))
        await head.until_installed([node.peer], Version(1, 1))


async def test_a_chunk_that_rots_on_a_relay_comes_from_elsewhere(tmp_path, autojump_clock, monkeypatch, caplog) -> None:
    monkeypatch.setattr("p2p.broadcast.pump.RECENT_BYTES", 0)  # every chunk is read from the disk
    async with open_swarm(tmp_path) as swarm:
        head = await swarm.start_head()
        nodes = await swarm.start_nodes(2)
        state = make_state(1)
        anchor = head.publish(1, state)
        await head.until_installed([n.peer for n in nodes], Version(1, 1))
        for path in [p for p in nodes[0].agent.store.root.rglob("*") if p.is_file()][::3]:
            path.write_bytes(b"rot")
        late = await swarm.start_node(3)
        await head.until_installed([late.peer], Version(1, 1))
        assert late.agent.shadow.digest == state.digest()
        assert not head.reports  # a rotten chunk is never sent
        assert "is gone from the store" in caplog.text
        assert late.traffic(anchor).from_peers > 0


async def test_a_new_epoch_in_the_middle_of_a_transfer(tmp_path, autojump_clock) -> None:
    async with open_swarm(tmp_path, rate=100 * KIB) as swarm:
        head = await swarm.start_head(1)
        nodes = await swarm.start_nodes(2)
        names = [n.peer for n in nodes]
        first = make_state(1)
        head.publish(1, first)
        await head.until_installed(names, Version(1, 1))
        second = changed_state(first, 2)
        delta = head.publish(2, second, base=1, old=first)
        while not any(delta.mid in n.agent.swarm.transfers and n.agent.swarm.exchange.progress(delta.mid) > 3 for n in nodes):
            await trio.sleep(0.05)
        await swarm.kill_head()
        head = await swarm.start_head(2)
        head.publish(1, first)
        await head.until_installed(names, Version(2, 1), 120)
        await trio.sleep(10)
        assert all(n.agent.shadow.version == Version(2, 1) for n in nodes)
        assert all(delta.mid not in n.agent.swarm.transfers for n in nodes)


async def test_waiting_for_a_segment_ends_when_its_manifest_is_forgotten(tmp_path, autojump_clock) -> None:
    async with open_swarm(tmp_path) as swarm:
        head = await swarm.start_head()
        nodes = await swarm.start_nodes(1)
        anchor = head.publish(1, make_state(1))
        await head.until_installed([nodes[0].peer], Version(1, 1))
        exchange = nodes[0].agent.swarm.exchange
        exchange.transfers[anchor.mid].session.held.clear()
        failed: list[str] = []

        async def wait(call) -> None:
            with pytest.raises(ShoalError, match="is not held any more") as error:
                await call()
            failed.append(str(error.value))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait, lambda: exchange.segment(anchor.mid, 0))
            await trio.sleep(0.2)
            exchange.forget(anchor.mid)
        assert len(failed) == 1
        await wait(lambda: exchange.sealed(anchor.mid))


async def test_what_an_anchor_overtook_does_not_pile_up(tmp_path, autojump_clock) -> None:
    """A node that cannot follow the chain keeps none of its deltas once an anchor has led past them."""
    async with open_swarm(tmp_path) as swarm:
        head = await swarm.start_head()
        nodes = await swarm.start_nodes(1)
        names = [n.peer for n in nodes]
        first = make_state(1)
        head.publish(1, first)
        await head.until_installed(names, Version(1, 1))
        state = make_state(50)
        head.publisher._digests[Version(1, 1)] = state.digest()  # a published version that was other weights
        for step in range(2, 12):
            old, state = state, changed_state(state, step)
            head.publish(step, state, base=step - 1, old=old)
            await trio.sleep(1)
        exchange = nodes[0].agent.swarm.exchange
        assert len(exchange.transfers) > 10
        state = make_state(12)
        head.publish(12, state)
        await head.until_installed(names, Version(1, 12))
        assert len(exchange.transfers) <= 3  # the descriptor and two anchors
        assert nodes[0].agent.store.total < 2 * MIB
        # Pins of chunks that are gone: they would never be dropped.
        assert not [d for d, n in exchange.store._pins.items() if n and not exchange.store.has(d)]


async def test_an_anchor_of_many_chunks_is_announced_in_pieces(tmp_path, autojump_clock, monkeypatch) -> None:
    monkeypatch.setattr("p2p.broadcast.transfer.HAVE_BATCH", 10)  # as with an anchor of more than 32,768 chunks
    async with open_swarm(tmp_path) as swarm:
        head = await swarm.start_head()
        nodes = await swarm.start_nodes(2)
        anchor = head.publish(1, make_state(1))
        assert anchor.size > 25 * CHUNK
        await head.until_installed([n.peer for n in nodes], Version(1, 1))
        before = head.sent(anchor)
        late = await swarm.start_node(3)
        await head.until_installed([late.peer], Version(1, 1))
        assert head.sent(anchor) == before
        async with trio.open_nursery() as nursery:
            network = await swarm.peer(60)
            rogue = await Rogue(network, late.peer).connect(nursery, membership(swarm, network.peer_id))
            from p2p.protocol.versions import Subscribe

            await rogue.say(Subscribe(anchor.mid, b""))
            await trio.sleep(1)
            haves = [m for m in rogue.heard if isinstance(m, Have)]
            chunks = head.swarm.transfers[anchor.mid].manifest.seal.chunks
            assert len(haves) > 2 and sorted(c for m in haves for c in m.chunks) == list(range(chunks))
            nursery.cancel_scope.cancel()


async def test_when_much_waits_for_all_it_is_who_does_not_read_that_goes(tmp_path, autojump_clock, monkeypatch) -> None:
    """Not who asks next: a node that joins has much waiting for it, and takes it."""
    monkeypatch.setattr("p2p.membership.links.ALL_BYTES", 8 << 20)
    async with open_swarm(tmp_path, rate=1 << 30) as swarm:
        head = await swarm.start_head()
        (node,) = await swarm.start_nodes(1)
        hoarder, small = await unread_links(swarm, head, 60, 61)
        big = Rejected("x", Version(0, 0), "y" * 60_000, False)
        for _ in range(180):  # 10.8 MB, of which 4 MiB may be under way
            hoarder.post(big)
        small.post(big)
        await trio.sleep(6)
        assert not hoarder.doomed.is_set(), "less than all may have"
        reader = head.links[node.peer]
        for _ in range(100):
            reader.post(big)
        assert hoarder.doomed.is_set() and "pile up unread" in hoarder.closing
        assert not reader.doomed.is_set() and not small.doomed.is_set()
        hoarder.post(big)
        await trio.sleep(1)
        assert hoarder.peer not in head.links and node.peer in head.links and small.peer in head.links
        assert reader.unread.nbytes < 1 << 20 and hoarder not in reader.unread.links


def test_who_lets_most_wait_is_looked_for_now_and_then() -> None:
    """Not with each of ten thousand rosters that leave at once."""
    looks = []

    class Links(set):
        def __iter__(self):
            looks.append(1)
            return super().__iter__()

    unread = Unread(1 << 40, Links())
    for i in range(1000):
        unread.relieve(i / 1000)
    assert len(looks) == 1 / LOOK_S
