"""The in-memory adapter: the conformance suite, and what only a simulated network can show."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import trio

from p2p.channel.port import BULK, CONTROL
from p2p.channel.stream import PIECE
from p2p.errors import ChannelClosed
from p2p.limits import CREDIT_PROGRESS_S, HANDSHAKE_S, KEEPALIVE_S, KIB, MAX_FRAME, MIB, SILENCE_S, WRITE_PROGRESS_S
from tests.support.channel_suite import ChannelSuite, connect
from tests.support.memory_network import MemorySwitch


@pytest.fixture
def clock(autojump_clock):
    return autojump_clock


class TestMemoryChannel(ChannelSuite):
    @asynccontextmanager
    async def pair(self):
        switch = MemorySwitch(latency=0.01, rate=100 * MIB)
        async with switch.network("alice") as a, switch.network("bob") as b:
            yield a, b


@asynccontextmanager
async def pair_on(switch: MemorySwitch, **bob):
    async with switch.network("alice") as a, switch.network("bob", **bob) as b:
        yield a, b


async def test_latency_and_rate_are_what_was_asked(autojump_clock) -> None:
    switch = MemorySwitch(latency=0.1, rate=1 * MIB)
    async with pair_on(switch) as (a, b):
        mine, theirs = await connect(a, b)
        start = trio.current_time()
        await mine.send(b"x")
        await theirs.receive()
        assert trio.current_time() - start == pytest.approx(0.1, abs=0.001)
        start = trio.current_time()
        for _ in range(16):
            await mine.send(bytes(256 * KIB))
            await theirs.receive()
        # 4 MiB at 1 MiB/s, and a latency per message since each waits for the one before
        assert trio.current_time() - start == pytest.approx(4.0 + 16 * 0.1, rel=0.01)


async def test_an_uplink_is_shared_evenly(autojump_clock) -> None:
    switch = MemorySwitch(latency=0.02)
    switch.set_node("alice", uplink=2 * MIB)
    async with switch.network("alice") as a, switch.network("bob") as b, switch.network("carol") as c:
        done: dict[str, float] = {}

        async def push(host) -> None:
            mine, theirs = await connect(a, host)
            async with trio.open_nursery() as nursery:

                async def send() -> None:
                    for _ in range(16):
                        await mine.send(bytes(256 * KIB))

                nursery.start_soon(send)
                for _ in range(16):
                    await theirs.receive()
            done[host.peer_id] = trio.current_time()

        start = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(push, b)
            nursery.start_soon(push, c)
        assert max(done.values()) - start == pytest.approx(4.0, rel=0.05)  # 8 MiB at 2 MiB/s
        assert abs(done["bob"] - done["carol"]) < 3 * PIECE / (2 * MIB)


async def test_an_idle_channel_lives_on_keepalives(autojump_clock) -> None:
    switch = MemorySwitch(latency=0.05)
    async with pair_on(switch) as (a, b):
        mine, theirs = await connect(a, b)
        await trio.sleep(3600)
        await mine.send(b"still here")
        assert await theirs.receive() == b"still here"
        assert 3600 / KEEPALIVE_S * 0.9 < switch.bytes_moved["bob", "alice"] / 5 < 3600 / KEEPALIVE_S * 1.1


async def test_silence_closes_both_sides_and_the_connection(autojump_clock) -> None:
    switch = MemorySwitch(latency=0.05)
    async with pair_on(switch) as (a, b):
        mine, theirs = await connect(a, b)
        await mine.send(b"last words")
        await trio.sleep(1)
        switch.partition({"alice"}, {"bob"})
        start = trio.current_time()
        assert await theirs.receive() == b"last words"
        with pytest.raises(ChannelClosed, match=r"nothing heard|no byte"):
            await theirs.receive()
        with pytest.raises(ChannelClosed):
            await mine.receive()
        assert SILENCE_S - KEEPALIVE_S - 1 <= trio.current_time() - start <= SILENCE_S + 5
        with pytest.raises(ChannelClosed, match="no answer"):
            await a.open("bob", b.addresses, BULK)
        switch.heal()
        mine, theirs = await connect(a, b)
        await theirs.send(b"hello again")
        assert await mine.receive() == b"hello again"


async def test_a_write_without_progress_breaks_the_connection(autojump_clock) -> None:
    switch = MemorySwitch(latency=0.01)
    async with pair_on(switch) as (a, b):
        mine, _theirs = await connect(a, b)
        switch.stall("alice", "bob")
        start = trio.current_time()
        await mine.send(b"stuck")
        with pytest.raises(ChannelClosed, match="no byte could be written"):
            await mine.receive()
        assert WRITE_PROGRESS_S <= trio.current_time() - start <= WRITE_PROGRESS_S + 5


async def test_a_peer_that_stops_reading_is_closed_and_a_slow_one_is_not(autojump_clock) -> None:
    switch = MemorySwitch(latency=0.01)
    async with pair_on(switch) as (a, b):
        mine, theirs = await connect(a, b)

        async def send(count: int) -> None:
            for _ in range(count):
                await mine.send(bytes(MIB))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send, 10)
            for _ in range(10):
                await trio.sleep(CREDIT_PROGRESS_S * 0.9)
                await theirs.receive()
        await trio.sleep(10 * CREDIT_PROGRESS_S)  # nothing to send: no hurry
        start = trio.current_time()
        with pytest.raises(ChannelClosed, match="nothing was read there"):
            await send(10)
        assert CREDIT_PROGRESS_S <= trio.current_time() - start <= CREDIT_PROGRESS_S + 5
        with pytest.raises(ChannelClosed, match="nothing was read there"):
            while True:
                await theirs.receive()


async def test_a_slow_line_is_not_a_peer_that_stopped_reading(autojump_clock) -> None:
    switch = MemorySwitch(latency=0.01, rate=6 * KIB)  # a chunk takes 43 s, a full window eleven minutes
    async with pair_on(switch) as (a, b):
        mine, theirs = await connect(a, b)
        async with trio.open_nursery() as nursery:

            async def send() -> None:
                for _ in range(24):
                    await mine.send(bytes(256 * KIB))

            nursery.start_soon(send)
            for _ in range(24):
                await theirs.receive()


async def test_a_short_stall_is_survived_whole(autojump_clock) -> None:
    switch = MemorySwitch(latency=0.01)
    async with pair_on(switch) as (a, b):
        mine, theirs = await connect(a, b)
        switch.stall("alice", "bob")
        await mine.send(b"late")
        with trio.move_on_after(10):
            pytest.fail(f"it came all the same: {await theirs.receive()!r}")
        switch.resume("alice", "bob")
        assert await theirs.receive() == b"late"


async def test_cut_closes_at_once_and_they_can_reconnect(autojump_clock) -> None:
    switch = MemorySwitch()
    async with pair_on(switch) as (a, b):
        mine, theirs = await connect(a, b)
        switch.cut("alice", "bob")
        for channel in (mine, theirs):
            with trio.fail_after(0.1), pytest.raises(ChannelClosed, match="connection reset"):
                await channel.receive()
        await connect(a, b)


async def test_behind_nat_is_reached_over_the_connection_it_opened(autojump_clock) -> None:
    switch = MemorySwitch()
    async with pair_on(switch, reachable=False) as (a, b):
        assert b.addresses == []
        with pytest.raises(ChannelClosed, match="none of"):
            await a.open("bob", ["/memory/bob"], BULK)
        held, _ = await connect(b, a, CONTROL)
        mine = await a.open("bob", [], BULK)
        theirs = await b.incoming.receive()
        await mine.send(b"through")
        assert await theirs.receive() == b"through"
        await held.aclose()


async def test_tampered_framing_is_refused_after_what_came_before(autojump_clock) -> None:
    switch = MemorySwitch()
    async with pair_on(switch) as (a, b):
        mine, theirs = await connect(a, b)
        await mine.send(b"good")
        await trio.sleep(1)
        switch.tamper = lambda src, dst, data: b"\xff" * len(data) if src == "alice" else data
        await mine.send(b"bad")
        assert await theirs.receive() == b"good"
        with pytest.raises(ChannelClosed, match=f"4294967295 bytes is over the limit of {MAX_FRAME}"):
            await theirs.receive()
        with pytest.raises(ChannelClosed, match="refused"):
            await mine.receive()


async def test_leaving_the_network_tells_the_peers_and_ends(autojump_clock) -> None:
    switch = MemorySwitch(latency=0.01)
    async with switch.network("bob") as b:
        async with switch.network("alice") as a:
            mine, theirs = await connect(a, b)
        with pytest.raises(ChannelClosed, match="shutting down"):
            await theirs.receive()
        with pytest.raises(ChannelClosed):
            await mine.send(b"too late")
        with trio.fail_after(HANDSHAKE_S + 1), pytest.raises(ChannelClosed):
            await b.open("alice", ["/memory/alice"], BULK)


async def test_a_peer_cannot_open_channels_without_end(autojump_clock) -> None:
    switch = MemorySwitch()
    async with pair_on(switch) as (a, b):
        with pytest.raises(ChannelClosed, match="too many"):
            for _ in range(100):
                await connect(a, b)
