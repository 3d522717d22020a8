"""The hot path of a libp2p connection against a peer that has none: the library's own Yamux and Noise session there."""

from __future__ import annotations

import functools
import os
import random
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import trio
import trio.testing

from p2p.channel._hot import _TCP_RTO_MAX_MS, RETRY_MS
from p2p.channel.yamux import load_stack
from p2p.limits import KIB
from tests.support.watchdog import patience

pytestmark = pytest.mark.e2e

SIZES = [1, 2, 3, 11, 12, 13, 18, 255, 4095, 4096, 4097, 16_383, 65_507, 65_508, 65_519, 65_520, 65_535, 64 * KIB]


PING_ANSWER = struct.pack(">BBHII", 0, 2, 2, 0, 0)
"""A frame of yamux that the reader of a connection writes."""


@dataclass
class Proxy:
    """Carries TCP between two peers, and does to what it carries as it is told."""

    port: int
    pieces: dict[str, int] = field(default_factory=lambda: {"there": 0, "back": 0})
    """bytes of one packet each way; 0 for as they come"""
    let: dict[str, int | None] = field(default_factory=lambda: {"there": None, "back": None})
    """bytes that are still let through; then the connection is broken"""
    wires: list[trio.SocketStream] = field(default_factory=list)

    async def carry(self, client: trio.SocketStream) -> None:
        server = await trio.open_tcp_stream("127.0.0.1", self.port)
        self.wires += [client, server]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._copy, client, server, "there")
            nursery.start_soon(self._copy, server, client, "back")

    async def _copy(self, source: trio.SocketStream, to: trio.SocketStream, way: str) -> None:
        to.setsockopt(6, 1, 1)  # TCP_NODELAY: a piece is a packet
        try:
            async for data in source:
                limit = self.let[way]
                if limit is not None:
                    data = data[:limit]
                    self.let[way] = limit - len(data)
                step = self.pieces[way] or len(data) or 1
                for start in range(0, len(data), step):
                    await to.send_all(data[start : start + step])
                if self.let[way] == 0:
                    for wire in self.wires:
                        await wire.aclose()
                    return
            await to.send_eof()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            await to.aclose()


@dataclass
class Side:
    swarm: Any
    hot: bool
    arrived: trio.MemoryReceiveChannel[Any]
    connection: Any = None

    async def open(self) -> Any:
        return self.wrap(await self.connection.new_stream())

    def wrap(self, stream: Any) -> Any:
        if not self.hot:
            return stream
        way = load_stack().hot(stream)
        assert way is not None, "the connection has no hot path"
        return way

    async def accept(self) -> Any:
        return self.wrap(await self.arrived.receive())


@asynccontextmanager
async def _side(hot: bool, listen: str = "/ip4/127.0.0.1/tcp/0") -> AsyncIterator[Side]:
    from libp2p.crypto.ed25519 import create_new_key_pair
    from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
    from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
    from libp2p.security.noise.transport import Transport as NoiseTransport
    from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX
    from libp2p.stream_muxer.yamux.yamux import Yamux
    from libp2p.transport.upgrader import TransportUpgrader

    stack, seed = load_stack(), os.urandom(32)
    swarm = stack.make_swarm(seed)
    if not hot:
        noise = NoiseTransport(create_new_key_pair(seed), noise_privkey=create_noise_key_pair().private_key)
        swarm.upgrader = TransportUpgrader({NOISE: noise}, {YAMUX: Yamux})
    give, take = trio.open_memory_channel[Any](100)

    async def handler(stream: Any) -> None:
        give.send_nowait(stream)
        await trio.sleep_forever()

    swarm.set_stream_handler(handler)
    async with stack.background_service(swarm):
        await swarm.listen(stack.multiaddr(listen))
        yield Side(swarm, hot, take)


@pytest.mark.parametrize(("listen", "host"), [("/ip4/127.0.0.1/tcp/0", "127.0.0.1"), ("/ip6/::1/tcp/0", "::1")])
async def test_a_host_knows_where_its_connections_are_from(listen, host) -> None:
    """libp2p's own way to the address knows IPv4 alone; all IPv6 peers were one place, which one of them could close."""
    with patience():
        async with _side(True, listen) as side:
            asked, taken = list[str](), side.swarm.visits.may_come
            side.swarm.visits.may_come = lambda host, now: asked.append(host) or taken(host, now)
            port = int(str(next(iter(side.swarm.listeners.values())).get_addrs()[0]).split("/")[4])
            async with await trio.open_tcp_stream(host, port):
                while not asked:
                    await trio.sleep(0.01)
            assert asked == [host]


