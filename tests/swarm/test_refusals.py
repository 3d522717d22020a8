"""What a node gets and must not take: it says so in full, serves on, and goes on with the next correct version."""

from __future__ import annotations

import logging
import math
from unittest.mock import Mock

import msgpack
import pytest
import trio

from p2p.channel.link import DATA, HEADER
from p2p.channel.port import CONTROL
from p2p.errors import ChannelClosed
from p2p.identity import Identity
from p2p.limits import GREETING_WINDOW, HANDSHAKE_S, MAX_FRAME, PROTOCOL_VERSION
from p2p.membership.banlist import BAN_S
from p2p.membership.conduct import REFUSALS
from p2p.protocol.generation import Assign
from p2p.protocol.join import Bye, Rejection, Renewal, Roster, Welcome
from p2p.protocol.versions import Catalog, Chunk, GetParts, Have, Parts, Subscribe, Want
from p2p.protocol.wire import encode
from p2p.version import Version
from p2p.weights.manifest import CODEC, Header, ManifestSigner, open_part
from tests.support.harness import CHUNK, LAYOUT, RUN, SEGMENT, WALL, changed_state, identity, make_state, open_swarm
from tests.support.rogue import Rogue, greet, hello, membership


@pytest.fixture(autouse=True)
def _log(caplog):
    caplog.set_level(logging.INFO, logger="shoal")


async def tokens_flow(head, node, version: Version, name: str) -> None:
    """The node makes tokens under `version`, and they reach the head."""
    head.ask(node.peer, name, 12)
    await head.until(lambda: name in head.completions and head.completions[name].finish == "length")
    assert {s.version for s in head.completions[name].spans} == {version}
    assert len(head.completions[name].ids) == 12


async def next_version(head, nodes, step: int, old):
    """A correct delta is installed by all of `nodes`."""
    new = changed_state(old, step)
    head.publish(step, new, base=step - 1, old=old)
    await head.until_installed([n.peer for n in nodes], Version(head.epoch, step), 120)
    for node in nodes:
        assert node.agent.shadow.digest == new.digest()
    return new


def header_part(signer: Identity, version: Version, kind: str = "anchor", base: Version | None = None, digest: bytes = b""):
    header = Header(RUN, version, kind, base, digest, CODEC, SEGMENT, CHUNK, int(WALL), int(WALL) + 10**6, LAYOUT)
    made = ManifestSigner(signer, header)
    return made.mid, made.header_part


async def test_a_chunk_with_one_flipped_bit(tmp_path, autojump_clock, caplog) -> None:
    async with open_swarm(tmp_path) as swarm:
        head = await swarm.start_head()
        nodes = await swarm.start_nodes(3)
        names = [n.peer for n in nodes]
        liar, victim = nodes[0], nodes[1]
        first = make_state(1)
        head.publish(1, first)
        await head.until_installed(names, Version(1, 1))
        flipped: list[float] = []
        chunk = encode(Chunk(b"", 0, 0, b""))[:7]  # how each begins: its tag

        def flip(src: str, dst: str, data: bytes) -> bytes:
            at = data.find(chunk)  # parts of a manifest are as long, and frames go out several at a time
            if (src, dst) == (liar.peer, victim.peer) and 0 <= at < len(data) - CHUNK * 3 // 4 and not flipped:
                flipped.append(trio.current_time())
                middle = at + CHUNK // 2
                return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
            return data

        swarm.switch.tamper = flip
        second = changed_state(first, 2)
        delta = head.publish(2, second, base=1, old=first)
        await head.until(lambda: bool(head.reports))
        assert flipped
        assert liar.peer not in victim.agent.swarm.links  # dropped by its neighbour
        assert liar.peer in head.links  # one node's word evicts nobody
        reporter, report = head.reports[0]
        assert (reporter, report.peer, report.version) == (victim.peer, liar.peer, Version(1, 2))
        assert "does not hash" in report.reason
        line = f"refused: peer={liar.peer} version=1.2 chunk={report.chunk}: chunk does not hash to"
        assert line in caplog.text
        await head.until_installed(names, Version(1, 2))  # the chunk came from somewhere else
        assert all(n.agent.shadow.digest == second.digest() for n in nodes)
        assert victim.traffic(delta).from_head + victim.traffic(delta).from_peers == delta.size
        assert liar.peer not in victim.agent.swarm.links and victim.peer not in liar.agent.swarm.links
        await tokens_flow(head, victim, Version(1, 2), "after")
        await next_version(head, nodes, 3, second)
        await trio.sleep(BAN_S[0] + 10)
        assert liar.peer in victim.agent.swarm.links  # it may have been the line: another chance


