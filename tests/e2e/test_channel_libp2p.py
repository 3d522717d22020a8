"""The libp2p adapter over real sockets: the conformance suite, and canaries for the traps we depend on."""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager
from math import inf
from pathlib import Path

import psutil
import pytest
import trio

from p2p.channel.libp2p import Libp2pNetwork, open_libp2p_network
from p2p.channel.listening import MAX_FILES
from p2p.channel.port import BULK, CONTROL
from p2p.channel.stream import PIECE
from p2p.channel.visits import ShortVisits
from p2p.channel.yamux import YamuxTransport, load_stack
from p2p.errors import ChannelClosed, UsageError
from p2p.identity import Identity
from p2p.limits import CHANNEL_WINDOW, KIB
from tests.support.channel_suite import ChannelSuite, connect, until_settled
from tests.support.watchdog import PATIENCE_S, patience

pytestmark = pytest.mark.e2e
LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]


@asynccontextmanager
async def two_hosts(listen_a=LOOPBACK):
    async with open_libp2p_network(Identity.generate(), listen_a) as a:
        async with open_libp2p_network(Identity.generate(), LOOPBACK) as b:
            yield a, b


def connections(host: Libp2pNetwork) -> list[object]:
    """What the library has open."""
    return host._swarm.get_connections()  # the port shows channels and not what carries them


@pytest.fixture
def clock():
    return None


class TestLibp2pChannel(ChannelSuite):
    def pair(self):
        return two_hosts()


async def test_each_end_sees_the_others_address() -> None:
    async with two_hosts() as (a, b):
        with patience():
            mine, theirs = await connect(a, b)
        dialled = {address.split("/p2p/")[0] for host in (a, b) for address in host.addresses}
        ends = {mine.remote(), theirs.remote()}
        assert all(end.startswith("/ip4/127.0.0.1/tcp/") for end in ends)
        assert len(ends & dialled) == 1, "one of them dialled the other's port from a port of its own"


async def test_addresses_are_full_and_real() -> None:
    identity = Identity.generate()
    async with open_libp2p_network(identity, ["/ip4/0.0.0.0/tcp/0"]) as host:
        assert host.addresses[-1].startswith("/ip4/127.0.0.1/tcp/")
        for address in host.addresses:
            assert address.endswith(f"/p2p/{identity.peer_id}")
            assert int(address.split("/")[4]) > 0
            assert "0.0.0.0" not in address
    async with open_libp2p_network(identity, LOOPBACK, announce=["/ip4/203.0.113.7/tcp/4001"]) as host:
        assert host.addresses == [f"/ip4/203.0.113.7/tcp/4001/p2p/{identity.peer_id}"]


async def test_a_port_in_use_is_one_clear_line() -> None:
    async with open_libp2p_network(Identity.generate(), LOOPBACK) as host:
        port = host.addresses[0].split("/")[4]
        with pytest.raises(UsageError, match=f"port {port} is in use"):
            async with open_libp2p_network(Identity.generate(), [f"/ip4/127.0.0.1/tcp/{port}"]):
                pass
    with pytest.raises(UsageError, match="want /ip4"):
        async with open_libp2p_network(Identity.generate(), ["localhost:4001"]):
            pass


async def test_root_logging_is_left_alone() -> None:
    root = logging.getLogger()
    before = list(root.handlers)
    async with two_hosts() as (a, b):
        await connect(a, b)
    assert root.handlers == before


async def test_nat_a_stream_over_the_connection_the_other_side_dialled() -> None:
    async with two_hosts(listen_a=[]) as (a, b):
        assert a.addresses == []
        with patience():
            await connect(a, b, CONTROL)
            mine = await b.open(a.peer_id, [], BULK)
            theirs = await a.incoming.receive()
            await mine.send(b"through")
            assert await theirs.receive() == b"through"


async def test_no_address_works_says_which_and_why() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    async with open_libp2p_network(Identity.generate(), []) as a:
        stranger = Identity.generate().peer_id
        with patience(), pytest.raises(ChannelClosed, match=f"127.0.0.1:{port}: Connection refused"):
            await a.open(stranger, [f"/ip4/127.0.0.1/tcp/{port}/p2p/{stranger}"], CONTROL)


