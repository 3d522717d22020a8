"""`python -m tests.attacks.live_strangers KIND COUNT TICKET_FILE`: so many strangers at a real head, over sockets, until killed.

Each has an identity of its own, comes with the run's ticket, and again as soon as it is let in.

Sixty are not sixty times one for all kinds: refused runs, bad lengths, repeated chunks (what is said to be there) and links and
places have the entries of a message divided among all strangers, so that together they send about as many entries as one alone
does, in sixty times as many messages. The other kinds, and all of a mix, send as much each however many there are. What that is
in bytes: bench/attacks.md, "What one attacker sends".
"""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable
from itertools import count as numbers
from pathlib import Path
from typing import Any, TypeVar

import trio

from p2p.channel.libp2p import open_libp2p_network
from p2p.channel.port import BULK, CONTROL, Channel
from p2p.channel.visits import LINK_EACH_S
from p2p.errors import ChannelClosed, Unreachable
from p2p.identity import Identity
from p2p.limits import PROTOCOL_VERSION
from p2p.membership.admission import Ticket, read_ticket
from p2p.protocol.generation import NodeStatus, Tokens
from p2p.protocol.join import Hello, Roster, Welcome
from p2p.protocol.messages import decode
from p2p.protocol.reach import Introduce, Linked, LinkKinds, Whereabouts
from p2p.protocol.rollout import TokenEvent
from p2p.protocol.versions import Catalog, GetCatalog, GetParts, Have, Installed, Report, Subscribe, Want
from p2p.protocol.wire import MANY, MAX_LINE, encode, encode_struct
from p2p.version import Version

PAUSE_S = 0.02
"""Between two messages of a stranger, beside what the link itself makes it wait."""

AGAIN_S = 0.2
"""Until a stranger whose link ended dials again."""

T = TypeVar("T")
Say = Callable[["Link"], Awaitable[None]]


class Link:
    """Both channels of one stranger's link."""

    def __init__(self, control: Channel, bulk: Channel, share: int) -> None:
        self.control, self.bulk, self.share = control, bulk, share
        """`share`: how many strangers there are, for those who divide the entries of a message among them; 1 in a mix"""

    async def say(self, data: bytes) -> None:
        await self.control.send(data)
        await trio.sleep(PAUSE_S)

    async def catalog(self) -> Catalog:
        """Until the head says what can be fetched."""
        return await self._first(Catalog)

    async def roster(self) -> Roster:
        """Until the head says whom to link with."""
        return await self._first(Roster)

    async def _first(self, kind: type[T]) -> T:
        while True:
            message = decode(await self.control.receive())
            if isinstance(message, kind):
                return message


async def _hear(link: Link) -> None:
    """Take what comes, for ever."""
    async def one(channel: Channel) -> None:
        while True:
            await channel.receive()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(one, link.control)
        nursery.start_soon(one, link.bulk)