@asynccontextmanager
async def hot_and_plain(dialler: str = "hot") -> AsyncIterator[tuple[Side, Side, Proxy]]:
    """A connection between the two, dialled by one of them, through a proxy."""
    stack = load_stack()
    with patience():
        async with _side(True) as ours, _side(False) as theirs, trio.open_nursery() as nursery:
            a, b = (ours, theirs) if dialler == "hot" else (theirs, ours)
            listener = next(iter(b.swarm.listeners.values()))
            proxy = Proxy(int(str(listener.get_addrs()[0]).split("/")[4]))
            serve = functools.partial(trio.serve_tcp, proxy.carry, 0, host="127.0.0.1")
            (door,) = await nursery.start(serve)
            port = door.socket.getsockname()[1]
            a.connection = await a.swarm.dial_addr(stack.multiaddr(f"/ip4/127.0.0.1/tcp/{port}"), b.swarm.get_peer_id())
            while not b.swarm.get_connections():
                await trio.sleep(0.01)
            (b.connection,) = b.swarm.get_connections()
            assert type(theirs.connection.muxed_conn).__name__ == "Yamux"
            try:
                yield ours, theirs, proxy
            finally:
                with trio.CancelScope(shield=True), trio.move_on_after(2):
                    for wire in proxy.wires:
                        await wire.aclose()
                nursery.cancel_scope.cancel()


async def test_a_connection_that_hears_nothing_tries_again_each_second() -> None:
    """Its retransmission timeout is bounded where Linux can (6.15): after an outage the network is found up again at once."""
    with socket.socket() as probe:
        try:
            probe.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, RETRY_MS)
        except OSError:
            pytest.skip("this kernel has no TCP_RTO_MAX_MS")
    async with hot_and_plain() as (ours, _, _):
        session = ours.connection.muxed_conn.secured_conn
        # The kernel alone knows the option.
        assert session._socket.getsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS) == RETRY_MS == 1000


async def pair(opener: Side, other: Side) -> tuple[Any, Any]:
    mine = await opener.open()
    await mine.write(b"!")
    theirs = await other.accept()
    assert await read_exactly(theirs, 1) == b"!"
    return mine, theirs