async def test_an_address_that_never_answers_does_not_hide_the_next_one(monkeypatch) -> None:
    monkeypatch.setattr("p2p.channel.libp2p.HANDSHAKE_S", 10 * PATIENCE_S)  # whoever waits for that address waits for ever
    with socket.socket() as hole:
        hole.bind(("127.0.0.1", 0))
        hole.listen(5)  # connects, and says nothing for ever
        async with two_hosts() as (a, b):
            bad = f"/ip4/127.0.0.1/tcp/{hole.getsockname()[1]}/p2p/{b.peer_id}"
            before = len(psutil.Process().net_connections())
            with patience():
                channel = await a.open(b.peer_id, [bad, *b.addresses], BULK)
            assert await until_settled(lambda: len(psutil.Process().net_connections())) == before + 2  # both ends of one
            assert len(connections(a)) == 1
            await a.drop(b.peer_id, "again")
            await channel.wait_done()
            await until_settled(lambda: len(connections(a)))
            monkeypatch.setattr("p2p.channel.libp2p.STAGGER_S", 10 * PATIENCE_S)
            with patience():  # the one that worked is asked first
                await a.open(b.peer_id, [bad, *b.addresses], BULK)


async def test_a_connection_that_carries_nothing_is_broken(monkeypatch) -> None:
    monkeypatch.setattr("p2p.channel.libp2p.HANDSHAKE_S", 1.0)
    stack = load_stack()
    async with two_hosts() as (a, b), open_libp2p_network(Identity.generate(), []) as c:
        mine, theirs = await connect(c, b)
        # A connection without a channel, which the network never makes.
        await a._swarm.dial_addr(stack.multiaddr(b.addresses[0]), stack.peer_id(b.peer_id))
        with patience():
            while len(connections(b)) < 2:
                await trio.sleep(0.05)
            while len(connections(b)) > 1:
                await trio.sleep(0.05)
            await trio.sleep(1.5)  # what carries a channel stays, however quiet
            await mine.send(b"still here")
            assert await theirs.receive() == b"still here"
            await mine.aclose("done")
            while connections(b):
                await trio.sleep(0.05)


async def test_a_stranger_cannot_announce_a_line_without_end() -> None:
    async with open_libp2p_network(Identity.generate(), LOOPBACK) as host:
        stream = await trio.open_tcp_stream("127.0.0.1", int(host.addresses[0].split("/")[4]))
        await stream.send_all(b"\xff\xff\xff\xff\x0f" + b"x" * 1000)
        with patience():
            while True:
                try:
                    if not await stream.receive_some():
                        break
                except trio.BrokenResourceError:
                    break


async def test_many_open_files_are_asked_for() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1000), hard))
    try:
        async with open_libp2p_network(Identity.generate(), []):
            wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (wanted, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_trap_1_a_receiver_idle_for_six_seconds_breaks_nothing() -> None:
    async with two_hosts() as (a, b):
        mine, theirs = await connect(a, b)
        sent = 0

        async def pump() -> None:
            nonlocal sent
            for _ in range(100):
                await mine.send(bytes(100 * KIB))
                sent += 1

        with patience():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pump)
                await trio.sleep(6.5)  # the time is the test: yamux gives a write up after 5 s without window
                assert 30 < sent < 60
                for _ in range(100):
                    assert len(await theirs.receive()) == 100 * KIB


@pytest.mark.parametrize("security", ["plaintext", "tls"])
async def test_trap_5_only_noise_is_spoken(security) -> None:
    from libp2p.crypto.ed25519 import create_new_key_pair
    from libp2p.security.insecure.transport import PLAINTEXT_PROTOCOL_ID, InsecureTransport
    from libp2p.security.tls.transport import PROTOCOL_ID, TLSTransport

    stack = load_stack()
    async with open_libp2p_network(Identity.generate(), LOOPBACK) as host:
        seed = os.urandom(32)
        keys = create_new_key_pair(seed)
        options = {
            "plaintext": {PLAINTEXT_PROTOCOL_ID: InsecureTransport(keys)},
            "tls": {PROTOCOL_ID: TLSTransport(keys)},
        }
        swarm = stack.make_swarm(seed)
        swarm.upgrader = type(swarm.upgrader)(options[security], swarm.upgrader.muxer_multistream.transports)
        async with stack.background_service(swarm):
            with patience(), pytest.raises(Exception, match="failed to upgrade security"):
                await swarm.dial_addr(stack.multiaddr(host.addresses[0]), stack.peer_id(host.peer_id))


async def test_no_link_needs_fastecdsa(monkeypatch) -> None:
    """Which docs/deploy/no-compiler.txt builds on: only libp2p's ecc module imports it, and our links call nothing there."""
    load_stack()
    from libp2p.crypto import ecc, key_exchange

    for module, names in ((ecc, ("curve_types", "keys", "point", "SEC1Encoder")), (key_exchange, ("util", "int_bytelen"))):
        for name in names:
            monkeypatch.setattr(module, name, None)  # whatever is asked of it now fails
    package = Path(ecc.__file__).parents[1]
    importers = {path for path in package.rglob("*.py") if "fastecdsa" in path.read_text()}
    assert importers == {Path(ecc.__file__), Path(key_exchange.__file__)}
    with patience():
        async with two_hosts() as (a, b):
            mine, theirs = await connect(a, b)
            await mine.send(b"over Noise")
            assert await theirs.receive() == b"over Noise"


