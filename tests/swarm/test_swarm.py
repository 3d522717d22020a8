"""`Swarm` itself, over the memory network: a head and two peers, through public names alone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from msgspec.structs import replace

from p2p.codec import decode_segment
from p2p.errors import ChannelClosed, Refusal, UsageError, first_of
from p2p.identity import Identity
from p2p.limits import KIB
from p2p.membership.admission import make_ticket
from p2p.membership.banlist import BAN_S
from p2p.membership.links import Link
from p2p.membership.peering import JoinRefused
from p2p.protocol.join import Bye, Roster, RosterEntry
from p2p.protocol.versions import Catalog, GetCatalog, GetParts, Report
from p2p.swarm import FollowerRole, SourceRole, Swarm, SwarmOwner
from p2p.version import Version
from p2p.weights.encode import encode_version
from p2p.weights.manifest import CODEC, Header, ManifestSigner
from p2p.weights.state import FlatState
from p2p.weights.store import ChunkStore
from tests.support.harness import LAYOUT, RUN, identity, make_state, wall
from tests.support.memory_network import MemorySwitch

HEAD, ONE, TWO, OTHER = (identity(number) for number in (200, 1, 2, 3))
TICKET = make_ticket(HEAD, RUN, (f"/memory/{HEAD.peer_id}",))
CATALOG = Catalog(Version(1, 0), ())


class Owner(SwarmOwner):
    """Keeps what it hears. `answer` may raise a Refusal."""

    def __init__(self, offered: Catalog | None = None) -> None:
        self.offered = offered
        self.up: list[str] = []
        self.down: list[str] = []
        self.heard: list[tuple[str, object]] = []
        self.refusals: list[tuple[str, str]] = []
        self.answer: Callable[[object], None] = lambda message: None

    async def on_up(self, link: Link) -> None:
        self.up.append(link.peer)

    async def on_down(self, link: Link, reason: str) -> None:
        self.down.append(link.peer)

    async def on_message(self, link: Link, message: object) -> None:
        self.heard.append((link.peer, message))
        self.answer(message)

    def on_refusal(self, peer: str, refusal: Refusal) -> None:
        self.refusals.append((peer, refusal.reason))

    def catalog(self) -> Catalog | None:
        return self.offered


class Peer:
    def __init__(self, swarm: Swarm, owner: Owner) -> None:
        self.swarm, self.owner, self.id = swarm, owner, swarm.me


class World:
    """The network and the head; `peer` opens another peer."""

    def __init__(self, directory: Path) -> None:
        self.switch, self._directory = MemorySwitch(latency=0.001), directory
        self.head: Peer

    @asynccontextmanager
    async def peer(
        self, who: Identity, role: SourceRole | FollowerRole = FollowerRole(TICKET), *, apart: str = "",
        offered: Catalog | None = None,
    ) -> AsyncIterator[Peer]:  # fmt: skip
        """A peer that takes part until the block ends; then it closes its links."""
        async with self.switch.network(who.peer_id) as network, trio.open_nursery() as nursery:
            owner = Owner(offered)
            swarm = Swarm(network, who, ChunkStore(self._directory / who.peer_id), role, owner, name="peer", wall=wall)
            if apart:
                swarm.keep_apart(apart)
            swarm.exchange.on_header = lambda manifest: True
            await nursery.start(swarm.run)
            yield Peer(swarm, owner)
            await swarm.leave("the test is over")
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def open_world(directory: Path, apart: str = "", offered: Catalog | None = None) -> AsyncIterator[World]:
    world = World(directory)
    async with world.peer(HEAD, SourceRole(RUN, epoch=1), apart=apart, offered=offered) as world.head:
        yield world


async def until(what: Callable[[], bool]) -> None:
    with trio.fail_after(20):
        while not what():
            await trio.sleep(0.05)


def publish(source: Swarm, state: FlatState) -> bytes:
    """A whole state as a version that goes to everybody who follows; its manifest's id."""
    base, now = FlatState.in_memory(LAYOUT), int(wall())
    header = Header(
        RUN, Version(1, 1), "delta", Version(1, 0), base.digest(), CODEC, 64 * KIB, 8 * KIB, now, now + 3600, LAYOUT,
    )  # fmt: skip
    signer = ManifestSigner(HEAD, header)
    source.offer(signer.header_part, announce=True)
    for s in encode_version(state, base, source.store, segment_bytes=64 * KIB, chunk_bytes=8 * KIB):
        source.extend(signer.mid, signer.record(s.index, s.size, s.digests), announce=True)
    source.extend(signer.mid, signer.seal(state.tensor_digests(), state.digest()), announce=True)
    return signer.mid