async def test_a_manifest_signed_by_another_key(tmp_path, autojump_clock, caplog) -> None:
    async with open_swarm(tmp_path) as swarm, trio.open_nursery() as nursery:
        head = await swarm.start_head()
        nodes = await swarm.start_nodes(2)
        first = make_state(1)
        head.publish(1, first)
        await head.until_installed([n.peer for n in nodes], Version(1, 1))
        rogue = await Rogue(await swarm.peer(60), nodes[0].peer).connect(nursery, membership(swarm, identity(60).peer_id))
        mid, part = header_part(identity(60), Version(1, 9))
        await rogue.say(Parts(mid, (part,)))
        assert "not signed by the head" in await rogue.until_closed()
        line = f"refused: peer={rogue.peer} version=1.9 chunk=-: manifest header is not signed by the head"
        assert line in caplog.text
        await head.until(lambda: bool(head.reports))
        assert head.reports[0][1].peer == rogue.peer and head.reports[0][1].version == Version(1, 9)
        assert mid not in nodes[0].agent.swarm.transfers
        await tokens_flow(head, nodes[0], Version(1, 1), "meanwhile")
        await next_version(head, nodes, 2, first)
        await tokens_flow(head, nodes[0], Version(1, 2), "after")
        # and it is not let in again at once
        _, answer = await greet(rogue.network, nodes[0].peer, hello(membership(swarm, rogue.peer)))
        assert isinstance(answer, Rejection) and answer.retryable and "dropped a short while ago" in answer.reason
        nursery.cancel_scope.cancel()


async def test_a_manifest_of_an_older_epoch(tmp_path, autojump_clock, caplog) -> None:
    async with open_swarm(tmp_path) as swarm, trio.open_nursery() as nursery:
        head = await swarm.start_head(2)
        nodes = await swarm.start_nodes(2)
        first = make_state(1)
        head.publish(1, first)
        await head.until_installed([n.peer for n in nodes], Version(2, 1))
        proof = membership(swarm, identity(60).peer_id, epoch=2)
        rogue = await Rogue(await swarm.peer(60), nodes[0].peer).connect(nursery, proof)
        mid, part = header_part(swarm.head_identity, Version(1, 7))  # genuine, replayed
        await rogue.say(Parts(mid, (part,)))
        await head.until(lambda: bool(head.reports))
        reason = "manifest of older epoch 1, the run is at epoch 2"
        assert f"refused: peer={rogue.peer} version=1.7 chunk=-: {reason}" in caplog.text
        assert (head.reports[0][1].peer, head.reports[0][1].reason) == (rogue.peer, reason)
        assert mid not in nodes[0].agent.swarm.transfers
        assert not rogue.closed  # a neighbour may not have heard of the new epoch yet
        await tokens_flow(head, nodes[0], Version(2, 1), "meanwhile")
        await next_version(head, nodes, 2, first)
        await tokens_flow(head, nodes[0], Version(2, 2), "after")
        nursery.cancel_scope.cancel()