async def test_trap_10_no_write_is_over_one_noise_record(monkeypatch) -> None:
    sizes: list[int] = []
    write, try_write = YamuxTransport.write, YamuxTransport.try_write

    async def spy(self, data: bytes) -> None:
        sizes.append(len(data))
        await write(self, data)

    def spy_at_once(self, data: bytes) -> bool:
        sizes.append(len(data))
        return try_write(self, data)

    monkeypatch.setattr(YamuxTransport, "write", spy)
    monkeypatch.setattr(YamuxTransport, "try_write", spy_at_once)
    async with two_hosts() as (a, b):
        mine, theirs = await connect(a, b)
        message = os.urandom(1024 * KIB)
        with patience():
            await mine.send(message)
            assert await theirs.receive() == message
    assert max(sizes) == PIECE == 65507


async def test_a_cancelled_open_leaves_the_connection_whole() -> None:
    async with two_hosts() as (a, b):
        mine, theirs = await connect(a, b)
        with patience():
            for i in range(20):
                with trio.move_on_after(i * 0.0005):
                    await (await a.open(b.peer_id, [], CONTROL)).aclose("done")
            await until_settled(lambda: len(a.table.of(b.peer_id)))
            await mine.send(b"unharmed")
            assert await theirs.receive() == b"unharmed"


async def test_bulk_both_ways_does_not_stop_control() -> None:
    async with two_hosts() as (a, b):
        bulk = await connect(a, b, BULK)
        control = await connect(a, b, CONTROL)
        moved = [0, 0]

        async def push(channel) -> None:
            while True:
                await channel.send(bytes(256 * KIB))

        async def pull(side: int) -> None:
            while True:
                moved[side] += len(await bulk[side].receive())

        async with trio.open_nursery() as nursery:
            for side in (0, 1):
                nursery.start_soon(push, bulk[side])
                nursery.start_soon(pull, side)
            with patience():
                for i in range(20):
                    before = sum(moved)
                    await control[0].send(b"%d" % i)
                    assert await control[1].receive() == b"%d" % i
                    assert sum(moved) - before < 8 * CHANNEL_WINDOW, "it waits at most for what both sides may have under way"
                    await trio.sleep(0.1)
            nursery.cancel_scope.cancel()
        assert min(moved) > 1 << 20


CHILD = """
import sys, trio
from p2p.channel.libp2p import Libp2pNetwork, open_libp2p_network
from p2p.identity import Identity
async def main():
    async with open_libp2p_network(Identity.generate(), []) as host:
        channel = await host.open(sys.argv[1], [sys.argv[2]], "bulk")
        await channel.send(b"alive")
        await trio.sleep_forever()
trio.run(main)
"""


async def test_a_killed_process_is_noticed_at_once() -> None:
    async with open_libp2p_network(Identity.generate(), LOOPBACK) as host:
        root = Path(__file__).parents[2]
        child = subprocess.Popen([sys.executable, "-c", CHILD, host.peer_id, host.addresses[0]], cwd=root)  # noqa: ASYNC220
        try:
            with patience():
                channel = await host.incoming.receive()
                assert await channel.receive() == b"alive"
            child.send_signal(signal.SIGKILL)
            with patience(), pytest.raises(ChannelClosed) as closed:
                await channel.receive()
            assert "nothing heard" not in str(closed.value), "it is noticed when the connection breaks, not by its silence"
        finally:
            child.kill()
            child.wait()


@pytest.mark.parametrize("admitted", [True, False])
async def test_a_place_whose_connections_come_to_no_admission_has_few(admitted: bool) -> None:
    """One address that stayed 5.1 s and said nothing took all handshakes that are done in a second."""
    async with two_hosts() as (a, b):
        a._swarm.visits._short = ShortVisits(3, each_s=inf, short_s=0.0)  # else it takes a hundred handshakes to see
        came = 0
        with patience():
            for _ in range(6):
                try:
                    _, theirs = await connect(b, a)
                except ChannelClosed:
                    continue
                came += 1
                if admitted:
                    a.admitted(theirs)
                await b.drop(a.peer_id, "as a test wants")
                await theirs.aclose()
                await until_settled(lambda: not connections(a))
        assert came == (6 if admitted else 3) and a.turned_away == 6 - came