async def received(peer: Peer, mid: bytes) -> FlatState:
    new, base = FlatState.in_memory(LAYOUT), FlatState.in_memory(LAYOUT)
    with trio.fail_after(20):
        manifest = await peer.swarm.exchange.manifest(mid)
        for segment in manifest.segments:
            payload = await peer.swarm.exchange.segment(mid, segment.index)
            decode_segment(payload, base.words(segment), new.words(segment))
        await peer.swarm.exchange.sealed(mid)
    return new


async def test_two_peers_join_take_a_version_and_one_of_them_closes(tmp_path, autojump_clock) -> None:
    async with open_world(tmp_path, offered=CATALOG) as world, world.peer(ONE) as one:
        head = world.head
        async with world.peer(TWO) as two:
            await until(lambda: {HEAD.peer_id, two.id} == set(one.swarm.links) and {HEAD.peer_id, one.id} == set(two.swarm.links))
            assert sorted(head.owner.up) == sorted((one.id, two.id)) and one.swarm.epoch == head.swarm.epoch == 1
            assert (HEAD.peer_id, CATALOG) in one.owner.heard and (HEAD.peer_id, CATALOG) in two.owner.heard
            for peer in (one, two):
                peer.swarm.exchange.follow(True)
            await trio.sleep(1)
            state = make_state(1)
            mid = publish(head.swarm, state)
            for peer in (one, two):
                assert (await received(peer, mid)).digest() == state.digest()
            assert head.swarm.exchange.sent_bytes == head.swarm.transfers[mid].traffic.sent > 0
        await until(lambda: head.owner.down == [two.id])
        assert set(head.swarm.links) == {one.id} and one.owner.down == [two.id]
        head.swarm.store.drop(head.swarm.forget(mid))
        assert not head.swarm.transfers and not head.swarm.store.total
        head.swarm.send(two.id, Bye("nobody hears it", done=True))
        head.swarm.send(one.id, Bye("the run is over", done=True))
        await until(lambda: (HEAD.peer_id, Bye("the run is over", done=True)) in one.owner.heard)
        assert not any(peer.owner.refusals for peer in (head, one, two))


async def test_who_asks_gets_the_catalog(tmp_path, autojump_clock) -> None:
    async with open_world(tmp_path) as world, world.peer(ONE) as one:
        await until(lambda: HEAD.peer_id in one.owner.up)
        await trio.sleep(1)
        assert not one.owner.heard, "there is none yet"
        world.head.owner.offered = CATALOG
        for count, question in enumerate((GetCatalog(), GetParts(b"m" * 32)), start=1):
            one.swarm.send(HEAD.peer_id, question)
            await until(lambda count=count: one.owner.heard == count * [(HEAD.peer_id, CATALOG)])
        assert not world.head.owner.heard


async def test_one_kept_apart_gets_versions_and_nobody_hears_of_it(tmp_path, autojump_clock) -> None:
    async with open_world(tmp_path, apart=ONE.peer_id) as world, world.peer(ONE) as one, world.peer(TWO) as two:
        await until(lambda: len(world.head.swarm.links) == 2)
        one.swarm.exchange.follow(True)
        await trio.sleep(5)
        assert set(one.swarm.links) == set(two.swarm.links) == {HEAD.peer_id}
        mid = publish(world.head.swarm, make_state(1))
        for peer in (one, two):
            assert (await received(peer, mid)).digest() == make_state(1).digest()
        sent = world.head.swarm.exchange.sent_bytes
        assert sent == two.swarm.transfers[mid].traffic.from_head > 0, "who is apart does not count"


