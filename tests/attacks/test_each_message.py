"""The largest legal message of each kind, at a live head and at a live node: from its bytes on it holds the loop for less than
50 ms of a core. The least of a few tries counts, each of another message. `test_worst_messages.py` has those that need a large
version or many requests."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import thread_time

import blake3
import pytest
import trio

from p2p.broadcast.session import Session
from p2p.identity import Identity
from p2p.limits import MAX_FRAME, MIB
from p2p.membership.dialling import STARTS
from p2p.membership.links import Link
from p2p.membership.texts import clean_message
from p2p.protocol.generation import (
    Abort,
    Assign,
    ComputesWith,
    GenerateRequest,
    Interrupt,
    NodeStatus,
    OwnerWord,
    Rejected,
    Tokens,
)
from p2p.protocol.join import Bye, Grouping, Placed, Roster, RosterEntry
from p2p.protocol.messages import decode
from p2p.protocol.prices import Activate, Terms
from p2p.protocol.reach import Introduce, Linked, LinkKinds, Meeting, NoMeeting, PassingOn, PassOn, Whereabouts
from p2p.protocol.rollout import Generate, TokenEvent
from p2p.protocol.versions import (
    Allowance,
    Catalog,
    CatalogEntry,
    Chunk,
    Follow,
    GetCatalog,
    GetParts,
    Have,
    Installed,
    Parts,
    Relieve,
    Report,
    Subscribe,
    Want,
)
from p2p.protocol.wire import FEW, MANY, MAX_LINE, MAX_NAME, MAX_TEXT, encode, unpack
from p2p.swarm import Swarm
from p2p.version import Version
from p2p.weights.manifest import SignedPart
from p2p.weights.store import ChunkStore
from tests.attacks.test_worst_messages import BOUND_S, SLOW, cost
from tests.support.harness import make_state, open_swarm
from tests.swarm.test_head import open_head, silent

TRIES = 4
"""Messages of one kind."""

MOST = (1 << 64) - 1
"""The largest number."""

LINE, NAME, TEXT = ("\x1b[2J\u202e" * MAX_LINE)[:MAX_LINE], "\x07" * MAX_NAME, "\u202e" * (MAX_TEXT - 1)
"""Texts that are to be cleaned, as long as they may be."""

IN_THE_HANDSHAKE = {"Hello", "Welcome", "Rejection", "Renewal"}
"""Kinds of which a link has one at the beginning, or that come with one signature and no list."""

HALF = {"Parts"}
"""Kinds that take more than half of the bound on a machine of today (256 signatures: 33 ms), and may take twice the bound on a
slow one."""

Make = Callable[[int], object]
"""The message of try i."""


async def taken(swarm: Swarm, link: Link, make: Make) -> float:
    """Seconds of a core for which one message is read and handled."""
    took = []
    for i in range(TRIES):
        data = encode(make(i))
        began = thread_time()
        await swarm.on_message(link, clean_message(decode(data)))
        took.append(thread_time() - began)
        assert swarm.links.get(link.peer) is link, f"{type(make(i)).__name__} is no legal message"
    return min(took)


async def check(swarm: Swarm, link: Link, makes: list[Make]) -> set[str]:
    """That each takes less than the bound; the kinds."""
    slow = {}
    for make in makes:
        took = await taken(swarm, link, make)
        print(f"{type(make(0)).__name__}: {1000 * took:.1f} ms")
        kind = type(make(0)).__name__
        if took >= BOUND_S * (SLOW if kind in HALF else 1.0):
            slow[kind] = took
    assert not slow
    return {type(make(0)).__name__ for make in makes}


def addresses(i: int, peer: str) -> tuple[str, ...]:
    """As long, and as costly to read, as any that is taken."""
    return tuple(f"/ip6/2001:db8:1234:5678:9abc:def0:{i:x}:{j:x}/tcp/{1 + j}/p2p/{peer}" for j in range(FEW))


def written_anew(part: bytes) -> bytes:
    """The same signed part in other bytes: it was not seen, so that its signature is checked once more."""
    signed = unpack(part, SignedPart)
    kind = signed.kind.encode()
    body = b"\xc6" + len(signed.body).to_bytes(4, "big") + signed.body
    return b"\xdc\x00\x03" + bytes([0xA0 + len(kind)]) + kind + body + b"\xc4\x40" + signed.signature


def links_message(i: int, peers: list[str]) -> LinkKinds:
    """All the rows that there may be, and texts up to a frame's end."""
    def row(j: int) -> Linked:
        return Linked(peers[(i + j) % len(peers)], "relayed" if (i + j) % 3 else "met", LINE if j < 75 else "")

    return LinkKinds(tuple(row(j) for j in range(MANY)))


