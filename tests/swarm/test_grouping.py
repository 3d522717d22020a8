"""A swarm in groups, end to end in memory: the head places the nodes, they link with their neighbours, everybody installs."""

from __future__ import annotations

from collections import Counter

from p2p.broadcast.exchange import Exchange
from p2p.limits import KIB, MIB
from p2p.protocol.versions import Chunk
from p2p.version import Version
from tests.support.harness import CHUNK, SwarmUnderTest, changed_state, make_state, open_swarm


async def arranged(swarm: SwarmUnderTest) -> None:
    """Every node knows its place, and has the links that belong to it."""
    grid = swarm.head.swarm.rosters.grid

    def is_arranged() -> bool:
        for node in swarm.nodes:
            places = grid.places(node.peer) if node.peer in grid else None
            if places is None or node.agent.swarm.places != places:
                return False
            if not set(grid.links(node.peer)) <= set(node.agent.swarm.links):
                return False
        return True

    await swarm.head.until(is_arranged)


def has_its_links_alone(swarm: SwarmUnderTest) -> bool:
    """No links are left of what was before the groups."""
    head, grid = swarm.head_identity.peer_id, swarm.head.swarm.rosters.grid
    return all(set(n.agent.swarm.links) - {head} == set(grid.links(n.peer)) for n in swarm.nodes)


async def test_beyond_the_mesh_nodes_have_few_links_and_all_install(tmp_path, autojump_clock, monkeypatch) -> None:
    monkeypatch.setattr("p2p.channel.stream.QUEUE_LIMIT", 2 * CHUNK)  # what is chosen leaves soon, as with large versions
    async with open_swarm(tmp_path) as swarm:
        head = await swarm.start_head(mesh=6)
        swarm.switch.set_node(swarm.head_identity.peer_id, uplink=400 * KIB)
        for number in range(15):
            node = await swarm.start_node(number + 1)
            swarm.switch.set_node(node.peer, uplink=400 * KIB)
        await arranged(swarm)
        grid = head.swarm.rosters.grid
        assert len(grid.groups) == 2
        assert max(len(grid.links(n.peer)) for n in swarm.nodes) <= 9
        assert not has_its_links_alone(swarm), "there was a full mesh up to the mesh's size"
        await head.until(lambda: has_its_links_alone(swarm))
        names = [n.peer for n in swarm.nodes]
        state = make_state(1)
        anchor = head.publish(1, state)
        await head.until_installed(names, Version(1, 1))
        assert head.sent(anchor) < 5 * anchor.size
        old, state = state, changed_state(state, 2, 0.9)
        delta = head.publish(2, state, base=1, old=old)
        await head.until_installed(names, Version(1, 2))
        assert all(n.agent.shadow.digest == state.digest() for n in swarm.nodes)
        assert head.sent(delta) < 3 * delta.size
        traffic = [n.traffic(delta) for n in swarm.nodes]
        assert all(t.from_head + t.from_peers == delta.size for t in traffic)
        assert sum(t.duplicates for t in traffic) < 0.1 * 15 * delta.size
        # One that leaves is stood in for, and what follows reaches the others.
        await swarm.kill(swarm.nodes[3])
        gone = swarm.nodes.pop(3)
        await head.until(lambda: gone.peer not in head.links)
        await arranged(swarm)
        old, state = state, changed_state(state, 3, 0.9)
        head.publish(3, state, base=2, old=old)
        await head.until_installed([n.peer for n in swarm.nodes], Version(1, 3))
        await head.until(lambda: has_its_links_alone(swarm))
        assert not head.reports and not head.refusals


async def test_a_version_crosses_into_each_site_once(tmp_path, autojump_clock, monkeypatch) -> None:
    monkeypatch.setattr("p2p.channel.stream.QUEUE_LIMIT", 2 * CHUNK)  # what is chosen leaves soon, as with large versions
    crossed: Counter[tuple[str, int]] = Counter()
    site_of: dict[str, str] = {}
    hear = Exchange.hear  # counts the chunks that reach each peer, wanted or not

    def counted(self: Exchange, peer: str, message: object) -> bool:
        if isinstance(message, Chunk) and (site := site_of.get(self.me)) is not None and site != site_of.get(peer):
            crossed[site, self.transfers[message.mid].manifest.version.step] += len(message.data)
        return hear(self, peer, message)

    monkeypatch.setattr(Exchange, "hear", counted)
    async with open_swarm(tmp_path) as swarm:
        head = await swarm.start_head()
        swarm.switch.set_node(swarm.head_identity.peer_id, uplink=300 * KIB)
        for number in range(6):
            site = "left" if number % 2 else "right"
            node = await swarm.start_node(number + 1, site=site)
            site_of[node.peer] = site
            swarm.switch.set_node(node.peer, uplink=2 * MIB)
        await arranged(swarm)
        assert sorted(map(len, head.swarm.rosters.grid.groups)) == [3, 3]
        names = [n.peer for n in swarm.nodes]
        state = make_state(1)
        head.publish(1, state)
        await head.until_installed(names, Version(1, 1))
        sizes = {}
        for step in (2, 3):
            old, state = state, changed_state(state, step, 0.9)
            sizes[step] = head.publish(step, state, base=step - 1, old=old).size
            await head.until_installed(names, Version(1, step))
        for site in ("left", "right"):
            for step in (2, 3):
                assert sizes[step] <= crossed[site, step] <= 1.05 * sizes[step]
        assert not head.reports and not head.refusals