async def test_a_delta_against_an_unknown_base(tmp_path, autojump_clock, caplog) -> None:
    async with open_swarm(tmp_path) as swarm:
        head = await swarm.start_head()
        nodes = await swarm.start_nodes(2)
        names = [n.peer for n in nodes]
        first = make_state(1)
        head.publish(1, first)
        await head.until_installed(names, Version(1, 1))
        other = make_state(50)
        head.publisher._digests[Version(1, 1)] = other.digest()  # a head that lost its way
        second = changed_state(other, 2)
        head.publish(2, second, base=1, old=other)
        await head.until(lambda: {peer for peer, _ in head.reports} == set(names))
        await trio.sleep(20)
        assert len(head.reports) == 2  # said once by each
        for _, report in head.reports:
            assert report.version == Version(1, 2) and report.peer == head.identity.peer_id
        reason = f"unknown base: delta is against version 1.1 ({other.digest().hex()[:16]}), held is version 1.1"
        assert f"refused: peer={head.identity.peer_id} version=1.2 chunk=-: {reason}" in caplog.text
        assert all(n.agent.shadow.version == Version(1, 1) and n.peer in head.links for n in nodes)
        await tokens_flow(head, nodes[0], Version(1, 1), "meanwhile")
        third = make_state(3)
        head.publish(3, third)  # an anchor leads out of it
        await head.until_installed(names, Version(1, 3))
        await next_version(head, nodes, 4, third)
        await tokens_flow(head, nodes[0], Version(1, 4), "after")


async def test_a_delta_whose_base_lies_about_its_bits(tmp_path, autojump_clock, caplog) -> None:
    """The header names the held base, the seal another outcome: found out by the digests, after the whole transfer."""
    async with open_swarm(tmp_path) as swarm:
        head = await swarm.start_head()
        nodes = await swarm.start_nodes(2)
        names = [n.peer for n in nodes]
        first = make_state(1)
        head.publish(1, first)
        await head.until_installed(names, Version(1, 1))
        # Few words change: what changes everywhere travels as it is and needs no base to lie about. Of the base only signs
        # are other: with other exponents the very first segment does not decode.
        old = make_state(1)
        for spec in LAYOUT.tensors:
            words = old.tensor(spec.name)
            words ^= words.dtype.type(1 << (8 * words.itemsize - 1))
        head.publish(2, changed_state(old, 9, share=0.05), base=1, old=old)
        await head.until(lambda: {peer for peer, _ in head.reports} == set(names))
        assert f"refused: peer=local version=1.2 chunk=-: tensor {LAYOUT.tensors[0].name!r} differs" in caplog.text
        assert all(n.agent.shadow.digest == first.digest() and n.peer in head.links for n in nodes)
        await tokens_flow(head, nodes[0], Version(1, 1), "meanwhile")
        third = make_state(3)
        head.publish(3, third)
        await head.until_installed(names, Version(1, 3))
        await next_version(head, nodes, 4, third)
        await tokens_flow(head, nodes[0], Version(1, 4), "after")