async def refused_runs(link: Link) -> None:
    runs = tuple(TokenEvent.of(f"9{i}.0.0", 0, (1,), [-1.0], Version(1, 0)) for i in range(MANY // link.share))
    data = encode(Tokens(runs))
    while True:
        await link.say(data)


async def bad_lengths(link: Link) -> None:
    data = encode_struct(["tokens", [["r", 0, b"1234", b"", [1, 1], "", ""]] * (8000 // link.share)])
    while True:
        await link.say(data)


async def repeats(link: Link) -> None:
    mid = (await link.catalog()).entries[-1].mid
    while True:
        await link.say(encode(Have(mid, (0,) * (MANY // link.share))))
        await link.say(encode(Want(mid, (0,) * 256)))


async def questions(link: Link) -> None:
    while True:
        await link.say(encode(GetCatalog()))
        await link.say(encode(GetParts(os.urandom(16))))


async def reports(link: Link) -> None:
    for i in numbers():
        await link.say(encode(Report(f"{i}", Version(1, 0), i, "x" * (MAX_LINE - 1))))


async def links_and_places(link: Link) -> None:
    """Says of its links, its addresses and whom it cannot reach whatever it may, something new each time."""
    members = [member.peer for member in (await link.roster()).members]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_hear, link)
        for i in numbers():
            rows = tuple(
                Linked(members[(i + j) % len(members)], "relayed" if (i + j) % 3 else "met", "\x1b[2J" * 400 if j < 200 else "")
                for j in range(max(64, MANY // link.share))
            )
            await link.say(encode(LinkKinds(rows)))
            await link.say(encode(Whereabouts((f"/ip4/127.0.0.1/tcp/{1024 + i % 60_000}",), (), "none")))
            await link.say(encode(Introduce(members[i % len(members)], "x" * MAX_LINE)))


async def slow_reader(link: Link) -> None:
    """Asks for all that there is, and never takes it."""
    entries = (await link.catalog()).entries
    while True:
        for entry in entries:
            await link.say(encode(Subscribe(entry.mid, b"")))
            await link.say(encode(Want(entry.mid, (0,))))
            await link.say(encode(GetCatalog()))


async def withholds(link: Link) -> None:
    """Looks like a node that is ready, and takes work."""
    entry = (await link.catalog()).entries[-1]
    done = Installed(entry.version, entry.state_digest, 0.0, 0.0, 0.0, 0, 0)
    await link.say(encode(done))
    while True:
        await link.say(encode(NodeStatus(True, entry.version, 0, 0, 64, 0, 0.0, 1, 1)))
        await trio.sleep(0.5)


async def comes_and_goes(link: Link) -> None:
    await trio.sleep(0.1)


async def stays_a_while(link: Link) -> None:
    """As short as a link may be that is no short visit."""
    await trio.sleep(LINK_EACH_S + 0.1)


async def silent(link: Link) -> None:
    await trio.sleep_forever()


DEAF = ("slow readers", "withholding")
"""These read only what they want to."""

KINDS: dict[str, Say] = {
    "refused runs": refused_runs, "bad lengths": bad_lengths, "repeated chunks": repeats, "questions": questions,
    "reports": reports, "slow readers": slow_reader, "withholding": withholds, "coming and going": comes_and_goes,
    "staying a while": stays_a_while, "silent": silent, "links and places": links_and_places,
}  # fmt: skip

MIXED = "mixed"
"""Stranger i is of the kind i modulo their number."""


async def stranger(kind: str, number: int, count: int, ticket: Ticket, text: str) -> None:
    """For ever."""
    who = Identity.from_seed(b"stranger" + number.to_bytes(24, "big"))
    share = count if kind != MIXED else 1
    if kind == MIXED:
        kind = list(KINDS)[number % len(KINDS)]
    async with open_libp2p_network(who, []) as network:
        while True:
            try:
                await _one_link(network, kind, ticket, text, share)
            except* (ChannelClosed, Unreachable):
                pass
            await trio.sleep(AGAIN_S)


async def _one_link(network: Any, kind: str, ticket: Ticket, text: str, share: int) -> None:
    channels: list[Channel] = []
    words = Hello(PROTOCOL_VERSION, ticket.run, text, b"", (), "stranger", "test", "")
    try:
        for of in (CONTROL, BULK):
            channel = await network.open(ticket.head, list(ticket.addresses), of)
            channels.append(channel)
            await channel.send(encode(words))
            if not isinstance(decode(await channel.receive()), Welcome):
                return
        link = Link(*channels, share)
        async with trio.open_nursery() as nursery:
            if kind not in (*DEAF, "repeated chunks", "links and places"):
                nursery.start_soon(_hear, link)
            await KINDS[kind](link)
            nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True), trio.move_on_after(1):
            for channel in channels:
                await channel.aclose("bye")


async def main(kind: str, count: int, text: str) -> None:
    ticket = read_ticket(text)
    async with trio.open_nursery() as nursery:
        for number in range(count):
            nursery.start_soon(stranger, kind, number, count, ticket, text)


if __name__ == "__main__":
    trio.run(main, sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]).read_text().strip())
