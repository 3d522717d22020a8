"""A stranger names addresses of others: inside the honest nodes' machines and networks, of third parties, and too many."""

from __future__ import annotations

import trio

from p2p.channel.port import BULK, CONTROL
from p2p.membership.addresses import MAX_TOLD, scope_of
from p2p.protocol.join import Roster, Welcome
from tests.support.harness import open_swarm
from tests.support.rogue import Rogue, greet, hello, membership

INSIDE = [
    "/ip4/127.0.0.1/tcp/22", "/ip6/::1/tcp/6379", "/ip4/169.254.169.254/tcp/80", "/ip4/10.0.0.1/tcp/80", "/ip6/fd00::1/tcp/80",
    "/ip4/192.168.1.1/tcp/80", "/ip6/fe80::1/tcp/80", "/ip6/::ffff:127.0.0.1/tcp/22", "/dns4/localhost/tcp/22",
    "/dns/router.lan/tcp/80",
]
THIRD = [f"/ip4/8.8.8.{i}/tcp/443" for i in range(1, 7)]
NAME = "\x1b[2J\x1b]0;root\x07" + "\u202e" + "x" * 60


async def test_a_roster_names_nothing_inside_and_no_more_than_a_handful(tmp_path, autojump_clock) -> None:
    async with open_swarm(tmp_path) as swarm, trio.open_nursery() as nursery:
        head = await swarm.start_head()
        nodes = await swarm.start_nodes(2)
        liar, witness = await swarm.peer(60), await swarm.peer(61)
        for kind in (CONTROL, BULK):
            proof = membership(swarm, liar.peer_id)
            words = hello(proof, name=NAME, addresses=[*INSIDE, *THIRD])
            _, answer = await greet(liar, head.identity.peer_id, words, kind)
            assert isinstance(answer, Welcome)
        heard = await Rogue(witness, head.identity.peer_id).connect(nursery, membership(swarm, witness.peer_id))
        await trio.sleep(5)
        rosters = [message for message in heard.heard if isinstance(message, Roster)]
        entry = next(member for member in rosters[-1].members if member.peer == liar.peer_id)
        assert len(entry.addresses) == MAX_TOLD and {scope_of(text.split("/")[2]) for text in entry.addresses} == {"public"}
        assert entry.name.isprintable() and head.links[liar.peer_id].name == entry.name
        # The honest are told of each other as before, and stay linked.
        assert all(node.peer in head.links for node in nodes)
        assert {member.peer: member.addresses for member in rosters[-1].members}[nodes[0].peer] == (f"/memory/{nodes[0].peer}",)
        nursery.cancel_scope.cancel()