async def test_a_second_head_is_nobodys_head(tmp_path, autojump_clock) -> None:
    """Neither as a stranger, nor as a member that says what only the head says."""
    async with open_world(tmp_path) as world, world.peer(ONE) as one:
        await until(lambda: HEAD.peer_id in one.owner.up)
        async with world.peer(OTHER, SourceRole(RUN, epoch=9)) as second:
            with pytest.raises(JoinRefused, match="membership"):
                await second.swarm.peering.connect(one.id, [f"/memory/{one.id}"])
        async with world.peer(TWO) as two:
            await until(lambda: two.id in one.swarm.links)
            two.swarm.send(one.id, Roster(9, (RosterEntry(OTHER.peer_id, ("/memory/x",), "x"),)))
            await until(lambda: two.id in one.owner.down)
            why = "Roster from a peer that is not the head"
            assert one.owner.refusals == [(two.id, why)] and two.id not in one.swarm.links
            assert [m for _, m in world.head.owner.heard] == [Report(two.id, Version(0, 0), 0, why)]
        assert one.swarm.epoch == 1 and HEAD.peer_id in one.swarm.links


async def test_a_ticket_that_another_signed_opens_nothing(tmp_path, autojump_clock) -> None:
    forged = replace(TICKET, signature=make_ticket(OTHER, RUN, TICKET.addresses).signature)
    async with open_world(tmp_path) as world:
        with pytest.raises(BaseExceptionGroup) as caught:
            async with world.peer(ONE, FollowerRole(forged)):
                await trio.sleep(20)
        error = first_of(caught.value)
        assert isinstance(error, UsageError) and "refused this node" in str(error) and "signature" in str(error)
        assert not world.head.owner.up


@pytest.mark.parametrize("fatal", [False, True])
async def test_what_the_owner_refuses(tmp_path, autojump_clock, fatal: bool) -> None:
    """It costs the link when it is fatal; a follower comes again, and is let in when its time is over."""

    def refuse(message: object) -> None:
        raise Refusal("no goodbyes here", fatal=fatal)

    async with open_world(tmp_path) as world, world.peer(ONE) as one:
        await until(lambda: HEAD.peer_id in one.owner.up)
        world.head.owner.answer = refuse
        one.swarm.send(HEAD.peer_id, Bye("leaving", done=False))
        await until(lambda: world.head.owner.refusals == [(one.id, "no goodbyes here")])
        await trio.sleep(5)
        assert world.head.owner.down == ([one.id] if fatal else []) and (one.id in world.head.swarm.links) != fatal
        await trio.sleep(BAN_S[0] + 5)
        assert one.owner.up == [HEAD.peer_id] * (1 + fatal) and one.id in world.head.swarm.links


async def test_a_follower_comes_back_to_a_head_that_was_away(tmp_path, autojump_clock) -> None:
    world = World(tmp_path)
    async with world.peer(ONE) as one:
        for epoch in (1, 2):
            async with world.peer(HEAD, SourceRole(RUN, epoch=epoch)) as head:
                await until(lambda head=head: one.id in head.swarm.links)
                assert one.swarm.epoch == epoch
            await until(lambda epoch=epoch: one.owner.down == epoch * [HEAD.peer_id])
        with pytest.raises(ChannelClosed):
            await one.swarm.peering.connect(HEAD.peer_id, TICKET.addresses)


async def test_a_follower_whose_head_is_away_says_so_once_and_then_counts(tmp_path, autojump_clock, caplog) -> None:
    caplog.set_level("INFO", "shoal.swarm")
    world = World(tmp_path)
    async with world.peer(ONE) as one:
        await trio.sleep(50)
        first = [record.getMessage() for record in caplog.records]
        assert len(first) == 2 and first[0].startswith("dialling the learner at /memory/"), first
        assert first[1] == "cannot reach the learner: none of 1 addresses works; trying again until it works"
        await trio.sleep(600)
        later = [record.getMessage() for record in caplog.records][2:]
        assert 2 <= len(later) <= 4 and all(" attempts in " in line for line in later), later
        async with world.peer(HEAD, SourceRole(RUN, epoch=1)):
            await until(lambda: HEAD.peer_id in one.swarm.links)
            assert "failed attempts in 10 min" in caplog.records[-1].getMessage()
