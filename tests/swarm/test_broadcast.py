"""Versions through a swarm of real agents on a mock clock: relaying, catching up, failures, a new epoch."""

from __future__ import annotations

import trio

from p2p.limits import KIB, MIB
from p2p.version import Version
from tests.support.harness import CHUNK, changed_state, identity, make_state, open_swarm


def assert_serves(nodes, version: Version, state) -> None:
    for node in nodes:
        assert node.agent.shadow.version == version
        assert node.agent.shadow.digest == state.digest()
        assert node.agent.slot.serving == version


async def test_nodes_relay_so_that_a_scarce_uplink_of_the_source_carries_each_byte_about_once(
    tmp_path, autojump_clock, monkeypatch
) -> None:
    monkeypatch.setattr("p2p.channel.stream.QUEUE_LIMIT", 2 * CHUNK)  # what is chosen leaves soon, as with large versions
    async with open_swarm(tmp_path) as swarm:
        head = await swarm.start_head()
        swarm.switch.set_node(swarm.head_identity.peer_id, uplink=300 * KIB)
        nodes = await swarm.start_nodes(4)
        for node in nodes:
            swarm.switch.set_node(node.peer, uplink=2 * MIB)
        state = make_state(1)
        anchor = head.publish(1, state)
        names = [n.peer for n in nodes]
        start = trio.current_time()
        await head.until_installed(names, Version(1, 1))
        assert trio.current_time() - start < 1.35 * anchor.size / (300 * KIB) + 1, "one copy leaves it"
        assert_serves(nodes, Version(1, 1), state)
        assert head.sent(anchor) <= 1.6 * anchor.size
        for step in (2, 3, 4):
            old, state = state, changed_state(state, step, 0.9)
            delta = head.publish(step, state, base=step - 1, old=old)
            await head.until_installed(names, Version(1, step))
            await trio.sleep(1)
            assert_serves(nodes, Version(1, step), state)
            assert head.sent(delta) <= 1.6 * delta.size
            got = [n.traffic(delta) for n in nodes]
            assert sum(t.from_head for t in got) <= head.sent(delta)
            assert all(t.from_head + t.from_peers == delta.size for t in got)
            assert sum(t.duplicates for t in got) <= 0.1 * 4 * delta.size
        assert not head.reports and not head.refusals


async def test_a_source_with_uplink_to_spare_sends_copies_itself_and_hardly_anything_twice(tmp_path, autojump_clock) -> None:
    async with open_swarm(tmp_path) as swarm:
        head = await swarm.start_head()
        nodes = await swarm.start_nodes(4)
        state = make_state(1)
        published = [head.publish(1, state)]
        names = [n.peer for n in nodes]
        await head.until_installed(names, Version(1, 1))
        for step in (2, 3, 4):
            old, state = state, changed_state(state, step)
            published.append(head.publish(step, state, base=step - 1, old=old))
            await head.until_installed(names, Version(1, step))
            assert_serves(nodes, Version(1, step), state)
        await trio.sleep(1)
        for version in published:
            got = [n.traffic(version) for n in nodes]
            assert all(t.from_head + t.from_peers == version.size for t in got)
            assert version.size <= head.sent(version) <= 4 * version.size
            assert sum(t.duplicates for t in got) <= 0.2 * 4 * version.size
            relayed = sum(n.traffic(version).sent for n in nodes)
            assert relayed + head.sent(version) == 4 * version.size + sum(t.duplicates for t in got)
        assert not head.reports and not head.refusals


async def test_deltas_published_in_a_burst_all_arrive_in_order(tmp_path, autojump_clock) -> None:
    async with open_swarm(tmp_path) as swarm:
        head = await swarm.start_head()
        nodes = await swarm.start_nodes(3)
        state = make_state(1)
        head.publish(1, state)
        for step in range(2, 8):
            old, state = state, changed_state(state, step)
            head.publish(step, state, base=step - 1, old=old)
        await head.until_installed([n.peer for n in nodes], Version(1, 7))
        assert_serves(nodes, Version(1, 7), state)
        for node in nodes:
            assert list(head.installed[node.peer]) == sorted(head.installed[node.peer])
        assert not head.reports and not head.refusals