async def test_an_oversized_frame(tmp_path, autojump_clock, caplog) -> None:
    async with open_swarm(tmp_path) as swarm, trio.open_nursery() as nursery:
        head = await swarm.start_head()
        nodes = await swarm.start_nodes(2)
        first = make_state(1)
        head.publish(1, first)
        await head.until_installed([n.peer for n in nodes], Version(1, 1))
        rogue = await Rogue(await swarm.peer(60), nodes[0].peer).connect(nursery, membership(swarm, identity(60).peer_id))
        await rogue.bulk._transport.write(HEADER.pack(MAX_FRAME + 1, DATA) + b"x" * 100)  # type: ignore[attr-defined]
        reason = f"a frame of {MAX_FRAME + 1} bytes is over the limit of {MAX_FRAME}"
        assert reason in await rogue.until_closed()
        assert f"refused: peer={rogue.peer} version=- chunk=-: {reason}" in caplog.text
        await head.until(lambda: bool(head.reports))
        assert (head.reports[0][1].peer, head.reports[0][1].reason) == (rogue.peer, reason)
        assert rogue.peer not in nodes[0].agent.swarm.links
        await tokens_flow(head, nodes[0], Version(1, 1), "meanwhile")
        await next_version(head, nodes, 2, first)
        await tokens_flow(head, nodes[0], Version(1, 2), "after")
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("make", [
    lambda: Assign(()),
    lambda: Roster(1, ()),
    lambda: Catalog(Version(1, 99), ()),
    lambda: Bye("go home", done=True),
    lambda: Welcome(PROTOCOL_VERSION, b"", "again", ""),
], ids=["assign", "roster", "catalog", "bye", "welcome"])  # fmt: skip
async def test_what_only_the_head_may_say(tmp_path, autojump_clock, caplog, make) -> None:
    async with open_swarm(tmp_path) as swarm, trio.open_nursery() as nursery:
        head = await swarm.start_head()
        nodes = await swarm.start_nodes(1)
        head.publish(1, make_state(1))
        await head.until_installed([nodes[0].peer], Version(1, 1))
        rogue = await Rogue(await swarm.peer(60), nodes[0].peer).connect(nursery, membership(swarm, identity(60).peer_id))
        message = make()
        await rogue.say(message)
        reason = f"{type(message).__name__} from a peer that is not the head"
        assert reason in await rogue.until_closed()
        assert f"refused: peer={rogue.peer} version=- chunk=-: {reason}" in caplog.text
        await head.until(lambda: bool(head.reports))
        await tokens_flow(head, nodes[0], Version(1, 1), "after")
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("parts", [
    b"", b"\xc1", msgpack.packb([[], b"", b""]), msgpack.packb([{}, b"", b""]), msgpack.packb(["header", "x", "y"]),
    msgpack.packb(["header", b"", b"\0" * 64]), msgpack.packb([1, 2, 3]), msgpack.packb(["seal", b"\x93", b""]),
])  # fmt: skip
async def test_garbage_for_a_manifest(tmp_path, autojump_clock, parts) -> None:
    async with open_swarm(tmp_path) as swarm, trio.open_nursery() as nursery:
        head = await swarm.start_head()
        (node,) = await swarm.start_nodes(1)
        rogue = await Rogue(await swarm.peer(60), node.peer).connect(nursery, membership(swarm, identity(60).peer_id))
        await rogue.say(Parts(b"m" * 16, (parts,)))
        assert await rogue.until_closed()
        head.publish(1, make_state(1))
        await head.until_installed([node.peer], Version(1, 1))
        nursery.cancel_scope.cancel()


def hostile(epoch: object) -> bytes:
    return msgpack.packb([msgpack.packb([RUN, epoch, "p", 0]), b""])


HANDSHAKES = {
    "no membership": (lambda s, me: hello(b""), "malformed membership"),
    "another peer's": (lambda s, me: hello(membership(s, identity(61).peer_id)), f"belongs to {identity(61).peer_id}"),
    "another run's": (lambda s, me: hello(membership(s, me, run="other")), "is for run other"),
    "expired": (lambda s, me: hello(membership(s, me, epoch=5, lifetime=-50)), "membership expired"),
    "an old epoch's": (lambda s, me: hello(membership(s, me, epoch=3)), "membership is of epoch 3, the run is at 4"),
    "another protocol": (
        lambda s, me: hello(membership(s, me, epoch=5), protocol=99),
        f"it speaks protocol 99, this is {PROTOCOL_VERSION}",
    ),
    "another run": (lambda s, me: hello(membership(s, me, epoch=5), run="other"), "it wants run other"),
    "a long name": (lambda s, me: hello(membership(s, me, epoch=5), name="x" * 60_000), "says too much"),
    "many addresses": (lambda s, me: hello(membership(s, me, epoch=5), addresses=["/a"] * 999), "says too much"),
    "a number that is none": (lambda s, me: hello(hostile(math.inf)), "membership is not signed by the head"),
    "a number for bytes": (lambda s, me: hello(msgpack.packb([b"", 2**62])), "malformed membership"),
    "no hello": (lambda s, me: Have(b"", ()), "expected a hello, got Have"),
}


