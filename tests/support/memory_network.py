"""A simulated network of byte pipes in one process: the twin of the libp2p adapter. Must not know messages.

Time is trio's clock, so under a mock clock hours pass in moments. Every pair has a latency and a rate each way. All channels of
a node share its uplink and downlink rates: first come, first served, one piece at a time, so that concurrent channels share
them evenly.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager

import trio

from p2p.allowance.meter import HostMeter
from p2p.channel.port import BULK, CONTROL, Channel, Network
from p2p.channel.stream import StreamChannel
from p2p.channel.table import ChannelTable
from p2p.channel.transport import ByteTransport
from p2p.errors import Unreachable
from p2p.limits import HANDSHAKE_S

Tamper = Callable[[str, str, bytes], bytes | None]


class MemorySwitch:
    """All links of a simulated network. Every pair of hosts has the same latency (seconds one way) and rate (bytes/s each
    way)."""

    tamper: Tamper | None = None
    """Called as (src, dst, bytes) for every piece written; returns what arrives instead, None for nothing."""

    def __init__(self, latency: float = 0.0, rate: float = math.inf) -> None:
        self.latency, self._rate = latency, rate
        self._up: dict[str, float] = {}
        self._down: dict[str, float] = {}
        self._free: dict[tuple[str, str], float] = {}  # when a shared resource has sent what it was given
        self._stalled: set[tuple[str, str]] = set()
        self._groups: dict[str, int] = {}
        self._changed = trio.Event()
        self._hosts: dict[str, MemoryNetwork] = {}
        self._pipes: dict[tuple[str, str], set[_Pipe]] = {}
        self.bytes_moved: dict[tuple[str, str], int] = {}
        """bytes written per (src, dst), framing included"""
        self.seen_at: dict[str, str] = {}
        """hosts that others see at an address of IP, as across the internet"""

    # --- shaping and faults

    def set_node(self, peer: str, *, uplink: float = math.inf, downlink: float = math.inf) -> None:
        self._up[peer], self._down[peer] = uplink, downlink

    def cut(self, a: str, b: str) -> None:
        """Reset every connection between the two now. They can connect again."""
        for pair in ((a, b), (b, a)):
            for pipe in list(self._pipes.get(pair, ())):
                pipe.reset("connection reset")

    def kill(self, peer: str) -> None:
        """Reset every connection of `peer`, as when its process dies."""
        for pair in list(self._pipes):
            if peer in pair:
                self.cut(*pair)

    def stall(self, src: str, dst: str) -> None:
        """From now on nothing that `src` sends reaches `dst`; nothing is lost and nothing is reset. `resume` undoes it."""
        self._stalled.add((src, dst))

    def resume(self, src: str, dst: str) -> None:
        self._stalled.discard((src, dst))
        self._notify()

    def partition(self, *groups: Collection[str]) -> None:
        """From now on peers of different groups hear nothing of each other; peers in no group form one more. `heal` undoes it."""
        self._groups = {peer: number for number, group in enumerate(groups) for peer in group}

    def heal(self) -> None:
        self._groups.clear()
        self._notify()

    def is_stalled(self, src: str, dst: str) -> bool:
        return (src, dst) in self._stalled or self._groups.get(src) != self._groups.get(dst)

    # --- hosts

    @asynccontextmanager
    async def network(
        self, peer_id: str, *, reachable: bool = True, meter: HostMeter | None = None
    ) -> AsyncIterator[MemoryNetwork]:
        """One host of the switch. `reachable=False` puts it behind a NAT: others open channels to it only while it holds one to
        them. `meter`: what it may send and read. ValueError when the switch has a host of that id."""
        if peer_id in self._hosts:
            raise ValueError(f"{peer_id} is already on this switch")
        async with trio.open_nursery() as nursery:
            host = MemoryNetwork(self, peer_id, reachable, nursery, meter=meter)
            self._hosts[peer_id] = host
            try:
                yield host
            finally:
                del self._hosts[peer_id]
                host.table.close_arrivals()
                with trio.CancelScope(shield=True):
                    await host.table.close_all("shutting down")
                self.kill(peer_id)
                nursery.cancel_scope.cancel()

    # --- for the pipes

    def send_at(self, src: str, dst: str, size: int) -> float:
        """Occupy the links with `size` bytes from now on; returns the time at which the last byte has left."""
        time = trio.current_time()
        up, down = self._up.get(src, math.inf), self._down.get(dst, math.inf)
        for name, limit in ((src, ">"), up), ((src, dst), self._rate), ((">", dst), down):
            if limit < math.inf:
                time = self._free[name] = max(time, self._free.get(name, 0.0)) + size / limit
        self.bytes_moved[src, dst] = self.bytes_moved.get((src, dst), 0) + size
        return time

    async def wait_flowing(self, src: str, dst: str) -> None:
        while self.is_stalled(src, dst):
            await self._changed.wait()

    def host(self, peer: str) -> MemoryNetwork | None:
        return self._hosts.get(peer)

    def register(self, pipe: _Pipe) -> None:
        self._pipes.setdefault((pipe.src, pipe.dst), set()).add(pipe)

    def forget(self, pipe: _Pipe) -> None:
        self._pipes.get((pipe.src, pipe.dst), set()).discard(pipe)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
        for pipes in self._pipes.values():
            for pipe in pipes:
                pipe.notify()


class _Pipe:
    """One direction: bytes in order, each at its time of arrival."""

    def __init__(self, switch: MemorySwitch, src: str, dst: str) -> None:
        self.src, self.dst = src, dst
        self._switch = switch
        # b"" is the end of the stream, None a reset
        self._flight: deque[tuple[float, bytes | None]] = deque()
        self._broken: str | None = None
        self._changed = trio.Event()
        switch.register(self)

    @property
    def source(self) -> str:
        """Where its reader sees its writer."""
        return self._switch.seen_at.get(self.src, f"/memory/{self.src}")

    def reset(self, reason: str) -> None:
        if self._broken is None:
            self._broken = reason
            self._switch.forget(self)
            self.notify()

    def put(self, time: float, data: bytes | None) -> None:
        if self._flight:
            time = max(time, self._flight[-1][0])
        self._flight.append((time, data))
        self.notify()

    def put_now(self, data: bytes | None) -> None:
        self.put(trio.current_time() + self._switch.latency, data)

    async def write(self, data: bytes, end: _End) -> None:
        await self._until(end, lambda: not self._switch.is_stalled(self.src, self.dst))
        if (tamper := self._switch.tamper) is not None:
            data = tamper(self.src, self.dst, data) or b""
        if data:
            left = self._switch.send_at(self.src, self.dst, len(data))
            self.put(left + self._switch.latency, data)
            await self._until(end, lambda: trio.current_time() >= left, left)

    async def arrived(self, end: _End) -> None:
        """Until there is something to read."""
        while not self._flight or trio.current_time() < self._flight[0][0] or self._switch.is_stalled(self.src, self.dst):
            await self._until(end, lambda: bool(self._flight) and not self._switch.is_stalled(self.src, self.dst))
            due = self._flight[0][0]
            await self._until(end, lambda due=due: trio.current_time() >= due, due)  # type: ignore[misc]

    async def read(self, max_bytes: int, end: _End) -> bytes:
        while True:
            await self._until(end, lambda: bool(self._flight) and not self._switch.is_stalled(self.src, self.dst))
            due = self._flight[0][0]
            if trio.current_time() >= due:
                break
            await self._until(end, lambda due=due: trio.current_time() >= due, due)  # type: ignore[misc]
        time, data = self._flight.popleft()
        if data is None:
            end.broken = "connection reset by the peer"
            raise trio.BrokenResourceError(end.broken)
        if len(data) > max_bytes:
            self._flight.appendleft((time, data[max_bytes:]))
        if not data:
            self._flight.append((time, data))  # stays ended
            self._switch.forget(self)
        return data[:max_bytes]

    def notify(self) -> None:
        """Let both ends look again."""
        self._changed.set()
        self._changed = trio.Event()

    async def _until(self, end: _End, ready: Callable[[], bool], deadline: float = math.inf) -> None:
        """Wait until `ready`, looking again at `deadline` and at every change. BrokenResourceError when reset."""
        await trio.lowlevel.checkpoint()
        while True:
            if (broken := self._broken or end.broken) is not None:
                raise trio.BrokenResourceError(broken)
            if ready():
                return
            with trio.move_on_at(deadline):
                await self._changed.wait()


class _End(ByteTransport):
    """One host's end of a pair of pipes."""

    def __init__(self, out: _Pipe, into: _Pipe, meter: HostMeter) -> None:
        self._out, self._into, self._meter = out, into, meter
        self._closed = False
        self.broken: str | None = None

    async def write(self, data: bytes) -> None:
        if self._closed:
            raise trio.ClosedResourceError("closed here")
        await self._out.write(data, self)

    async def read(self, max_bytes: int) -> bytes:
        if not self._meter.down.rate:
            return await self._into.read(max_bytes, self)
        await self._into.arrived(self)
        allowed = await self._meter.may_read(max_bytes)
        data = await self._into.read(allowed, self)
        self._meter.read(allowed, len(data))
        return data

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self._out.put_now(b"")
        await trio.lowlevel.checkpoint()

    def remote(self) -> str:
        return self._into.source

    def local(self) -> str:
        return f"/memory/{self._into.dst}"

    async def abort(self) -> None:
        if self.broken is None:
            self._closed, self.broken = True, "connection reset"
            self._out.put_now(None)  # the peer hears of it like of anything else: later, or not at all
            self._into.notify()
        await trio.lowlevel.checkpoint()


