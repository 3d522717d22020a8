"""The pump alone, over channels that carry so many bytes a second: whom it serves and what it takes for its uplink's rate."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import trio

from p2p.broadcast.draws import PeerDraws
from p2p.broadcast.exchange import Exchange
from p2p.broadcast.gossip import Gossip
from p2p.broadcast.policies.registry import DEFAULT
from p2p.broadcast.pump import Pump
from p2p.broadcast.session import Session
from p2p.broadcast.transfer import Neighbour, Traffic, Transfer
from p2p.broadcast.uplink import Uplink
from p2p.channel.port import PathState
from p2p.limits import KIB
from p2p.version import Version
from tests.support.harness import changed_state, make_state, open_swarm

CHUNK = 32 * KIB


class Pipe:
    """A bulk channel that holds two chunks and delivers `rate` bytes/s; what came is acknowledged by `on_chunk`."""

    def __init__(self, rate: float, on_chunk: Any) -> None:
        self.rate, self.on_chunk = rate, on_chunk
        self.delivered = self.sent = 0
        self._give, self._take = trio.open_memory_channel[bytes](2)

    async def send(self, message: bytes) -> None:
        await self._give.send(message)
        self.sent += len(message)

    def try_send(self, message: bytes, *, more: bool = False) -> bool:
        try:
            self._give.send_nowait(message)
        except trio.WouldBlock:
            return False
        self.sent += len(message)
        return True

    async def run(self) -> None:
        async for message in self._take:
            await trio.sleep(len(message) / self.rate)
            self.delivered += len(message)
            self.on_chunk()

    def smooth(self, rate: float) -> None:
        """Its queue is short as it is."""

    def path(self) -> PathState:
        return PathState(self.delivered, 1 if self.sent > self.delivered else 0, 0.02, 0.02)


def transfer_of(session: Session, sizes: int) -> Any:
    manifest = SimpleNamespace(
        version=Version(1, 1), mid=b"m" * 32, header=SimpleNamespace(chunk_bytes=CHUNK),
        chunk_digest=lambda chunk: chunk.to_bytes(32, "big"), segment_of=lambda chunk: None, chunk_size=lambda chunk: CHUNK,
        size=400 * CHUNK,
    )  # fmt: skip
    return SimpleNamespace(manifest=manifest, session=session, traffic=Traffic(), size=sizes, draws=PeerDraws(), news=Gossip())


async def drive(
    rates: dict[str, float], chunks: int, seconds: float, policy: str = DEFAULT
) -> tuple[Pump, dict[str, Pipe]]:
    """A source with `chunks` chunks and these receivers, who acknowledge what comes, for so long."""
    session = Session(me="source", source=None, now=trio.current_time(), policy=policy)
    transfer = transfer_of(session, CHUNK)
    store: Any = SimpleNamespace(get=lambda digest: bytes(CHUNK))
    pump = Pump({b"m": transfer}, store, trio.current_time, lambda transfer, chunk: None)
    pipes: dict[str, Pipe] = {}
    sent: dict[str, list[int]] = {name: [] for name in rates}
    original = session.next

    def following(ready: Any, now: float) -> Any:
        found = original(ready, now)
        if found is not None:
            sent[found[0]].append(found[1])
        return found

    session.next = following  # type: ignore[method-assign]
    async with trio.open_nursery() as nursery:
        for name, rate in rates.items():
            pipes[name] = Pipe(rate, lambda n=name: session.peer_has(n, [sent[n].pop(0)], trio.current_time()))
            session.join(name, (), trio.current_time())
            nursery.start_soon(pipes[name].run)
            nursery.start_soon(pump.serve, Neighbour(name, lambda message: None, pipes[name], 0.0))  # type: ignore[arg-type]
        for chunk in range(chunks):
            session.hold(chunk, None, duty=False, now=trio.current_time())
        nursery.start_soon(pump.run)
        for _ in range(int(seconds / 0.05)):
            await trio.sleep(0.05)
            pump.measure()
            session.tick(trio.current_time())
            session.relieved()
            pump.wake()
        nursery.cancel_scope.cancel()
    return pump, pipes


async def test_a_receiver_whose_channel_is_full_holds_up_nobody(autojump_clock) -> None:
    _, pipes = await drive({"fast": 4e6, "stuck": 1.0, "other": 4e6}, 200, 15)
    for name in ("fast", "other"):
        assert pipes[name].delivered >= 200 * CHUNK
    assert pipes["stuck"].delivered == 0


async def test_a_slow_receiver_left_alone_is_not_taken_for_the_uplink(autojump_clock) -> None:
    """The fast one has everything after some seconds; for the slow one there is work for minutes."""
    pump, pipes = await drive({"fast": 4e6, "slow": 5e4}, 400, 60, "star")
    assert 60 * 5e4 * 0.9 < pipes["slow"].delivered
    assert pipes["fast"].delivered >= 400 * CHUNK > 4 * pipes["slow"].delivered
    assert pump.uplink.rate >= 1e6, f"{pump.uplink.rate:.0f} bytes/s"


async def test_what_is_charged_to_the_uplink_is_what_leaves(tmp_path, autojump_clock, monkeypatch) -> None:
    """A segment's last chunk is short, and a sparse delta's segments are little else."""
    charged = 0
    spent = Uplink.spent

    def spy(self: Uplink, now: float, nbytes: int) -> None:
        nonlocal charged
        charged += nbytes
        spent(self, now, nbytes)

    async with open_swarm(tmp_path) as swarm:
        head = await swarm.start_head()
        (node,) = await swarm.start_nodes(1)
        state = make_state(1)
        head.publish(1, state)
        await head.until_installed([node.peer], Version(1, 1))
        await trio.sleep(1)
        monkeypatch.setattr(Uplink, "spent", spy)
        sent = 0
        for step in range(2, 6):
            old, state = state, changed_state(state, step, 0.01)
            delta = head.publish(step, state, base=step - 1, old=old)
            await head.until_installed([node.peer], Version(1, step))
            sent += head.sent(delta)
        assert sent > 0 and charged <= 1.2 * sent, f"{charged} bytes charged for {sent}"


@pytest.mark.parametrize("share", [0.6])
async def test_charging_too_much_is_what_a_pace_cannot_bear(share) -> None:
    """Why: with chunks charged at 1/share of their size, what is delivered is always less than the pace."""
    from tests.unit.test_uplink import MBIT, Link, Run

    class Overcharged(Uplink):
        def spent(self, now: float, nbytes: int) -> None:
            super().spent(now, int(nbytes / share))

    run = Run(Overcharged(), Link(20 * MBIT), 16 * KIB)
    run.go(90.0)
    assert run.carried(60.0) < 0.5 * 20 * MBIT


async def test_who_gives_up_waiting_for_a_segment_is_asked_no_more(autojump_clock) -> None:
    """An installer's watch cancels and asks again; what it waited for may never come."""
    transfer = Transfer(SimpleNamespace(whole=False), None, Traffic(), wanted=True)  # type: ignore[arg-type]
    exchange: Any = SimpleNamespace(transfers={b"m": transfer}, _transfer=lambda mid: transfer)
    for _ in range(3):
        with trio.move_on_after(1):
            await Exchange._once(exchange, b"m", lambda of: of.manifest.whole)  # what `sealed` and `segment` wait by
    assert transfer.waiting == []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Exchange._once, exchange, b"m", lambda of: of.manifest.whole)  # the same
        await trio.sleep(1)
        transfer.wake()
        assert len(transfer.waiting) == 1
        transfer.manifest.whole = True  # type: ignore[misc]
        transfer.wake()
    assert transfer.waiting == []