async def test_a_late_joiner_takes_anchor_and_deltas_mostly_from_peers(tmp_path, autojump_clock) -> None:
    async with open_swarm(tmp_path) as swarm:
        head = await swarm.start_head()
        nodes = await swarm.start_nodes(3)
        state = make_state(1)
        published = [head.publish(1, state)]
        for step in (2, 3, 4):
            old, state = state, changed_state(state, step)
            published.append(head.publish(step, state, base=step - 1, old=old))
        await head.until_installed([n.peer for n in nodes], Version(1, 4))
        before = sum(head.sent(p) for p in published)
        late = await swarm.start_node(9)
        await head.until_installed([late.peer], Version(1, 4))
        assert_serves([late], Version(1, 4), state)
        sent = sum(head.sent(p) for p in published) - before
        assert sent < 0.2 * sum(p.size for p in published)
        assert not head.reports and not head.refusals


async def test_a_joiner_with_a_slow_downlink_gets_the_anchor_about_once(tmp_path, autojump_clock) -> None:
    """A chunk takes half a second there, as 256 KiB do at 4 Mbit/s, and five neighbours could send faster."""
    async with open_swarm(tmp_path) as swarm:
        head = await swarm.start_head()
        nodes = await swarm.start_nodes(4)
        state = make_state(1)
        anchor = head.publish(1, state)
        await head.until_installed([n.peer for n in nodes], Version(1, 1))
        await trio.sleep(5)

        def sent() -> int:
            return head.sent(anchor) + sum(n.traffic(anchor).sent for n in nodes)

        before = sent()
        swarm.switch.set_node(identity(9).peer_id, downlink=2 * CHUNK)
        start = trio.current_time()
        slow = await swarm.start_node(9)
        await head.until_installed([slow.peer], Version(1, 1), 300)
        assert_serves([slow], Version(1, 1), state)
        assert sent() - before <= 1.1 * anchor.size
        assert trio.current_time() - start <= 1.25 * anchor.size / (2 * CHUNK) + 5


async def test_a_node_killed_in_mid_transfer_does_not_stop_the_others(tmp_path, autojump_clock) -> None:
    async with open_swarm(tmp_path, rate=200 * KIB) as swarm:
        head = await swarm.start_head()
        nodes = await swarm.start_nodes(4)
        victim, others = nodes[1], nodes[:1] + nodes[2:]
        state = make_state(1)
        anchor = head.publish(1, state)

        def under_way() -> bool:
            transfer = victim.agent.swarm.transfers.get(anchor.mid)
            return transfer is not None and len(transfer.session.held) >= 6

        while not under_way():
            await trio.sleep(0.02)
        assert victim.agent.shadow.version is None
        await swarm.kill(victim)
        await head.until_installed([n.peer for n in others], Version(1, 1), 120)
        assert_serves(others, Version(1, 1), state)


async def test_a_killed_node_comes_back_and_goes_on_from_its_disk(tmp_path, autojump_clock) -> None:
    async with open_swarm(tmp_path) as swarm:
        head = await swarm.start_head()
        nodes = await swarm.start_nodes(3)
        state = make_state(1)
        anchor = head.publish(1, state)
        await head.until_installed([n.peer for n in nodes], Version(1, 1))
        await swarm.kill(nodes[0])
        old, state = state, changed_state(state, 2)
        delta = head.publish(2, state, base=1, old=old)
        await head.until_installed([n.peer for n in nodes[1:]], Version(1, 2))
        sent = head.sent(anchor)
        again = await swarm.start_node(1)
        assert again.agent.shadow.version == Version(1, 1)
        await head.until_installed([again.peer], Version(1, 2))
        assert_serves([again], Version(1, 2), state)
        assert head.sent(anchor) == sent
        assert again.traffic(delta).from_peers > 0


async def test_a_partition_heals(tmp_path, autojump_clock) -> None:
    async with open_swarm(tmp_path) as swarm:
        head = await swarm.start_head()
        nodes = await swarm.start_nodes(4)
        state = make_state(1)
        head.publish(1, state)
        await head.until_installed([n.peer for n in nodes], Version(1, 1))
        near, far = nodes[:2], nodes[2:]
        swarm.switch.partition([n.peer for n in far])
        for step in (2, 3):
            old, state = state, changed_state(state, step)
            head.publish(step, state, base=step - 1, old=old)
        await head.until_installed([n.peer for n in near], Version(1, 3), 120)
        await trio.sleep(40)
        assert all(n.agent.shadow.version == Version(1, 1) for n in far)
        swarm.switch.heal()
        await head.until_installed([n.peer for n in far], Version(1, 3), 120)
        assert_serves(nodes, Version(1, 3), state)


