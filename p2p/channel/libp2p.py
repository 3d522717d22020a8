"""The libp2p adapter: TCP, Noise, yamux and nothing else. Must not know what the messages mean.

libp2p runs with its own peer store, identify, resource manager and auto-connector out of the way: a bare Swarm with our two
protocols on it. Here are the host and its connections: who is dialled and how, what streams become channels, what is idle.
`_stack` says where py-libp2p 0.8.1 would hurt a long-lived node, and what we do instead.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio

from p2p.allowance.meter import HostMeter
from p2p.channel.listening import allow_many_files, check_free, short_address, spell_out
from p2p.channel.mapping import PortMapping, keep_mapped
from p2p.channel.metered import MeteredConnections
from p2p.channel.opening import TcpEnd, endpoint_of, is_own_fault, open_towards, source_for
from p2p.channel.port import BULK, CONTROL, Channel, Network
from p2p.channel.stream import StreamChannel
from p2p.channel.table import MAX_CHANNELS_PER_PEER, ChannelTable
from p2p.channel.yamux import YamuxTransport, break_connection, cause_of, load_stack, quietly
from p2p.errors import ChannelClosed, Unreachable, UsageError
from p2p.identity import Identity, public_key_of
from p2p.limits import HANDSHAKE_S, MAX_CONNECTIONS

log = logging.getLogger("shoal.channel")

PROTOCOLS = {CONTROL: "/shoal/1/control", BULK: "/shoal/1/bulk"}

DIALLED = ("ip4", "ip6", "dns", "dns4", "dns6")
"""Kinds of address, of a machine, that can be dialled."""

STAGGER_S = 1.0
"""Seconds after which the next address is dialled too, while the one before goes on trying (as RFC 8305 does)."""

LOOK_S = 0.05
"""Seconds between two looks whether a peer that is to be met has come in by the listening socket."""

REUSE_S = 5.0
"""Seconds that a live connection has to open a stream; then it counts as broken and the peer is dialled anew."""


@asynccontextmanager
async def open_libp2p_network(
    identity: Identity, listen: Sequence[str], *, announce: Sequence[str] | None = None, congestion: str = "",
    meter: HostMeter | None = None, map_port: bool = False,
) -> AsyncIterator[Network]:
    """A host that listens on the multiaddrs `listen` (port 0 takes a free one; none at all is allowed).

    `congestion`: TCP congestion control of every connection (the system's own unless said): OSError where the kernel
    does not have it. `meter`: what the host may send and read, and what went over its wires.
    `announce` replaces what `addresses` says, for a host whose public address is not on its interfaces.
    `map_port`: ask the router to lead a port of its own here, while this host is up.
    UsageError with one line when an address is malformed or its port is in use.
    """
    check_free(listen)
    allow_many_files()
    stack = load_stack()
    async with trio.open_nursery() as nursery:
        meter = meter or HostMeter()
        swarm = stack.make_swarm(identity.seed, congestion, meter)
        host = Libp2pNetwork(identity.peer_id, swarm, nursery, announce, meter)
        swarm.set_stream_handler(host.on_stream)
        nursery.start_soon(host.break_idle_connections)
        nursery.start_soon(MeteredConnections(swarm, meter).run)
        async with stack.background_service(swarm):
            try:
                if listen:
                    await swarm.listen(*(stack.multiaddr(text) for text in listen))
                for text in listen:
                    if str(stack.multiaddr(text)) not in swarm.listeners:
                        raise UsageError(f"cannot listen on {text}")
                if map_port:
                    nursery.start_soon(keep_mapped, host)
                yield host
            finally:
                with trio.CancelScope(shield=True):
                    await host.table.close_all("shutting down")
                    for connection in swarm.get_connections():
                        await break_connection(connection)
        nursery.cancel_scope.cancel()


def check_dialable(addresses: Sequence[str]) -> None:
    """UsageError for the first of these addresses, which a ticket is to name, that nobody can dial because of its form."""
    for text in addresses:
        want = "want /ip4/ADDRESS/tcp/PORT, /ip6/ADDRESS/tcp/PORT or /dns/NAME/tcp/PORT"
        try:
            address = load_stack().multiaddr(text)
            names = [protocol.name for protocol in address.protocols()]
            port = int(address.value_for_protocol("tcp") or 0)
        except Exception:  # multiaddr's, of many kinds
            raise UsageError(f"swarm.announce: {text!r:.100} is no address: {want}") from None
        if names[0] not in DIALLED or names[1:] not in (["tcp"], ["tcp", "p2p"]) or not port:
            raise UsageError(f"swarm.announce: {text!r:.100} cannot be dialled: {want}")


class Libp2pNetwork(Network):
    """The libp2p adapter of `Network`. Made by `open_libp2p_network`."""

    def __init__(
        self, peer_id: str, swarm: Any, nursery: trio.Nursery, announce: Sequence[str] | None, meter: HostMeter
    ) -> None:
        self.peer_id, self.meter = peer_id, meter
        self.table = ChannelTable()
        self._swarm, self._nursery, self._announce = swarm, nursery, announce
        self._dialling: dict[str, trio.Lock] = {}
        self._carriers: dict[Channel, Any] = {}
        """channel -> the connection that carries it"""
        self._worked: dict[str, str] = {}
        """peer -> the address that worked last"""
        self.mapping: PortMapping | None = None
        """a port of the router that leads here"""

    @property
    def addresses(self) -> Sequence[str]:
        """Announced ones, else those listened on, wildcards spelled out as the interfaces' (loopback last)."""
        if self._announce is not None:
            found = [text.split("/p2p/")[0] for text in self._announce]
        else:
            bound = (str(address) for listener in self._swarm.listeners.values() for address in listener.get_addrs())
            found = [*([self.mapped] if self.mapped else []), *(address for text in bound for address in spell_out(text))]
        return [f"{text}/p2p/{self.peer_id}" for text in dict.fromkeys(found)]

    @property
    def incoming(self) -> trio.MemoryReceiveChannel[Channel]:
        return self.table.incoming

    async def open(self, peer: str, addresses: Sequence[str], kind: str) -> Channel:
        """See `Network.open`. KeyError for an unknown kind, ValueError when `peer` is no peer id."""
        if kind not in PROTOCOLS:
            raise KeyError(kind)
        public_key_of(peer)
        # Our caller may be cancelled at any time; what writes to the connection may not. So it runs as our own task.
        give, take = trio.open_memory_channel[StreamChannel | ChannelClosed](1)
        self._nursery.start_soon(self._open_task, peer, list(addresses), kind, give)
        async with take:
            result = await take.receive()
        if isinstance(result, ChannelClosed):
            raise result
        return result

    @property
    def listening(self) -> Sequence[str]:
        return [str(address) for listener in self._swarm.listeners.values() for address in listener.get_addrs()]

    @property
    def mapped(self) -> str:
        return self.mapping.address if self.mapping is not None else ""

    @property
    def turned_away(self) -> int:
        return int(self._swarm.visits.turned_away)

    async def meet(self, peer: str, addresses: Sequence[str], *, first: bool, seconds: float) -> None:
        """See `Network.meet`."""
        ends = [end for end in map(endpoint_of, addresses) if end is not None]
        listening = [end for end in map(endpoint_of, self.listening) if end is not None]
        pairs = [(end, source) for end in ends if (source := source_for(end.host, listening)) is not None]
        if not pairs:
            raise Unreachable(peer, f"none of {len(addresses)} addresses can be met from what is listened on here")
        whom = load_stack().peer_id(peer)
        before = {id(connection) for connection in self._connections(peer)}
        if first:
            self._swarm.expected.update(dict.fromkeys(ends, whom))
        why, openings = "no answer", list[trio.CancelScope]()
        try:
            with trio.move_on_after(seconds):
                async with trio.open_nursery() as nursery:

                    async def attempt(end: TcpEnd, source: TcpEnd, opening: trio.CancelScope) -> None:
                        nonlocal why
                        stream = None
                        try:
                            with opening:
                                stream = await open_towards(end, source)
                            if stream is not None:
                                await load_stack().take_in(self._swarm, stream, whom, first=first)
                        except Exception as error:  # the socket's, libp2p's: this pair of ends does not work
                            why = cause_of(error)

                    for end, source in pairs:
                        opening = trio.CancelScope()
                        openings.append(opening)
                        nursery.start_soon(attempt, end, source, opening)
                    # The connection may also come in by the listening socket.
                    while all(id(c) in before for c in self._connections(peer)):  # noqa: ASYNC110 - it has no event
                        await trio.sleep(LOOK_S)
                    for opening in openings:  # a handshake that is under way ends by itself
                        opening.cancel()
                return
        finally:
            for end in ends if first else ():
                self._swarm.expected.pop(end, None)
        shown = ", ".join(short_address(address) for address in addresses)
        raise Unreachable(peer, f"{shown}: not met in {seconds:.0f} s ({why})")

    def admitted(self, channel: Channel) -> None:
        carrier = self._carriers.get(channel)
        if carrier is not None:
            self._swarm.admitted(carrier.muxed_conn)

    async def drop(self, peer: str, reason: str) -> None:
        await self.table.close_all(reason, peer)
        for connection in self._connections(peer):
            await break_connection(connection)

    async def on_stream(self, stream: Any) -> None:
        """One stream that a peer opened; returns when its channel has ended."""
        peer = str(stream.muxed_conn.peer_id)
        if len(stream.swarm_conn.streams) > 2 * MAX_CHANNELS_PER_PEER:  # streams that never say what they are
            await break_connection(stream.swarm_conn)
            return
        kind = await self._within(HANDSHAKE_S, stream.swarm_conn, lambda: self._negotiate_in(stream))
        if kind is None or not self.table.has_room(peer):
            await quietly(stream.reset)
            return
        channel = self._add(stream, peer, kind)
        self.table.announce(channel)
        await channel.wait_done()

    # --- opening

    async def _open_task(self, peer: str, addresses: list[str], kind: str, give: trio.MemorySendChannel[Any]) -> None:
        try:
            result: StreamChannel | ChannelClosed = await self._open(peer, addresses, kind)
        except ChannelClosed as error:
            result = error
        async with give:
            try:
                give.send_nowait(result)
            except trio.BrokenResourceError:  # the caller has gone
                if isinstance(result, StreamChannel):
                    await result.aclose("not wanted any more")

    async def _open(self, peer: str, addresses: list[str], kind: str) -> StreamChannel:
        deadline = trio.current_time() + HANDSHAKE_S
        if not self.table.has_room(peer):
            raise Unreachable(peer, "too many are open")
        async with self._one_at_a_time(peer):  # two opens at once share one connection
            for connection in reversed(self._connections(peer)):  # the newest is the likeliest alive
                channel = await self._open_over(connection, peer, kind, REUSE_S)
                if channel is not None:
                    return channel
            connection = await self._dial_any(peer, addresses, deadline)
            channel = await self._open_over(connection, peer, kind, max(deadline - trio.current_time(), 1.0))
            if channel is not None:
                return channel
            why = f"{self._worked.pop(peer, '')}: connected, but the peer does not speak {PROTOCOLS[kind]}"
        raise Unreachable(peer, why)

    async def _open_over(self, connection: Any, peer: str, kind: str, seconds: float) -> StreamChannel | None:
        """A channel over this connection; None when it is not to be had in so many seconds."""
        stream = await self._within(seconds, connection, lambda: self._negotiate(connection, PROTOCOLS[kind]))
        return None if stream is None else self._add(stream, peer, kind)

    async def _dial_any(self, peer: str, addresses: list[str], deadline: float) -> Any:
        """A connection by the first address that answers, the one that worked last being asked first. Each has until
        the deadline; the next is started when the one before failed or took STAGGER_S, so none can hide another."""
        known = self._worked.get(peer)
        order = sorted(dict.fromkeys(addresses), key=lambda address: address != known)
        reasons: list[str] = []
        winner: Any = None
        async with trio.open_nursery() as nursery:

            async def attempt(address: str, failed: trio.Event) -> None:
                nonlocal winner
                try:
                    connection = await self._dial(peer, address, max(deadline - trio.current_time(), 0.0))
                except ChannelClosed as error:
                    reasons.append(str(error))
                    failed.set()
                    return
                if winner is None:
                    winner = connection
                    self._remember(peer, address)
                    nursery.cancel_scope.cancel()
                else:  # it came through before it could be cancelled
                    await break_connection(connection)

            for address in order:
                failed = trio.Event()
                nursery.start_soon(attempt, address, failed)
                with trio.move_on_after(STAGGER_S):
                    await failed.wait()
        if winner is None:
            why = "; ".join(reasons) or "no connection and no address"
            raise Unreachable(peer, why)
        return winner

    def _remember(self, peer: str, address: str) -> None:
        self._worked.pop(peer, None)
        self._worked[peer] = address
        if len(self._worked) > MAX_CONNECTIONS:
            del self._worked[next(iter(self._worked))]

    @asynccontextmanager
    async def _one_at_a_time(self, peer: str) -> AsyncIterator[None]:
        lock = self._dialling.setdefault(peer, trio.Lock())
        try:
            async with lock:
                yield
        finally:
            if not lock.locked():
                self._dialling.pop(peer, None)

    async def _dial(self, peer: str, address: str, seconds: float) -> Any:
        """A new connection. Its handshake may be cancelled: the connection is not anyone's yet and dies of it."""
        stack = load_stack()
        try:
            with trio.fail_after(seconds):
                target, whom, source = stack.multiaddr(address), stack.peer_id(peer), self._source(address)
                if source is not None:
                    try:
                        return await self._swarm.dial_addr(target, whom, source)
                    except Exception as error:
                        if not is_own_fault(error):
                            raise
                return await self._swarm.dial_addr(target, whom)
        except trio.TooSlowError:
            raise ChannelClosed(f"{short_address(address)}: no answer in {seconds:.0f} s") from None
        except Exception as error:  # whatever libp2p, multiaddr or the socket raise, the address does not work
            raise ChannelClosed(f"{short_address(address)}: {cause_of(error)}") from error

    def _source(self, address: str) -> TcpEnd | None:
        """The port listened on, for a connection to `address` to leave from: so a NAT maps that port, and others learn of it."""
        target = endpoint_of(address)
        listening = (endpoint_of(text) for text in self.listening)
        return source_for(target.host, [end for end in listening if end is not None]) if target is not None else None

    async def _negotiate(self, connection: Any, protocol: str) -> Any:
        stream = await connection.new_stream()
        try:
            await load_stack().select(stream, protocol)
        except Exception:
            await quietly(stream.reset)
            raise
        return stream

    async def _negotiate_in(self, stream: Any) -> str | None:
        chosen = await load_stack().accept(stream, list(PROTOCOLS.values()))
        return next((kind for kind, protocol in PROTOCOLS.items() if protocol == chosen), None)

    async def _within(self, seconds: float, connection: Any, call: Callable[[], Awaitable[Any]]) -> Any:
        """What `call` returns; None when it fails, or takes so long that the connection is broken to end it."""
        result = None
        async with trio.open_nursery() as nursery:

            async def attempt() -> None:
                nonlocal result
                with trio.CancelScope(shield=True):
                    try:
                        result = await call()
                    except Exception as error:  # a stream that is not to be had, for whatever reason
                        log.debug("no stream: %s", cause_of(error))
                nursery.cancel_scope.cancel()

            nursery.start_soon(attempt)
            try:
                await trio.sleep(seconds)
            finally:
                if result is None and not nursery.cancel_scope.cancel_called:
                    await break_connection(connection)
        return result

    def _add(self, stream: Any, peer: str, kind: str) -> StreamChannel:
        channel = StreamChannel(YamuxTransport(stream), peer, kind, self._nursery, self._discard, meter=self.meter)
        self.table.add(channel)
        self._carriers[channel] = stream.swarm_conn
        return channel

    def _discard(self, channel: StreamChannel) -> None:
        self.table.discard(channel)
        self._carriers.pop(channel, None)

    async def break_idle_connections(self) -> None:
        """For ever: a connection that carries no channel for HANDSHAKE_S is broken. Anybody can make one, and each is
        an open file here; our own that has served its time is dialled again when it is wanted."""
        idle: dict[Any, float] = {}
        while True:
            await trio.sleep(HANDSHAKE_S / 8)
            now = trio.current_time()
            busy = {id(connection) for connection in self._carriers.values()}
            idle = {c: idle.get(c, now) for c in self._swarm.get_connections() if id(c) not in busy}
            for connection, since in idle.items():
                if now - since >= HANDSHAKE_S:
                    await break_connection(connection)

    def _connections(self, peer: str) -> list[Any]:
        return [c for c in self._swarm.get_connections(load_stack().peer_id(peer)) if not c.is_closed]
