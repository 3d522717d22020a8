"""How a link's messages are read: those that come most at once, as they come, and all of them in order."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager

import pytest
import trio

from p2p.channel.port import BULK, CONTROL
from p2p.errors import Refusal
from p2p.membership.links import HEARD, HEARD_S, SHORT, Link, LinkOwner, LinkTasks
from p2p.protocol.versions import Chunk, Follow, Have, Parts
from p2p.protocol.wire import encode
from tests.support.channel_suite import connect
from tests.support.memory_network import MemorySwitch

MID = bytes(32)


class Owner(LinkOwner):
    """Writes down what came, and by which way."""

    def __init__(self, pause_s: float = 0.0, refuses: bool = False) -> None:
        self.pause_s, self.refuses = pause_s, refuses
        self.came: list[object] = []
        self.at_once: list[float] = []
        self.handling = False

    def hear(self, link: Link, message: object) -> bool:
        assert not self.handling, "one message of a channel at a time"
        if self.refuses:
            raise Refusal("not this way")
        self.came.append(message)
        self.at_once.append(trio.current_time())
        return True

    async def on_message(self, link: Link, message: object) -> None:
        self.handling = True
        await trio.sleep(self.pause_s)
        self.handling = False
        self.came.append(message)


@asynccontextmanager
async def linked(owner: Owner):
    """A bulk channel to somebody who reads it as `owner`, and what reads it."""
    switch = MemorySwitch(latency=0.001, rate=1e9)
    async with switch.network("alice") as a, switch.network("bob") as b, trio.open_nursery() as nursery:
        mine, theirs = await connect(a, b, BULK)
        control, other = await connect(a, b, CONTROL)
        tasks = LinkTasks(owner, lambda link, renewal: None)
        await tasks.start(nursery, Link(peer=a.peer_id, name="a", control=other, bulk=theirs))
        yield mine
        await control.aclose("done")


async def until_all(owner: Owner, count: int) -> None:
    with trio.fail_after(60):
        while len(owner.came) < count:
            await trio.sleep(0.01)


@pytest.mark.parametrize("seed", range(5))
async def test_messages_of_all_kinds_come_in_the_order_in_which_they_were_sent(autojump_clock, seed: int) -> None:
    dice = random.Random(seed)
    kinds = [
        lambda i: Chunk(MID, i, 0, bytes(dice.randrange(3000))), lambda i: Have(MID, (i,)),
        lambda i: Have(MID, tuple(range(i, i + 2 * SHORT))), lambda i: Parts(MID, (bytes([i % 256]),)),
        lambda i: Follow(i % 2 == 0),
    ]  # fmt: skip
    messages = [dice.choice(kinds)(i) for i in range(300)]
    owner = Owner(pause_s=0.003)
    async with linked(owner) as channel:
        for message in messages:
            await channel.send(encode(message))
            if dice.random() < 0.2:
                await trio.sleep(dice.random() * 0.1)
        await until_all(owner, len(messages))
    assert owner.came == messages and 0 < len(owner.at_once) < len(messages)


async def test_of_a_flood_so_many_are_handled_at_once_and_the_rest_take_turns(autojump_clock) -> None:
    owner = Owner()
    async with linked(owner) as channel:
        for i in range(20 * HEARD):
            await channel.send(encode(Have(MID, (i,))))
        await until_all(owner, 20 * HEARD)
    assert [message.chunks for message in owner.came] == [(i,) for i in range(20 * HEARD)]  # type: ignore[attr-defined]
    most = max(sum(t <= at <= t + HEARD_S for at in owner.at_once) for t in owner.at_once)
    assert HEARD <= most <= 2 * HEARD


async def test_what_is_not_taken_at_once_comes_to_the_reader(autojump_clock) -> None:
    owner = Owner(refuses=True)
    async with linked(owner) as channel:
        await channel.send(encode(Have(MID, (1,))))
        await channel.send(encode(Chunk(MID, 1, 0, b"x")))
        await until_all(owner, 2)
    assert owner.came == [Have(MID, (1,)), Chunk(MID, 1, 0, b"x")] and not owner.at_once