async def test_a_stalled_peer_does_not_stop_the_others(tmp_path, autojump_clock) -> None:
    async with open_swarm(tmp_path) as swarm:
        head = await swarm.start_head()
        nodes = await swarm.start_nodes(4)
        state = make_state(1)
        head.publish(1, state)
        names = [n.peer for n in nodes]
        await head.until_installed(names, Version(1, 1))
        lame, others = nodes[2], nodes[:2] + nodes[3:]
        for other in others:  # it hears the head and is handed chunks, but what it sends reaches no node
            swarm.switch.stall(lame.peer, other.peer)
        start = trio.current_time()
        old, state = state, changed_state(state, 2)
        head.publish(2, state, base=1, old=old)
        await head.until_installed([n.peer for n in others], Version(1, 2))
        assert_serves(others, Version(1, 2), state)
        assert trio.current_time() - start < 10
        for other in others:
            swarm.switch.resume(lame.peer, other.peer)
        old, state = state, changed_state(state, 3)
        head.publish(3, state, base=2, old=old)
        await head.until_installed(names, Version(1, 3), 120)


async def test_a_new_epoch_relabels_the_same_state_without_a_download(tmp_path, autojump_clock) -> None:
    async with open_swarm(tmp_path) as swarm:
        head = await swarm.start_head(1)
        nodes = await swarm.start_nodes(3)
        names = [n.peer for n in nodes]
        state = make_state(1)
        head.publish(1, state)
        old, state = state, changed_state(state, 2)
        head.publish(2, state, base=1, old=old)
        await head.until_installed(names, Version(1, 2))
        await swarm.kill_head()
        await trio.sleep(3)
        head = await swarm.start_head(2)
        anchor = head.publish(2, state)
        await head.until_installed(names, Version(2, 2))
        assert_serves(nodes, Version(2, 2), state)
        assert head.sent(anchor) == 0
        old, state = state, changed_state(state, 3)
        head.publish(3, state, base=2, old=old)
        await head.until_installed(names, Version(2, 3))
        assert_serves(nodes, Version(2, 3), state)


async def test_a_new_epoch_that_went_back_is_downloaded(tmp_path, autojump_clock) -> None:
    async with open_swarm(tmp_path) as swarm:
        head = await swarm.start_head(1)
        nodes = await swarm.start_nodes(2)
        names = [n.peer for n in nodes]
        first = make_state(1)
        head.publish(1, first)
        lost = changed_state(first, 2)
        head.publish(2, lost, base=1, old=first)
        await head.until_installed(names, Version(1, 2))
        await swarm.kill_head()
        head = await swarm.start_head(2)
        head.publish(1, first)
        await head.until_installed(names, Version(2, 1))
        assert_serves(nodes, Version(2, 1), first)


async def test_nodes_behind_nat_take_part(tmp_path, autojump_clock, monkeypatch) -> None:
    """The two of them have no link to each other: what one distributes reaches the other by the open nodes or the head."""
    monkeypatch.setattr("p2p.channel.stream.QUEUE_LIMIT", 2 * CHUNK)  # what is chosen leaves soon, as with large versions
    async with open_swarm(tmp_path) as swarm:
        head = await swarm.start_head()
        swarm.switch.set_node(swarm.head_identity.peer_id, uplink=300 * KIB)
        open_nodes = [await swarm.start_node(i) for i in (1, 2)]
        hidden = [await swarm.start_node(i, dialable=False) for i in (3, 4)]
        nodes = open_nodes + hidden
        await swarm.meshed(open_nodes + hidden[:1])
        await swarm.meshed(open_nodes + hidden[1:])
        state = make_state(1)
        head.publish(1, state)
        await head.until_installed([n.peer for n in nodes], Version(1, 1))
        old, state = state, changed_state(state, 2, 0.9)
        delta = head.publish(2, state, base=1, old=old)
        await head.until_installed([n.peer for n in nodes], Version(1, 2))
        assert_serves(nodes, Version(1, 2), state)
        assert all(n.traffic(delta).from_peers > 0 for n in hidden)
        assert sum(n.traffic(delta).sent for n in hidden) > 0
        assert head.sent(delta) < 2 * delta.size
