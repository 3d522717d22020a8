"""A live head with books, and nodes that come by its tickets: uses, rates, bans and revocations, on links that are up too."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from learner.admission.head_door import HeadDoor
from learner.admission.issuing import ticket_text
from learner.admission.peers_file import PeersFile
from learner.admission.records import BanRow, TicketRow
from learner.standing.standing import Standing
from p2p.errors import UsageError, first_of
from p2p.membership.admission import Ticket, read_ticket
from p2p.membership.peering import RENEW_CHECK_S
from p2p.swarm import FollowerRole, Swarm, SwarmOwner
from p2p.version import Version
from p2p.weights.store import ChunkStore
from tests.support.harness import RUN, WALL, SwarmUnderTest, hours_pass, identity, make_state, open_swarm, wall

SOON_S = 2.5
"""Seconds within which what a command did has its effect on links."""


class Follower:
    """A peer that joins with a ticket and stays, until it is refused for good."""

    def __init__(self, swarm: SwarmUnderTest, number: int) -> None:
        self.swarm, self.who = swarm, identity(number)
        self.peer, self.refused = self.who.peer_id, ""
        self.scope = trio.CancelScope()
        """of its present life"""

    async def run(self, ticket: Ticket) -> None:
        self.scope = trio.CancelScope()
        store = ChunkStore(self.swarm.directory / f"chunks-{self.peer}")
        with self.scope:
            async with self.swarm.switch.network(self.peer) as network:
                try:
                    await Swarm(network, self.who, store, FollowerRole(ticket), SwarmOwner(), name="f", wall=wall).run()
                except* UsageError as group:
                    self.refused = str(first_of(group))

    @property
    def here(self) -> bool:
        return self.peer in self.swarm.head.links


class House:
    """A swarm whose head has books; `command` is another process's hold on them."""

    def __init__(self, swarm: SwarmUnderTest, head: PeersFile, command: PeersFile, nursery: trio.Nursery) -> None:
        self.swarm, self.command, self.nursery, self.standing = swarm, command, nursery, Standing()
        swarm.head.swarm.peering.gate.doorkeeper = HeadDoor(head, self.standing)
        self._next = 100

    def ticket(self, name: str, **more) -> Ticket:
        row = TicketRow(f"id-{name}", name, WALL, **more)
        self.command.add_ticket(row)
        head = self.swarm.head_identity
        return read_ticket(ticket_text(head, RUN, (f"/memory/{head.peer_id}",), row))

    async def follow(self, ticket: Ticket) -> Follower:
        self._next += 1
        follower = Follower(self.swarm, self._next)
        self.nursery.start_soon(follower.run, ticket)
        await trio.sleep(1)
        return follower


@asynccontextmanager
async def open_house(directory: Path) -> AsyncIterator[House]:
    path = directory / "peers.sqlite"
    async with open_swarm(directory) as swarm, trio.open_nursery() as nursery:
        await swarm.start_head()
        with PeersFile.open(path) as head, PeersFile.open(path) as command:
            yield House(swarm, head, command, nursery)
            nursery.cancel_scope.cancel()


async def test_a_revoked_ticket_ends_links_and_others_stay(tmp_path, autojump_clock) -> None:
    async with open_house(tmp_path) as house:
        swarm = house.swarm
        swarm.ticket = house.ticket("lab")
        lab = await swarm.start_nodes(2)
        guests = [await house.follow(guest) for guest in [house.ticket("guests")] * 2]
        assert all(guest.here for guest in guests)
        house.command.revoke("id-guests", WALL)
        await trio.sleep(SOON_S)
        assert not any(guest.here for guest in guests)
        assert all("the ticket 'guests' was revoked" in guest.refused for guest in guests)  # it came back, and heard why
        version = swarm.head.publish(1, make_state(1))
        await swarm.head.until_installed([node.peer for node in lab], Version(1, 1))
        assert version and all(node.peer in swarm.head.links for node in lab)


async def test_a_ban_ends_a_link_and_an_unban_opens_the_door(tmp_path, autojump_clock) -> None:
    async with open_house(tmp_path) as house:
        ticket = house.ticket("any")
        bad, good = await house.follow(ticket), await house.follow(ticket)
        house.command.ban(BanRow(bad.peer, "copies answers", WALL))
        await trio.sleep(SOON_S)
        assert not bad.here and "the operator banned it: copies answers" in bad.refused
        assert good.here and not good.refused
        house.command.unban(bad.peer)
        house.nursery.start_soon(bad.run, ticket)
        await trio.sleep(1)
        assert bad.here


async def test_a_ban_for_a_while_and_an_expulsion_end_by_themselves(tmp_path, autojump_clock) -> None:
    async with open_house(tmp_path) as house:
        one = await house.follow(house.ticket("any"))
        house.standing.expel(one.peer, "caught", wall())
        await house.swarm.head.swarm.peering.close(one.peer, "expelled")
        await trio.sleep(10)
        assert not one.here and not one.refused  # it goes on asking
        await trio.sleep(40)
        assert one.here
        house.command.ban(BanRow(one.peer, "noise", wall(), until=wall() + 30))
        await trio.sleep(SOON_S)
        assert not one.here
        await trio.sleep(50)
        assert one.here and not one.refused


async def test_uses_and_rates_hold_at_a_live_head(tmp_path, autojump_clock) -> None:
    async with open_house(tmp_path) as house:
        two, slow = house.ticket("two", uses=2), house.ticket("slow", rate=1)
        pair = [await house.follow(two) for _ in range(3)]
        assert [one.here for one in pair] == [True, True, False] and "has brought 2 identities" in pair[2].refused
        pair[0].scope.cancel()
        await trio.sleep(1)
        house.nursery.start_soon(pair[0].run, two)  # it comes back: no new identity
        await trio.sleep(1)
        assert pair[0].here
        first, second = await house.follow(slow), await house.follow(slow)
        assert first.here and not second.here and not second.refused
        await hours_pass(3700, waited=120)
        assert second.here  # an hour later there is room, and it never stopped asking


async def test_a_ticket_that_expired_keeps_nobody_out_who_is_in(tmp_path, autojump_clock) -> None:
    async with open_house(tmp_path) as house:
        ticket = house.ticket("day", expires=int(wall()) + 3600)
        one = await house.follow(ticket)
        await hours_pass(7200, waited=RENEW_CHECK_S + 10)
        assert one.here
        await house.swarm.head.swarm.peering.close(one.peer, "a fault of the line")
        await trio.sleep(5)
        assert one.here  # by its membership
        late = await house.follow(ticket)
        assert not late.here and "expired" in late.refused