async def read_exactly(stream: Any, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = await stream.read(min(size - len(data), 100_000))
        assert piece, f"the stream ended after {len(data)} of {size} bytes"
        data += piece
    return bytes(data)


async def send_all_sizes(stream: Any, seed: int, rounds: int) -> None:
    rng = random.Random(seed)
    for _ in range(rounds):
        for size in rng.sample(SIZES, len(SIZES)):
            await stream.write(rng.randbytes(size))


async def expect_all_sizes(stream: Any, seed: int, rounds: int) -> None:
    rng = random.Random(seed)
    for _ in range(rounds):
        for size in rng.sample(SIZES, len(SIZES)):
            assert await read_exactly(stream, size) == rng.randbytes(size), f"a frame of {size} bytes came through changed"


async def fails(call: Callable[[], Awaitable[Any]]) -> None:
    """`call` ends with an exception of the library's or an empty read."""
    with patience():
        try:
            while await call():
                pass
        except trio.Cancelled:
            raise
        except Exception:  # the library has a dozen unrelated classes for this
            return


async def test_a_stream_is_taken_as_its_connection_ends() -> None:
    """Its window is given in a task of the connection, which takes none any more: a peer that left at such a moment was "Nursery
    is closed to new arrivals" in whoever took its stream."""
    async with hot_and_plain() as (ours, _, proxy):
        stream = await ours.connection.new_stream()
        muxer = ours.connection.muxed_conn
        for wire in proxy.wires:
            await wire.aclose()
        while muxer._nursery.child_tasks:  # nothing else tells that the connection's tasks have ended
            await trio.sleep(0.01)
        await trio.testing.wait_all_tasks_blocked()
        assert load_stack().hot(stream) is not None
        await muxer._write_frame(PING_ANSWER)  # as its reader would


@pytest.mark.parametrize("dialler", ["hot", "plain"])
async def test_frames_of_all_sizes_on_several_streams_and_both_ways_at_once(dialler) -> None:
    async with hot_and_plain(dialler) as (ours, theirs, _):
        pairs = [await pair(ours, theirs), (await pair(theirs, ours))[::-1], await pair(ours, theirs)]
        async with trio.open_nursery() as nursery:
            for number, (mine, there) in enumerate(pairs):  # more than the first windows of 256 KiB, each way
                nursery.start_soon(send_all_sizes, mine, 2 * number, 2)
                nursery.start_soon(expect_all_sizes, there, 2 * number, 2)
                nursery.start_soon(send_all_sizes, there, 2 * number + 1, 2)
                nursery.start_soon(expect_all_sizes, mine, 2 * number + 1, 2)


async def test_streams_are_opened_and_closed_while_others_are_busy() -> None:
    from libp2p.network.stream.exceptions import StreamEOF

    async with hot_and_plain() as (ours, theirs, _):
        mine, there = await pair(ours, theirs)
        async with trio.open_nursery() as nursery:
            for a, b, seed in ((mine, there, 1), (there, mine, 2)):
                nursery.start_soon(send_all_sizes, a, seed, 3)
                nursery.start_soon(expect_all_sizes, b, seed, 3)
            for number in range(10):
                raw = await ours.connection.new_stream()
                short = ours.wrap(raw)
                await short.write(bytes([number]) * 1000)
                other = await theirs.accept()
                assert await read_exactly(other, 1000) == bytes([number]) * 1000
                await other.write(b"last words" * 500)
                await other.close()
                assert await read_exactly(short, 5000) == b"last words" * 500
                with pytest.raises(StreamEOF):
                    assert await short.read(1000) == b""
                await raw.close()


@pytest.mark.parametrize("who", ["hot", "plain"])
async def test_a_reset_ends_one_stream_and_no_other(who) -> None:
    async with hot_and_plain() as (ours, theirs, _):
        mine, there = await pair(ours, theirs)
        raw = await ours.connection.new_stream()
        doomed = ours.wrap(raw)
        await doomed.write(b"hello")
        other = await theirs.accept()
        assert await read_exactly(other, 5) == b"hello"
        async with trio.open_nursery() as nursery:
            if who == "plain":
                nursery.start_soon(fails, lambda: doomed.read(100))
                await trio.sleep(0.1)  # the reader waits already
                await other.reset()
            else:
                nursery.start_soon(fails, lambda: other.read(100))
                await trio.sleep(0.1)
                await raw.reset()
        await fails(lambda: doomed.read(100))
        await mine.write(b"unharmed")
        assert await read_exactly(there, 8) == b"unharmed"
        await there.write(b"as well")
        assert await read_exactly(mine, 7) == b"as well"


@pytest.mark.parametrize("let", [1, 700, 30_000])
@pytest.mark.parametrize("way", ["back", "there"])
async def test_a_connection_broken_in_the_middle_of_a_record_wakes_everybody(way, let) -> None:
    async with hot_and_plain() as (ours, theirs, proxy):
        mine, there = await pair(ours, theirs)
        quiet = ours.wrap(await ours.connection.new_stream())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fails, lambda: mine.read(100_000))
            nursery.start_soon(fails, lambda: quiet.read(100_000))
            await trio.sleep(0.1)
            proxy.let[way] = let
            sender = mine if way == "there" else there
            with trio.move_on_after(3):
                try:
                    for _ in range(50):
                        await sender.write(bytes(60_000))
                except trio.Cancelled:
                    raise
                except Exception as error:  # what is written after the break fails, in one way or another
                    assert str(error) is not None
        await fails(lambda: mine.read(100_000))


async def test_records_cut_into_packets_of_one_byte() -> None:
    """The library's own session gives up on those; so only what comes to the hot side is cut."""
    async with hot_and_plain() as (ours, theirs, proxy):
        mine, there = await pair(ours, theirs)
        proxy.pieces["back"] = 1
        rng = random.Random(5)
        sizes = [1, 2, 100, 4090, 4097, 9000, 300, 1]
        sent = [rng.randbytes(size) for size in sizes]
        async with trio.open_nursery() as nursery:

            async def send() -> None:
                for data in sent:
                    await there.write(data)

            nursery.start_soon(send)
            for data in sent:
                assert await read_exactly(mine, len(data)) == data
        await mine.write(b"and back")
        assert await read_exactly(there, 8) == b"and back"


@pytest.mark.parametrize("piece", [1447, 4095, 4096, 8191])
async def test_a_long_record_in_packets_and_a_short_one_after_it(piece) -> None:
    """The kernel is told to wait for long records whole; it must not wait for a short one so long."""
    async with hot_and_plain() as (ours, theirs, proxy):
        mine, there = await pair(ours, theirs)
        proxy.pieces["back"] = piece
        for _ in range(20):
            await there.write(bytes(60_000))
            assert await read_exactly(mine, 60_000) == bytes(60_000)
            await there.write(b"x")
            with patience():
                assert await read_exactly(mine, 1) == b"x"


async def test_more_than_a_window_waits_for_a_reader_and_then_all_of_it_comes() -> None:
    """The plain peer reads nothing for a while: the writer waits and nothing is lost."""
    async with hot_and_plain() as (ours, theirs, _):
        mine, there = await pair(ours, theirs)
        total, written = 20, 0

        async def send() -> None:
            nonlocal written
            for number in range(total):
                await mine.write(bytes([number]) * 60_000)
                written += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            await trio.sleep(0.5)
            assert written < total, "the peer's window is 256 KiB"
            for number in range(total):
                assert await read_exactly(there, 60_000) == bytes([number]) * 60_000
        assert written == total