class MemoryNetwork(Network):
    """The in-memory adapter of `Network`: one host on the switch. Made by `MemorySwitch.network`."""

    def __init__(
        self, switch: MemorySwitch, peer_id: str, reachable: bool, nursery: trio.Nursery, *, meter: HostMeter | None = None
    ) -> None:
        self.meter = meter or HostMeter()
        self.peer_id, self.reachable = peer_id, reachable
        self.table = ChannelTable()
        self._switch, self._nursery = switch, nursery

    @property
    def addresses(self) -> Sequence[str]:
        return [f"/memory/{self.peer_id}"] if self.reachable else []

    @property
    def incoming(self) -> trio.MemoryReceiveChannel[Channel]:
        return self.table.incoming

    async def open(self, peer: str, addresses: Sequence[str], kind: str) -> Channel:
        """See `Network.open`. ValueError for an unknown kind."""
        if kind not in (CONTROL, BULK):
            raise ValueError(f"no such kind of channel: {kind!r}")
        with trio.move_on_after(HANDSHAKE_S):
            return await self._open(peer, addresses, kind)
        raise Unreachable(peer, f"no answer in {HANDSHAKE_S:.0f} s")

    async def _open(self, peer: str, addresses: Sequence[str], kind: str) -> StreamChannel:
        trips = 1
        if not self.table.of(peer):
            trips = 2  # a connection first
            target = self._switch.host(peer)
            if f"/memory/{peer}" not in addresses or target is None or not target.reachable:
                raise Unreachable(peer, f"none of {len(addresses)} addresses works")
        for _ in range(trips):
            for src, dst in ((self.peer_id, peer), (peer, self.peer_id)):
                await self._switch.wait_flowing(src, dst)
                await trio.sleep(self._switch.latency)
        target = self._switch.host(peer)
        if target is None or not (target.table.has_room(self.peer_id) and self.table.has_room(peer)):
            raise Unreachable(peer, f"{'it is gone' if target is None else 'too many'}")
        there, back = _Pipe(self._switch, self.peer_id, peer), _Pipe(self._switch, peer, self.peer_id)
        channel = self._add(_End(there, back, self.meter), peer, kind)
        target.table.announce(target._add(_End(back, there, target.meter), self.peer_id, kind))  # the same class
        return channel

    def _add(self, end: _End, peer: str, kind: str) -> StreamChannel:
        channel = StreamChannel(end, peer, kind, self._nursery, self.table.discard, meter=self.meter)
        self.table.add(channel)
        return channel

    async def drop(self, peer: str, reason: str) -> None:
        await self.table.close_all(reason, peer)
        self._switch.cut(self.peer_id, peer)
