"""A stranger names addresses of others: inside the honest nodes' machines and networks, of third parties, and too many."""

from __future__ import annotations

from collections import defaultdict

import pytest
import trio

from p2p.channel.port import BULK, CONTROL
from p2p.membership.addresses import MAX_OTHER_FAMILY, MAX_TOLD, scope_of
from p2p.protocol.join import Roster, Welcome
from p2p.protocol.reach import Introduce, Whereabouts
from tests.support.harness import open_swarm
from tests.support.memory_network import MemoryNetwork
from tests.support.nightly import HOW_MANY
from tests.support.rogue import Rogue, greet, hello, membership

INSIDE = [
    "/ip4/127.0.0.1/tcp/22", "/ip6/::1/tcp/6379", "/ip4/169.254.169.254/tcp/80", "/ip4/10.0.0.1/tcp/80", "/ip6/fd00::1/tcp/80",
    "/ip4/192.168.1.1/tcp/80", "/ip6/fe80::1/tcp/80", "/ip6/::ffff:127.0.0.1/tcp/22", "/dns4/localhost/tcp/22",
    "/dns/router.lan/tcp/80",
]
THIRD = "/ip4/8.8.8.8/tcp/443"
HOME = [f"/ip4/9.9.9.9/tcp/{port}" for port in range(4001, 4006)]
NAME = "\x1b[2J\x1b]0;root\x07" + "\u202e" + "x" * 60


async def test_a_roster_names_nothing_inside_and_no_more_than_a_handful(tmp_path, autojump_clock) -> None:
    async with open_swarm(tmp_path) as swarm, trio.open_nursery() as nursery:
        head = await swarm.start_head()
        nodes = await swarm.start_nodes(2)
        liar, witness = await swarm.peer(60), await swarm.peer(61)
        swarm.switch.seen_at[liar.peer_id] = "/ip4/9.9.9.9/tcp/50000"
        for kind in (CONTROL, BULK):
            proof = membership(swarm, liar.peer_id)
            words = hello(proof, name=NAME, addresses=[*INSIDE, THIRD, *HOME])
            _, answer = await greet(liar, head.identity.peer_id, words, kind)
            assert isinstance(answer, Welcome)
        heard = await Rogue(witness, head.identity.peer_id).connect(nursery, membership(swarm, witness.peer_id))
        await trio.sleep(5)
        rosters = [message for message in heard.heard if isinstance(message, Roster)]
        entry = next(member for member in rosters[-1].members if member.peer == liar.peer_id)
        assert entry.addresses == tuple(HOME[:MAX_TOLD]) and {scope_of(text.split("/")[2]) for text in HOME} == {"public"}
        assert entry.name.isprintable() and head.links[liar.peer_id].name == entry.name
        # The honest are told of each other as before, and stay linked.
        assert all(node.peer in head.links for node in nodes)
        assert {member.peer: member.addresses for member in rosters[-1].members}[nodes[0].peer] == (f"/memory/{nodes[0].peer}",)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("attackers", HOW_MANY)
async def test_nobody_is_made_to_dial_third_parties(tmp_path, autojump_clock, monkeypatch, attackers: int) -> None:
    dialled = defaultdict[str, set[str]](set)
    """liar -> hosts that the honest tried to reach it at"""
    honest = set[str]()

    def noting(real):
        async def reach(self: MemoryNetwork, peer: str, addresses, *args, **settings):
            if self.peer_id in honest:
                dialled[peer] |= {address.split("/")[2] for address in addresses}
            return await real(self, peer, addresses, *args, **settings)

        return reach

    monkeypatch.setattr(MemoryNetwork, "open", noting(MemoryNetwork.open))
    monkeypatch.setattr(MemoryNetwork, "meet", noting(MemoryNetwork.meet))
    async with open_swarm(tmp_path) as swarm, trio.open_nursery() as nursery:
        head = await swarm.start_head()
        nodes = await swarm.start_nodes(2)
        honest |= {node.peer for node in nodes}
        liars: list[tuple[Rogue, str, str]] = []
        for i in range(1, attackers + 1):
            network = await swarm.peer(100 + i)
            # By turns: seen at a host, by IPv4 or IPv6; or, as behind a proxy, at a neighbour's address or the head's own.
            family, home = [("4", f"9.9.9.{i}"), ("6", f"2600:9::{i}"), ("4", f"192.168.1.{i}"), ("4", "127.0.0.1")][i % 4 - 1]
            swarm.switch.seen_at[network.peer_id] = f"/ip{family}/{home}/tcp/{50_000 + i}"
            third = [f"/ip4/8.8.{i}.{k}/tcp/443" for k in range(1, 7)] + [f"/ip6/2600:8:{i}::{k}/tcp/443" for k in range(1, 7)]
            said = [*third, f"/ip{family}/{home}/tcp/4001"]
            liar = await Rogue(network, head.identity.peer_id).connect(nursery, membership(swarm, network.peer_id), said)
            liars.append((liar, family, home))
        for _ in range(3):
            for liar, family, home in liars:
                theirs = [text for k in range(1, 7) for text in (f"/ip4/8.9.9.{k}/tcp/25", f"/ip6/2600:25::{k}/tcp/25")]
                said = [f"/ip{family}/{home}/tcp/4002", *theirs]
                await liar.say(Whereabouts(tuple(said), tuple(reversed(said)), "steady"))
                await liar.say(*(Introduce(node.peer, "") for node in nodes))
            await trio.sleep(10)
        for liar, family, home in liars:
            hosts = dialled[liar.peer]
            same = {host for host in hosts if (":" in host) == (family == "6")}
            assert same <= {home}, "hosts that are not its own, of the family by which it is seen: none"
            assert len(hosts - same) <= 2 * MAX_OTHER_FAMILY, "of the other family: one for each word of where it is"
        public = [liar.peer for liar, _, home in liars if scope_of(home) == "public"]
        assert any(dialled[peer] for peer in public) and (attackers > 30 or all(dialled[peer] for peer in public)), (
            "they are dialled where they are, in groups (beyond 32 nodes) a few of them"
        )
        assert honest <= head.links.keys()
        nursery.cancel_scope.cancel()