@pytest.mark.parametrize("case", HANDSHAKES)
async def test_at_the_handshake(tmp_path, autojump_clock, caplog, case) -> None:
    make, reason = HANDSHAKES[case]
    async with open_swarm(tmp_path) as swarm:
        await swarm.start_head(5)
        (node,) = await swarm.start_nodes(1)
        network = await swarm.peer(60)
        with trio.fail_after(30):
            _, answer = await greet(network, node.peer, make(swarm, network.peer_id))
        assert isinstance(answer, Rejection) and reason in answer.reason
        assert f"refused: peer={network.peer_id} version=- chunk=-: " in caplog.text and reason in caplog.text
        assert network.peer_id not in node.agent.swarm.links


async def test_a_hello_that_finds_a_defect_costs_one_channel(tmp_path, autojump_clock, caplog, monkeypatch) -> None:
    """Whatever is raised while a stranger is admitted, and by the head or a node: it is refused, and they live."""
    async with open_swarm(tmp_path) as swarm:
        head = await swarm.start_head()
        (node,) = await swarm.start_nodes(1)
        network = await swarm.peer(60)
        for victim in (head.identity.peer_id, node.peer):
            for defect in (OverflowError("too large"), MemoryError(), RecursionError(), ValueError("odd")):
                with monkeypatch.context() as broken:
                    broken.setattr("p2p.membership.gate.check_membership", Mock(side_effect=defect))
                    _, answer = await greet(network, victim, hello(membership(swarm, network.peer_id)))
                assert isinstance(answer, Rejection) and not answer.retryable
                assert answer.reason == f"its hello cannot be handled: {defect!r}"
        assert "Traceback" in caplog.text
        head.publish(1, make_state(1))
        await head.until_installed([node.peer], Version(1, 1))
        await trio.sleep(HANDSHAKE_S + 5)
        assert swarm.switch.host(node.peer).table.of(network.peer_id) == []