def messages_to_the_head(peers: list[str], mid: bytes, parts: tuple[bytes, ...], chunks: int, version: Version) -> list[Make]:
    """What a stranger may send; `peers[0]` is the sender, the others are members."""
    every, long = tuple(range(chunks)), tuple("/ip4/1.2.3.4/tcp/1/" + "x" * 1900 for _ in range(FEW))
    again = written_anew(parts[1])
    runs = tuple(TokenEvent.of("no such request", j, (1,), [-1.0], version) for j in range(200))
    return [
        lambda i: Have(mid, every), lambda i: Want(mid, every[:FEW]), lambda i: Subscribe(mid, b"\xff" * (chunks // 8)),
        lambda i: links_message(i, peers),
        lambda i: LinkKinds(tuple(Linked(f"{i}-{j}".ljust(100, "x"), "relayed", "") for j in range(MANY))),
        lambda i: Introduce(peers[1], LINE), lambda i: Introduce(TEXT[:MAX_TEXT], LINE),
        lambda i: Whereabouts(addresses(i, peers[0]), addresses(i, peers[0]), NAME), lambda i: Whereabouts(long, long, NAME),
        lambda i: Chunk(mid, 0, MOST, bytes([i]) * (MAX_FRAME - 60)),
        lambda i: Parts(mid, (again,) * FEW),
        lambda i: Rejected(NAME, version, LINE, True, NAME), lambda i: Report(NAME, version, MOST, LINE),
        lambda i: Installed(version, bytes(64), 1e308, 1e308, 1e308, MOST, MOST), lambda i: Terms(1.0, 0.5, 0.1),
        lambda i: NodeStatus(True, version, MOST, MOST, MOST, MOST, 1e308, MOST, MOST, False, MOST, MOST,
                             ComputesWith(NAME, True), OwnerWord(LINE, LINE)),
        lambda i: Tokens(runs), lambda i: GetCatalog(), lambda i: GetParts(mid), lambda i: Follow(True),
        lambda i: Allowance(1e300, 0.0), lambda i: Bye(TEXT, False, True),
    ]  # fmt: skip


async def test_what_a_stranger_may_send_to_the_head(tmp_path: Path, autojump_clock) -> None:
    async with open_head(tmp_path / "run") as bench:
        nodes = [await bench.join(silent) for _ in range(8)]
        await trio.sleep(5)
        swarm = bench.head.swarm
        manifest = next(iter(swarm.transfers.values())).manifest
        makes = messages_to_the_head(
            [node.peer for node in nodes], manifest.mid, tuple(manifest.parts()), manifest.max_chunks, bench.version
        )
        heard = await check(swarm, swarm.links[nodes[0].peer], makes)
        await trio.sleep(5)
        assert len(swarm.links) == 8
    to_nodes = {kind.__name__ for kind in map(type, (make(0) for make in messages_to_a_node("a", "b", bytes(32), (b"", b""), 9)))}
    assert heard | to_nodes | IN_THE_HANDSHAKE == {kind.__name__ for kind in decode.kinds.values()}, "a new kind belongs here"


def messages_to_a_node(one: str, other: str, mid: bytes, parts: tuple[bytes, ...], chunks: int) -> list[Make]:
    """What the head may send; `one` and `other` are members."""
    version, every = Version(1, 1), tuple(range(chunks))
    groups = tuple(range(60))
    again = written_anew(parts[1]) if parts[1] else b""

    def ids(i: int) -> tuple[str, ...]:
        return tuple(f"12D3KooW{i}".ljust(46, "x") + f"{j:06}" for j in range(9000))

    def placed(i: int) -> tuple[Placed, ...]:
        return tuple(Placed(peer, j % 60) for j, peer in enumerate(ids(i)))

    def request(i: int, j: int) -> GenerateRequest:
        return GenerateRequest.of(Generate(f"{i}.{j}.0", (1,) * 900, 9, (0,), 7, version))

    def entry(i: int) -> CatalogEntry:
        return CatalogEntry(i.to_bytes(16, "big"), "delta", version, version, bytes(32), bytes(32), 99)

    def names(i: int) -> tuple[str, ...]:
        return tuple(f"{i}.{j}".ljust(120, "0") for j in range(MANY))

    return [
        lambda i: Assign(tuple(request(i, j) for j in range(FEW))), lambda i: Interrupt(names(i)), lambda i: Abort(names(i)),
        lambda i: Catalog(version, tuple(entry(10_000 * i + j) for j in range(MANY))),
        lambda i: PassingOn(tuple(PassOn(one, other, (i + j) % 8, 8) for j in range(MANY))),
        lambda i: Meeting(one, addresses(i, one), True, 1e300), lambda i: NoMeeting(one, LINE),
        lambda i: Relieve(mid, every), lambda i: Have(mid, every), lambda i: Parts(mid, (again,) * FEW if again else ()),
        lambda i: Chunk(mid, 0, MOST, bytes([i]) * (MAX_FRAME - 60)),
        lambda i: Activate("active", TEXT[:20_000]), lambda i: Allowance(None, None),
        lambda i: Grouping(0, (0,) * 60, True, placed(i), groups, groups, ids(i)),
        lambda i: Grouping(0, (), True, ()),
        lambda i: Roster(1, tuple(RosterEntry(peer, (), "n" * 30) for peer in ids(i))), lambda i: Roster(1, ()),
    ]  # fmt: skip


async def test_what_the_head_may_send_to_a_node(tmp_path: Path, autojump_clock) -> None:
    async with open_swarm(tmp_path) as world:
        head = await world.start_head()
        nodes = await world.start_nodes(4)
        node = nodes[0]
        published = head.publish(1, make_state(1))
        await head.until(lambda: node.peer in head.status and head.status[node.peer].ready)
        swarm = node.agent.swarm
        manifest = swarm.transfers[published.mid].manifest
        makes = messages_to_a_node(
            nodes[1].peer, nodes[2].peer, published.mid, tuple(manifest.parts()), manifest.max_chunks
        )
        await check(swarm, swarm.links[swarm.head], makes)


async def test_the_links_of_a_long_roster_are_begun_with_a_few_at_once(tmp_path: Path, autojump_clock) -> None:
    async with open_swarm(tmp_path) as world:
        await world.start_head()
        [node] = await world.start_nodes(1)
        swarm = node.agent.swarm
        members = tuple(RosterEntry(Identity.from_seed(j.to_bytes(4, "big") * 8).peer_id, (), "n") for j in range(3 * STARTS))
        await swarm.on_message(swarm.links[swarm.head], Roster(1, members))
        assert len(swarm.peering.dialler.at_work) == STARTS
        await trio.sleep(5)
        assert len(swarm.peering.dialler.at_work) == 3 * STARTS


def test_the_most_chunks_that_one_may_ask_for() -> None:
    """Of 400,000."""
    session = Session(me="me", source=None, now=0.0)
    for peer in ("a", "b"):
        session.join(peer, (), 0.0)
    for chunk in range(400_000):
        session.hold(chunk, None, duty=0, now=0.0)
    batches = [tuple(range(first, 400_000, 400_000 // FEW))[:FEW] for first in range(3)]
    assert cost(lambda: session.peer_wants("a", batches.pop(0), 0.0)) < BOUND_S


@pytest.mark.parametrize("right", [True, False])
def test_the_longest_chunk(tmp_path: Path, right: bool) -> None:
    store = ChunkStore(tmp_path, 64 * MIB)
    pieces = [bytes([i]) * MIB for i in range(3)]

    def put() -> None:
        data = pieces.pop()
        with suppress(Exception):
            store.put(blake3.blake3(data).digest() if right else bytes(32), data)

    assert cost(put) < BOUND_S
