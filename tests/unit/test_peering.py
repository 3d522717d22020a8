"""A dial that comes through just when its peer has left the roster: it ends, and the node goes on."""

from __future__ import annotations

import trio
import trio.testing

from p2p.identity import Identity
from p2p.membership.links import LinkOwner
from p2p.membership.peering import Peering, PeerSettings
from p2p.protocol.join import RosterEntry
from tests.support.memory_network import MemorySwitch


async def test_a_dial_that_outlives_its_roster_just_ends(monkeypatch) -> None:
    me, other, head = sorted((Identity.generate() for _ in range(3)), key=lambda identity: identity.peer_id)
    async with MemorySwitch().network(me.peer_id) as network, trio.open_nursery() as nursery:
        settings = PeerSettings(run="r", head=head.peer_id, name="n")
        peering = Peering(network, me, settings, LinkOwner(), wall=lambda: 0.0)
        dials = 0

        async def connect(*_: object) -> None:
            nonlocal dials
            dials += 1
            peering.keep_connected([])  # a roster without it; no wait follows in which the dial could be cancelled

        monkeypatch.setattr(peering, "connect", connect)
        await nursery.start(peering.run)
        peering.keep_connected([RosterEntry(other.peer_id, ("/memory/x",), "other")])
        await trio.testing.wait_all_tasks_blocked()
        assert dials == 1 and peering.dialler.at_work == {}  # memory of attempts that ended
        nursery.cancel_scope.cancel()