async def test_a_cancelled_reader_loses_nothing() -> None:
    async with hot_and_plain() as (ours, theirs, _):
        mine, there = await pair(ours, theirs)
        for number in range(20):
            with trio.move_on_after(0.005 * (number % 3)):
                await mine.read(100)
                pytest.fail("nothing was sent")
            await there.write(b"%06d" % number)
            assert await read_exactly(mine, 6) == b"%06d" % number


async def test_a_stream_that_is_reset_here_wakes_its_reader() -> None:
    async with hot_and_plain() as (ours, theirs, _):
        raw = await ours.connection.new_stream()
        mine = ours.wrap(raw)
        await mine.write(b"hello")
        await theirs.accept()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fails, lambda: mine.read(100))
            await trio.sleep(0.05)
            await raw.reset()  # what the library does to every stream of a connection that has ended


async def test_a_reader_that_the_library_has_forgotten_is_woken_when_the_connection_is_broken() -> None:
    async with hot_and_plain() as (ours, theirs, _):
        mine, _there = await pair(ours, theirs)
        muxer = ours.connection.muxed_conn
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fails, lambda: mine.read(100))
            await trio.sleep(0.05)
            assert len(muxer.parked) == 1
            muxer.stream_events[mine._yamux.stream_id] = trio.Event()  # the one that it waits on is in no table any more
            await muxer.break_now()
        assert not muxer.parked
        muxer.stream_buffers[mine._yamux.stream_id] = bytearray()  # whatever is left in the tables
        muxer.streams[mine._yamux.stream_id] = mine._yamux  # the library's tables, put as an old fault left them
        mine._yamux.recv_closed = mine._yamux.reset_received = mine._yamux.closed = False  # the same
        await fails(lambda: mine.read(100))


@pytest.mark.parametrize("packets", [0, 700])
async def test_what_is_written_without_waiting_comes_in_order_among_what_waits(packets: int) -> None:
    """The socket takes a part: the rest leaves before anything else, and who tries meanwhile is told that somebody is writing."""
    async with hot_and_plain() as (ours, theirs, proxy):
        proxy.pieces["there"] = packets
        mine, there = await pair(ours, theirs)
        other, other_there = await pair(ours, theirs)
        session = ours.connection.muxed_conn.secured_conn
        session._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 * KIB)  # less than a frame
        refused, sent = 0, 0
        for number in range(40):
            stream = mine if number % 3 else other
            data = bytes([number]) * (4_000 + 200 * number)
            if stream.try_write(data):
                sent += 1
            else:
                refused += 1
                await stream.write(data)
            if number % 10 == 9:  # what was written is read: windows of 256 KiB hold about 50 of them
                for before in range(number - 9, number + 1):
                    size = 4_000 + 200 * before
                    assert await read_exactly(there if before % 3 else other_there, size) == bytes([before]) * size
        assert refused and sent


async def test_data_goes_to_whoever_takes_it_after_what_was_there_before() -> None:
    """The reader hears of the end only; with nobody to take it any more, it ends at once."""
    from libp2p.network.stream.exceptions import StreamEOF

    async with hot_and_plain() as (ours, theirs, _):
        mine, there = await pair(ours, theirs)
        await there.write(b"before")
        with patience():
            while not mine._muxer.stream_buffers[mine._yamux.stream_id]:  # nothing else tells that it is there
                await trio.sleep(0.01)
        got = bytearray()
        mine.on_data(got.extend)
        assert await mine.read(100) == b"before"
        for number in range(20):  # several windows
            await there.write(bytes([number]) * 60_000)
        with patience():
            while len(got) < 20 * 60_000:
                await trio.sleep(0.01)
        assert got == b"".join(bytes([number]) * 60_000 for number in range(20))
        await there.close()
        with patience(), pytest.raises(StreamEOF):
            assert await mine.read(100) == b""

        deaf, loud = await pair(ours, theirs)
        deaf.on_data(got.extend)
        async with trio.open_nursery() as nursery:
            with patience():
                nursery.start_soon(deaf.read, 100)
                await trio.testing.wait_all_tasks_blocked(0.05)
                deaf.on_data(None)
                assert await deaf.read(100) == b""
        await loud.write(b"nobody reads this")


async def test_nothing_is_written_without_waiting_on_a_connection_that_is_over() -> None:
    async with hot_and_plain() as (ours, theirs, _):
        mine, _there = await pair(ours, theirs)
        await ours.connection.muxed_conn.break_now()
        assert not mine.try_write(b"too late")
