"""What every Channel adapter must do. An adapter's test module subclasses ChannelSuite and provides `pair`,
and a fixture `clock` (a mock clock, or None for real time)."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

import pytest
import trio

from p2p.channel.link import cost_of
from p2p.channel.port import BULK, CONTROL, Channel, Network
from p2p.errors import ChannelClosed
from p2p.limits import CHANNEL_WINDOW, KEEPALIVE_S, KIB, MAX_FRAME
from tests.support.watchdog import patience

Pair = tuple[Network, Network]


async def connect(a: Network, b: Network, kind: str = BULK) -> tuple[Channel, Channel]:
    mine = await a.open(b.peer_id, b.addresses, kind)
    theirs = await b.incoming.receive()
    return mine, theirs


async def until_settled(read, seconds: float = 0.5):
    """The value of `read()` once it has not changed for `seconds`."""
    while True:
        before = read()
        await trio.sleep(seconds)
        if read() == before:
            return before


class ChannelSuite:
    def pair(self) -> AbstractAsyncContextManager[Pair]:
        """Two hosts, of which the second can be dialled."""
        raise NotImplementedError

    async def test_peer_and_kind_are_proven_on_both_sides(self, clock) -> None:
        async with self.pair() as (a, b):
            for kind in (CONTROL, BULK):
                mine, theirs = await connect(a, b, kind)
                assert (mine.peer, theirs.peer) == (b.peer_id, a.peer_id)
                assert (mine.kind, theirs.kind) == (kind, kind)

    async def test_another_peer_at_the_address_is_not_accepted(self, clock) -> None:
        from p2p.identity import Identity

        async with self.pair() as (a, b):
            with patience(), pytest.raises(ChannelClosed):
                await a.open(Identity.generate().peer_id, b.addresses, CONTROL)

    async def test_order_both_ways_at_once(self, clock) -> None:
        count = 300
        async with self.pair() as (a, b):
            mine, theirs = await connect(a, b)
            got: dict[str, list[bytes]] = {"mine": [], "theirs": []}

            async def send(channel: Channel) -> None:
                for i in range(count):
                    await channel.send(b"%d:" % i + bytes(i * 37))

            async def receive(name: str, channel: Channel) -> None:
                for _ in range(count):
                    got[name].append(await channel.receive())

            with patience():
                async with trio.open_nursery() as nursery:
                    for name, channel in (("mine", mine), ("theirs", theirs)):
                        nursery.start_soon(send, channel)
                        nursery.start_soon(receive, name, channel)
            expected = [b"%d:" % i + bytes(i * 37) for i in range(count)]
            assert got["mine"] == expected
            assert got["theirs"] == expected

    async def test_full_frames_and_empty_ones_and_the_limit(self, clock) -> None:
        async with self.pair() as (a, b):
            mine, theirs = await connect(a, b)
            full = bytes(range(256)) * (MAX_FRAME // 256)
            with patience():
                for message in (full, b"", full[::-1], b"x"):
                    await mine.send(message)
                    assert await theirs.receive() == message
                with pytest.raises(ValueError, match="over the limit"):
                    await mine.send(full + b"x")
                with pytest.raises(ValueError, match="over the limit"):
                    mine.try_send(full + b"x")
                await mine.send(b"still fine")
                assert await theirs.receive() == b"still fine"

    async def test_credits_stall_the_sender_and_give_way_to_receiving(self, clock) -> None:
        size = 100 * KIB
        total = 3 * CHANNEL_WINDOW // size
        async with self.pair() as (a, b):
            mine, theirs = await connect(a, b)

            sent = 0

            async def send_all() -> None:
                nonlocal sent
                for i in range(total):
                    await mine.send(bytes([i % 256]) * size)
                    sent += 1

            with patience():
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(send_all)
                    stalled_at = cost_of(size) * await until_settled(lambda: sent)
                    assert CHANNEL_WINDOW - cost_of(size) < stalled_at <= CHANNEL_WINDOW
                    assert not mine.try_send(bytes(size))
                    for i in range(total):
                        assert await theirs.receive() == bytes([i % 256]) * size
                again = 0
                while again < CHANNEL_WINDOW // cost_of(size):  # the last grants wait for company
                    again += mine.try_send(bytes(size))
                    await trio.sleep(0.01)

    async def test_cancelled_send_queues_all_or_nothing(self, clock) -> None:
        async with self.pair() as (a, b):
            mine, theirs = await connect(a, b)
            accepted = 0
            message = b"m" * (256 * KIB)
            with patience():
                for _ in range(60):
                    with trio.move_on_after(0.02):
                        await mine.send(message)
                        accepted += 1
                assert 0 < accepted < 60
                for _ in range(accepted):
                    assert await theirs.receive() == message
                await mine.send(b"the end")
                assert await theirs.receive() == b"the end"

    async def test_concurrent_senders_interleave_whole_messages(self, clock) -> None:
        async with self.pair() as (a, b):
            mine, theirs = await connect(a, b)

            async def send(tag: int) -> None:
                for i in range(20):
                    await mine.send(bytes([tag, i]) + bytes([tag]) * (90 * KIB))

            seen: dict[int, list[int]] = {tag: [] for tag in range(5)}
            with patience():
                async with trio.open_nursery() as nursery:
                    for tag in seen:
                        nursery.start_soon(send, tag)
                    for _ in range(100):
                        message = await theirs.receive()
                        assert message[2:] == bytes([message[0]]) * (90 * KIB)
                        seen[message[0]].append(message[1])
            assert all(order == list(range(20)) for order in seen.values())

    async def test_close_delivers_what_came_before_then_says_why(self, clock) -> None:
        async with self.pair() as (a, b):
            mine, theirs = await connect(a, b)
            with patience():
                await mine.send(b"one")
                await mine.send(b"two")
                await mine.aclose("enough")
                await mine.aclose("again")
                assert [await theirs.receive(), await theirs.receive()] == [b"one", b"two"]
                for _ in range(2):
                    with pytest.raises(ChannelClosed, match="enough"):
                        await theirs.receive()
                for channel in (mine, theirs):
                    with pytest.raises(ChannelClosed, match="enough"):
                        await channel.send(b"three")
                    with pytest.raises(ChannelClosed, match="enough"):
                        channel.try_send(b"three")

    async def test_close_unblocks_send_and_receive(self, clock) -> None:
        async with self.pair() as (a, b):
            mine, _theirs = await connect(a, b)
            assert mine.try_send(bytes(64 * KIB))
            ended: list[str] = []
            sent = 0

            async def blocked(call, *args) -> None:
                nonlocal sent
                with pytest.raises(ChannelClosed, match="stop"):
                    while True:
                        await call(*args)
                        sent += 1
                ended.append(call.__name__)

            with patience():
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(blocked, mine.send, bytes(MAX_FRAME))
                    nursery.start_soon(blocked, mine.receive)
                    await until_settled(lambda: sent)
                    assert ended == []
                    await mine.aclose("stop")
            assert sorted(ended) == ["receive", "send"]

    async def test_many_channels_of_both_kinds_do_not_mix(self, clock) -> None:
        async with self.pair() as (a, b):
            with patience():
                pairs = [await connect(a, b, CONTROL if i % 2 else BULK) for i in range(10)]
                pairs += [(y, x) for x, y in [await connect(b, a, CONTROL) for _ in range(2)]]
                for i, (mine, theirs) in enumerate(pairs):
                    await mine.send(b"to %d" % i)
                    await theirs.send(b"from %d" % i)
                for i, (mine, theirs) in enumerate(pairs):
                    assert await theirs.receive() == b"to %d" % i
                    assert await mine.receive() == b"from %d" % i

    async def test_drop_closes_every_channel_to_the_peer(self, clock) -> None:
        async with self.pair() as (a, b):
            with patience():
                pairs = [await connect(a, b, kind) for kind in (CONTROL, BULK)]
                await a.drop(b.peer_id, "bad chunk")
                for mine, theirs in pairs:
                    for channel in (mine, theirs):
                        with pytest.raises(ChannelClosed, match="bad chunk"):
                            await channel.receive()
                mine, theirs = await connect(a, b)
                await mine.send(b"a new start")
                assert await theirs.receive() == b"a new start"

    async def test_messages_that_are_offered_come_in_order_and_give_their_credit_back(self, clock) -> None:
        """Those that the offer does not take go to `receive`; none is offered while another waits there."""
        count, size = 300, 64 * KIB  # more than four windows
        async with self.pair() as (a, b):
            mine, theirs = await connect(a, b)
            got: list[int] = []
            refused: list[int] = []

            def take(message: bytes) -> bool:
                number = int.from_bytes(message[:4], "big")
                if number % 50 == 0:
                    refused.append(number)
                    return False
                got.append(number)
                return True

            async def send() -> None:
                for i in range(count):
                    await mine.send(i.to_bytes(4, "big") + bytes(size))
                await mine.send(count.to_bytes(4, "big"))

            theirs.offer(take)
            with patience():
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(send)
                    while (message := await theirs.receive()) != count.to_bytes(4, "big"):
                        got.append(int.from_bytes(message[:4], "big"))
                        await trio.sleep(0.02)
            assert got == list(range(count)) and 0 in refused and set(refused) <= set(range(0, count + 1, 50))

            theirs.offer(None)
            await mine.send(bytes(4))
            with patience():
                assert await theirs.receive() == bytes(4)

    async def test_a_message_that_may_wait_for_the_next_one_leaves_with_it(self, clock) -> None:
        """And by itself when the next one finds no room, since nobody would send it then."""
        async with self.pair() as (a, b):
            mine, theirs = await connect(a, b)
            with patience():
                assert mine.try_send(b"before", more=True) and mine.try_send(b"after")
                assert [await theirs.receive() for _ in range(2)] == [b"before", b"after"]
                await until_settled(lambda: 0, 0.05)  # the writer has nothing to do
                assert all(mine.try_send(bytes(3 * KIB), more=True) for _ in range(2))
                assert not mine.try_send(bytes(MAX_FRAME))
            with trio.fail_after(KEEPALIVE_S / 2):  # a keepalive would take them along
                assert [len(await theirs.receive()) for _ in range(2)] == [3 * KIB, 3 * KIB]
            with patience():
                assert mine.try_send(b"short", more=True) and mine.try_send(bytes(MAX_FRAME))
                assert await theirs.receive() == b"short" and len(await theirs.receive()) == MAX_FRAME