async def test_a_stranger_cannot_make_anybody_hold_much(tmp_path, autojump_clock) -> None:
    async with open_swarm(tmp_path, rate=1 << 30) as swarm:
        head = await swarm.start_head()
        network = await swarm.peer(60)
        for first in (encode(Have(b"", ())), encode(hello(b"")), b"x" * GREETING_WINDOW):
            channel = await network.open(head.identity.peer_id, [f"/memory/{head.identity.peer_id}"], CONTROL)
            await channel.send(first)
            with pytest.raises(ChannelClosed, match=r"closed by the peer|connection lost"):
                for _ in range(100):
                    await channel.send(b"x" * (GREETING_WINDOW // 2))
                    await trio.sleep(0.1)
            held = [c._inbox for c in head.network.table._live.get(network.peer_id, ())]  # type: ignore[attr-defined]
            assert sum(len(message) for inbox in held for message in inbox) <= GREETING_WINDOW


async def test_a_message_that_finds_a_defect_costs_one_link(tmp_path, autojump_clock, caplog, monkeypatch) -> None:
    async with open_swarm(tmp_path) as swarm, trio.open_nursery() as nursery:
        head = await swarm.start_head()
        nodes = await swarm.start_nodes(2)
        rogue = await Rogue(await swarm.peer(60), nodes[0].peer).connect(nursery, membership(swarm, identity(60).peer_id))
        monkeypatch.setattr("p2p.broadcast.arrivals.open_part", Mock(side_effect=IndexError("no such thing")))
        await rogue.say(Parts(bytes(16), (b"x",)))
        assert "its Parts cannot be handled: IndexError('no such thing')" in await rogue.until_closed()
        assert f"refused: peer={rogue.peer} version=- chunk=-: its Parts cannot be handled" in caplog.text
        assert "Traceback" in caplog.text
        await head.until(lambda: bool(head.reports))
        assert rogue.peer not in nodes[0].agent.swarm.links
        monkeypatch.undo()
        head.publish(1, make_state(1))
        await head.until_installed([n.peer for n in nodes], Version(1, 1))
        nursery.cancel_scope.cancel()


async def test_an_arrival_that_finds_a_defect_costs_one_link(tmp_path, autojump_clock, caplog) -> None:
    async with open_swarm(tmp_path) as swarm, trio.open_nursery() as nursery:
        head = await swarm.start_head()
        (node,) = await swarm.start_nodes(1)
        original, head.swarm.exchange.add_peer = head.swarm.exchange.add_peer, Mock(side_effect=KeyError("x"))  # type: ignore[method-assign]
        network = await swarm.peer(60)
        rogue = await Rogue(network, head.identity.peer_id).connect(nursery, membership(swarm, network.peer_id))
        assert "its arrival cannot be handled: KeyError" in await rogue.until_closed()
        head.swarm.exchange.add_peer = original  # type: ignore[method-assign]
        assert list(head.swarm.links) == [node.peer]
        head.publish(1, make_state(1))
        await head.until_installed([node.peer], Version(1, 1))
        nursery.cancel_scope.cancel()


async def test_a_renewal_that_is_not_the_heads(tmp_path, autojump_clock) -> None:
    async with open_swarm(tmp_path) as swarm, trio.open_nursery() as nursery:
        await swarm.start_head()
        (node,) = await swarm.start_nodes(1)
        before = node.agent.swarm.peering.gate.membership
        rogue = await Rogue(await swarm.peer(60), node.peer).connect(nursery, membership(swarm, identity(60).peer_id))
        await rogue.say(Renewal(membership(swarm, node.peer, lifetime=1e9)))
        assert "Renewal from a peer that is not the head" in await rogue.until_closed()
        assert node.agent.swarm.peering.gate.membership == before
        nursery.cancel_scope.cancel()


async def test_records_without_their_header_are_not_worth_a_signature_check_each(tmp_path, autojump_clock, monkeypatch) -> None:
    async with open_swarm(tmp_path) as swarm, trio.open_nursery() as nursery:
        await swarm.start_head()
        (node,) = await swarm.start_nodes(1)
        header = Header(RUN, Version(1, 5), "anchor", None, b"", CODEC, SEGMENT, CHUNK, int(WALL), int(WALL) + 10**6, LAYOUT)
        signer = ManifestSigner(swarm.head_identity, header)
        records = tuple(signer.record(i, SEGMENT, (bytes(32),) * (SEGMENT // CHUNK)) for i in range(4))
        checks = Mock(side_effect=open_part)
        monkeypatch.setattr("p2p.broadcast.arrivals.open_part", checks)
        rogue = await Rogue(await swarm.peer(60), node.peer).connect(nursery, membership(swarm, identity(60).peer_id))
        await rogue.say(Parts(signer.mid, records * 50))
        await trio.sleep(1)
        assert checks.call_count == 1 and not rogue.closed
        await rogue.say(Parts(signer.mid, (signer.header_part, *records)))
        await trio.sleep(1)
        assert len(node.agent.swarm.transfers[signer.mid].manifest.records) == 4
        nursery.cancel_scope.cancel()


async def test_garbage_instead_of_a_message(tmp_path, autojump_clock, caplog) -> None:
    async with open_swarm(tmp_path) as swarm, trio.open_nursery() as nursery:
        head = await swarm.start_head()
        (node,) = await swarm.start_nodes(1)
        for number, garbage in enumerate([b"", b"\xc1", b"\x91" * 5000, msgpack.packb(["have", b"m", [-1]])]):
            network = await swarm.peer(60 + number)
            rogue = await Rogue(network, node.peer).connect(nursery, membership(swarm, network.peer_id))
            await rogue.control.send(garbage)
            assert "refused: peer=" in await rogue.until_closed()
            assert f"refused: peer={network.peer_id} version=- chunk=-: " in caplog.text
        head.publish(1, make_state(1))
        await head.until_installed([node.peer], Version(1, 1))
        nursery.cancel_scope.cancel()


async def test_a_flood_of_requests_is_bounded(tmp_path, autojump_clock) -> None:
    """Thousands of Wants, Subscribes, GetParts and Haves cost little and leave the node at work."""
    async with open_swarm(tmp_path, rate=1 << 30) as swarm, trio.open_nursery() as nursery:
        head = await swarm.start_head()
        nodes = await swarm.start_nodes(2)
        first = make_state(1)
        anchor = head.publish(1, first)
        await head.until_installed([n.peer for n in nodes], Version(1, 1))
        network, proof = await swarm.peer(60), membership(swarm, identity(60).peer_id)
        await Rogue(network, head.identity.peer_id).connect(nursery, proof)
        rogue = await Rogue(network, nodes[0].peer).connect(nursery, proof)
        await trio.sleep(1)  # until it is in the roster
        chunks = head.swarm.transfers[anchor.mid].manifest.seal.chunks
        start = trio.current_time()
        for _ in range(300):
            await rogue.say(Want(anchor.mid, (0,)), Subscribe(anchor.mid, b""), GetParts(anchor.mid))
            await rogue.say(Have(anchor.mid, (0,)), Subscribe(bytes(16), b"\xff" * 50_000), Want(anchor.mid, (0, 1)))
            await trio.sleep(0.01)
        await trio.sleep(1)
        elapsed = trio.current_time() - start
        sent = [m for m in rogue.heard if isinstance(m, Chunk)]
        # Each of the chunks goes to it no more often than RESEND_AFTER_S allows; none more than that.
        assert len(sent) <= 2 * 16 + 2
        proofs = [m for m in rogue.heard if isinstance(m, Parts) and len(m.parts) > 2]
        assert 1 <= len(proofs) <= elapsed / 0.5 + 1
        assert len([m for m in rogue.heard if isinstance(m, Have)]) <= 2
        assert not rogue.closed
        # A bound on what a stranger can make us remember.
        entry = nodes[0].agent.swarm.transfers[anchor.mid].session._peers[rogue.peer]
        assert len(entry.wanted) <= 32 and len(entry.has) <= chunks
        await rogue.say(Subscribe(anchor.mid, b"\xff" * 1000))
        assert "a bitmap of 1000 bytes" in await rogue.until_closed()
        await next_version(head, nodes, 2, first)
        nursery.cancel_scope.cancel()


async def test_a_chunk_number_out_of_range(tmp_path, autojump_clock, caplog) -> None:
    async with open_swarm(tmp_path) as swarm, trio.open_nursery() as nursery:
        head = await swarm.start_head()
        nodes = await swarm.start_nodes(1)
        anchor = head.publish(1, make_state(1))
        await head.until_installed([nodes[0].peer], Version(1, 1))
        chunks = head.swarm.transfers[anchor.mid].manifest.seal.chunks
        rogue = await Rogue(await swarm.peer(60), nodes[0].peer).connect(nursery, membership(swarm, identity(60).peer_id))
        await rogue.say(Have(anchor.mid, (chunks,)))
        assert await rogue.until_closed()
        assert f"refused: peer={rogue.peer} version=1.1 chunk={chunks}: chunk {chunks} of {chunks}" in caplog.text
        nursery.cancel_scope.cancel()


async def test_small_refusals_add_up(tmp_path, autojump_clock) -> None:
    async with open_swarm(tmp_path) as swarm, trio.open_nursery() as nursery:
        head = await swarm.start_head(2)
        (node,) = await swarm.start_nodes(1)
        proof = membership(swarm, identity(60).peer_id, epoch=2)
        rogue = await Rogue(await swarm.peer(60), node.peer).connect(nursery, proof)
        for step in range(REFUSALS):
            assert not rogue.closed
            mid, part = header_part(swarm.head_identity, Version(1, step))
            await rogue.say(Parts(mid, (part,)))
            await trio.sleep(0.01)
        await rogue.say(Parts(mid, (part,)))
        assert "messages were refused" in await rogue.until_closed()
        await head.until(lambda: len(head.reports) == REFUSALS + 1)
        nursery.cancel_scope.cancel()


async def test_a_peer_that_announces_and_never_sends(tmp_path, autojump_clock) -> None:
    """It claims to hold every chunk of every version; the real ones come, and without waiting a lease for each."""
    async with open_swarm(tmp_path) as swarm, trio.open_nursery() as nursery:
        head = await swarm.start_head()
        nodes = await swarm.start_nodes(2)
        network = await swarm.peer(60)
        await Rogue(network, head.identity.peer_id).connect(nursery, membership(swarm, network.peer_id))
        rogues = [await Rogue(network, n.peer).connect(nursery, membership(swarm, network.peer_id)) for n in nodes]
        await trio.sleep(1)  # until it is in the roster
        swarm.switch.stall(nodes[0].peer, nodes[1].peer)  # no relays: what is not pushed to it must be pulled
        anchor = head.publish(1, make_state(1))
        chunks = head.swarm.transfers[anchor.mid].manifest.seal.chunks
        for rogue in rogues:
            await rogue.say(Parts(anchor.mid, tuple(head.swarm.transfers[anchor.mid].manifest.parts())))
            await rogue.say(Have(anchor.mid, tuple(range(chunks))))
        await head.until_installed([n.peer for n in nodes], Version(1, 1), 15)
        assert any(isinstance(m, Want) for rogue in rogues for m in rogue.heard)
        nursery.cancel_scope.cancel()


async def test_the_head_refuses_a_bad_node_and_serves_the_others(tmp_path, autojump_clock) -> None:
    async with open_swarm(tmp_path) as swarm, trio.open_nursery() as nursery:
        head = await swarm.start_head()
        nodes = await swarm.start_nodes(2)
        network = await swarm.peer(60)
        rogue = await Rogue(network, head.identity.peer_id).connect(nursery, membership(swarm, network.peer_id))
        anchor = head.publish(1, make_state(1))
        await rogue.say(Have(anchor.mid, (10**9,)))
        assert await rogue.until_closed()
        assert head.refusals[0].peer == network.peer_id and head.refusals[0].chunk == 10**9
        await head.until_installed([n.peer for n in nodes], Version(1, 1))
        # what was seeded to the rogue alone reached the others all the same
        assert all(n.agent.shadow.digest == make_state(1).digest() for n in nodes)
        nursery.cancel_scope.cancel()


async def test_a_ticket_that_is_not_for_this_run(tmp_path, autojump_clock) -> None:
    from p2p.membership.admission import make_ticket

    async with open_swarm(tmp_path) as swarm:
        head = await swarm.start_head()
        network = await swarm.peer(60)
        for ticket, reason in [
            (make_ticket(swarm.head_identity, "other", ()).encode(), "the ticket is for run other"),
            (make_ticket(identity(61), RUN, ()).encode(), "the ticket was signed by"),
            (make_ticket(swarm.head_identity, RUN, (), int(WALL) - 9).encode(), "the ticket expired"),
            (swarm.ticket.encode()[:-8], "not a ticket"),
        ]:
            words = hello(b"")
            words = type(words)(words.protocol, words.run, ticket, b"", (), "n", "test", "")
            _, answer = await greet(network, head.identity.peer_id, words)
            assert isinstance(answer, Rejection) and reason in answer.reason and not answer.retryable
        assert not head.links
