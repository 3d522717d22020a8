"""Identities are free: an attacker who comes back with new ones brings no more of them than its ticket says, and nobody else
notices."""

from __future__ import annotations

import time

import trio

from learner.admission.head_door import HeadDoor
from learner.admission.issuing import ticket_text
from learner.admission.peers_file import PeersFile
from learner.admission.records import BanRow, TicketRow
from p2p.channel.port import BULK
from p2p.errors import ChannelClosed
from p2p.identity import Identity
from p2p.limits import PROTOCOL_VERSION
from p2p.membership.admission import read_ticket
from p2p.protocol.join import Hello, Rejection, Welcome
from p2p.version import Version
from tests.support.harness import RUN, WALL, SwarmUnderTest, hours_pass, make_state, open_swarm
from tests.support.nightly import NIGHTLY
from tests.support.rogue import greet

ATTEMPTS = 300 if NIGHTLY else 60
RATE, USES = 4, 10


def issue(swarm: SwarmUnderTest, books: PeersFile, name: str, **more) -> str:
    row = TicketRow(f"id-{name}", name, WALL, **more)
    books.add_ticket(row)
    return ticket_text(swarm.head_identity, RUN, (f"/memory/{swarm.head_identity.peer_id}",), row)


async def come(swarm: SwarmUnderTest, who: Identity, ticket: str, proof: bytes = b"", *, bulk: bool = True) -> tuple[bool, bytes]:
    """Whether `who` got a link (or with `bulk` off a membership), and what it was given."""
    async with swarm.switch.network(who.peer_id) as network:
        words = Hello(PROTOCOL_VERSION, RUN, ticket, proof, (), "sybil", "test", "")
        try:
            _, answer = await greet(network, swarm.head_identity.peer_id, words)
            if isinstance(answer, Welcome) and bulk:
                _, answer = await greet(network, swarm.head_identity.peer_id, words, BULK)
                await trio.sleep(0.2)
        except ChannelClosed:
            return False, b""
        assert isinstance(answer, (Welcome, Rejection))
        return isinstance(answer, Welcome), answer.membership if isinstance(answer, Welcome) else b""


async def test_new_identities_beyond_the_rate_of_a_ticket(tmp_path, autojump_clock) -> None:
    path = tmp_path / "peers.sqlite"
    async with open_swarm(tmp_path) as swarm:
        head = await swarm.start_head()
        with PeersFile.open(path) as books, PeersFile.open(path) as command:
            head.swarm.peering.gate.doorkeeper = HeadDoor(books)
            swarm.ticket = read_ticket(issue(swarm, command, "lab"))
            honest = await swarm.start_nodes(2)
            leaked = issue(swarm, command, "leaked", rate=RATE, uses=USES)
            links = [head.links[node.peer] for node in honest]
            began, cpu = trio.current_time(), time.process_time()
            got = [await come(swarm, Identity.generate(), leaked) for _ in range(ATTEMPTS)]
            cpu = time.process_time() - cpu
            assert trio.current_time() - began < 3600
            assert sum(in_ for in_, _ in got) == RATE == command.brought("id-leaked")
            assert cpu < 0.05 * ATTEMPTS, f"{cpu / ATTEMPTS:.3f} s of the processor an attempt"
            # Hours later: never more than the ticket may bring in all.
            for _ in range(4):
                await hours_pass(3700, waited=10)
                for _ in range(20):
                    await come(swarm, Identity.generate(), leaked, bulk=False)
            assert command.brought("id-leaked") == USES
            # The honest kept their links, a new one comes in, and versions travel.
            assert [head.links[node.peer] for node in honest] == links
            honest.append(await swarm.start_node(7))
            await swarm.meshed(honest)
            head.publish(1, make_state(1))
            await head.until_installed([node.peer for node in honest], Version(1, 1))


async def test_a_membership_without_a_link_costs_a_use_as_well(tmp_path, autojump_clock) -> None:
    """Else one ticket for one node would make any number of members in the eyes of the other nodes."""
    path = tmp_path / "peers.sqlite"
    async with open_swarm(tmp_path) as swarm:
        head = await swarm.start_head()
        with PeersFile.open(path) as books:
            head.swarm.peering.gate.doorkeeper = HeadDoor(books)
            ticket = issue(swarm, books, "one", uses=1)
            got = [await come(swarm, Identity.generate(), ticket, bulk=False) for _ in range(30)]
            assert [in_ for in_, _ in got] == [True] + [False] * 29


async def test_who_is_banned_comes_back_neither_by_a_proof_nor_by_a_ticket(tmp_path, autojump_clock) -> None:
    path = tmp_path / "peers.sqlite"
    async with open_swarm(tmp_path) as swarm:
        head = await swarm.start_head()
        with PeersFile.open(path) as books, PeersFile.open(path) as command:
            head.swarm.peering.gate.doorkeeper = HeadDoor(books)
            first, second = (issue(swarm, command, name) for name in ("first", "second"))
            who = Identity.generate()
            in_, proof = await come(swarm, who, first)
            assert in_
            command.ban(BanRow(who.peer_id, "", WALL))
            for ticket in (first, second, ""):
                for shown in (proof, b""):
                    assert await come(swarm, who, ticket, shown) == (False, b"")
