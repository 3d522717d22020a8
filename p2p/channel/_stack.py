"""py-libp2p 0.8.1 as we use it, and what had to be changed. Imported late, by p2p.channel.yamux only.

The changes, each with the line of 0.8.1 that asks for it:
* swarm.py `_handle_inbound_connection` holds a slot until the swarm ends, not until the connection does: a host stops
  accepting after `max_connections` connections in its lifetime.
* varint.py `read_delim`, with which strangers speak first, believes any length up to 2**64 and reads so much.
* yamux.py `handle_incoming` answers pings and stream openings itself; with bulk both ways both readers can wait for a
  write that waits for the other's reader, for ever; see `_muxer`.
* yamux.py `_write_frame` formats a log line per frame whether or not it is wanted.
* io/utils.py `read_exactly` gives up after a hundred reads, and a Noise record may come in more packets than that.
* yamux.py, noise/io.py, io/trio.py: a long way for every frame; see `_hot`.
* swarm_connection.py logs through the root logger, which installs a handler there.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

import trio
from libp2p.abc import IMuxedConn, ISecureConn
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.exceptions import ParseError
from libp2p.io.trio import TrioTCPStream
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.connection import swarm_connection
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.stream.exceptions import StreamEOF as stream_eof
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore
from libp2p.protocol_muxer import multiselect_communicator
from libp2p.protocol_muxer.multiselect import Multiselect
from libp2p.protocol_muxer.multiselect_client import MultiselectClient
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX
from libp2p.tools.anyio_service import background_trio_service as background_service
from libp2p.transport.tcp.tcp import TCP
from libp2p.transport.upgrader import TransportUpgrader
from libp2p.utils.varint import read_varint_prefixed_bytes_limited
from multiaddr import Multiaddr as multiaddr

from p2p.allowance.meter import HostMeter, WireCount
from p2p.channel._hot import HotSession, HotStream
from p2p.channel._muxer import Muxer
from p2p.channel.opening import TcpEnd, end_of
from p2p.channel.port import PathState
from p2p.channel.visits import Visits
from p2p.channel.wire_count import clamp_window, wire_count
from p2p.complaints import complain
from p2p.limits import HANDSHAKE_S, MAX_CONNECTIONS

__all__ = [
    "accept", "background_service", "clamp", "count_of", "hot", "local_of", "make_swarm", "multiaddr", "path_of", "peer_id",
    "remote_of", "select", "smooth", "socket_of", "stream_eof", "take_in",
]  # fmt: skip

if not os.environ.get("LIBP2P_DEBUG"):
    # It reports every peer that goes away as a warning or an error; our channels carry the reason instead.
    logging.getLogger("libp2p").setLevel(logging.ERROR)
    logging.getLogger("libp2p").addHandler(logging.NullHandler())
swarm_connection.logging = logging.getLogger(swarm_connection.__name__)  # type: ignore[attr-defined]

MAX_PROTOCOL_NAME = 1024
"""Bytes of one line of multistream-select, which strangers send first. Names of protocols have fewer than 100."""


async def _read_delim(reader: Any) -> bytes:
    line = await read_varint_prefixed_bytes_limited(reader, MAX_PROTOCOL_NAME)
    if line[-1:] != b"\n":
        raise ParseError(f"what answers there is no peer of ours: {line[:40]!r}")
    return line[:-1]


multiselect_communicator.read_delim = _read_delim  # type: ignore[attr-defined]

def hot(stream: Any) -> HotStream | None:
    """The straight way to a stream, where the connection under it has one."""
    return HotStream(stream) if isinstance(stream.muxed_stream.conn.secured_conn, HotSession) else None


def _socket_of(secure: Any) -> trio.SocketStream | None:
    """The TCP stream under a Noise session; None when the library is built otherwise than we know it."""
    try:
        stream = secure.conn.read_writer.read_write_closer.stream.stream
    except AttributeError:
        return None
    return stream if isinstance(stream, trio.SocketStream) else None


_TELLS = hasattr(socket, "TCP_INFO")
"""Whether this system's kernel says how a connection fares."""

_TCP_INFO = struct.Struct("=16xI4xII36xI28xI16xQ20xI")
"""Of struct tcp_info (linux/tcp.h): snd_mss at 16, unacked at 24, sacked at 28, rtt at 68, total_retrans at 100,
bytes_acked at 120, min_rtt at 148."""


def socket_of(swarm_connection: Any) -> Any:
    """The TCP socket under a libp2p connection, as trio has it; None when the library is built otherwise than we know it."""
    stream = _socket_of(swarm_connection.muxed_conn.secured_conn)
    return None if stream is None else stream.socket


def path_of(tcp: Any) -> PathState | None:
    """See `Channel.path`. None where the kernel does not say it: another system than Linux, or an old one."""
    if not _TELLS:
        return None
    try:
        info = tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        mss, unacked, sacked, rtt, resent, acked, min_rtt = _TCP_INFO.unpack(info)
    except (OSError, struct.error):
        return None
    # What is acknowledged out of order has arrived: counted only when the hole is filled, it would come as a burst.
    return PathState(acked + sacked * mss, unacked, rtt / 1e6, min(rtt, min_rtt) / 1e6, resent * mss)


def remote_of(swarm_connection: Any) -> str:
    """See `Channel.remote`."""
    return _address(swarm_connection, lambda bare: bare.getpeername())


def local_of(swarm_connection: Any) -> str:
    """See `Channel.local`."""
    return _address(swarm_connection, lambda bare: bare.getsockname())


def _address(swarm_connection: Any, end_of: Callable[[Any], Any]) -> str:
    """Of one end of a link's TCP connection, as a multiaddr; "" when it has none or is closed."""
    stream = _socket_of(swarm_connection.muxed_conn.secured_conn)
    try:
        host, port = end_of(stream.socket)[:2] if stream is not None else ("", 0)
    except OSError:  # closed just now
        host = ""
    return f"/ip{6 if ':' in host else 4}/{host}/tcp/{port}" if host else ""


_SO_MAX_PACING_RATE = 47
"""The number of a socket option of Linux: TCP then spreads its packets in time, under any queueing discipline or congestion
control."""


def smooth(tcp: Any, rate: float) -> None:
    """See `Channel.smooth`."""
    if sys.platform == "linux":
        try:
            tcp.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=Q", int(rate)))
        except OSError as error:  # closed just now, or an old kernel
            logging.getLogger("shoal.channel").debug("cannot pace a connection: %s", error)


def count_of(swarm_connection: Any) -> WireCount | None:
    """What the kernel counted of a connection; None where it does not say."""
    stream = _socket_of(swarm_connection.muxed_conn.secured_conn)
    return wire_count(stream.socket) if stream is not None else None  # type: ignore[arg-type]


def clamp(swarm_connection: Any, nbytes: int) -> None:
    """Bound what the peer may have under way to us; 0 for no bound."""
    stream = _socket_of(swarm_connection.muxed_conn.secured_conn)
    if stream is not None:
        clamp_window(stream.socket, nbytes)  # type: ignore[arg-type]


def _remote_of(stream: Any) -> TcpEnd | None:
    """The other end of a TCP stream of libp2p's, whose own way to it knows IPv4 alone; None when it is gone."""
    try:
        return end_of(stream.stream.socket.getpeername())
    except (AttributeError, OSError, ValueError):
        return None


class _Upgrader(TransportUpgrader):
    congestion = ""
    meter: HostMeter | None = None

    async def upgrade_connection(self, conn: ISecureConn, peer_id: ID) -> IMuxedConn:
        # the original ignores the class it was given and makes a plain Yamux
        muxer = await self.muxer_multistream.select_transport(conn)  # type: ignore[arg-type]
        stream = _socket_of(conn)
        if stream is None or muxer is not Muxer:
            return muxer(conn, peer_id)
        session = HotSession(conn, stream, self.congestion, self.meter)
        session.muxer = Muxer(session, peer_id)  # type: ignore[arg-type]
        return session.muxer


class _Swarm(Swarm):
    expected: dict[TcpEnd, ID]
    """Remote ends from which a peer was to be met by a simultaneous open in which we speak first: its packet may find our
    listening socket before ours finds it, and that changes nothing about who speaks first."""
    visits: Visits
    strangers: dict[Any, str]
    """Connections that others made, and over which there was no link yet -> where each is from."""

    def admitted(self, muxed: Any) -> None:
        """Whoever is at the other end of this connection has a link with us."""
        host = self.strangers.pop(muxed, None)
        if host is not None:
            self.visits.admitted(host, trio.current_time())

    async def _handle_inbound_connection(self, read_write_closer: Any, maddr: Any) -> None:
        remote, came = _remote_of(read_write_closer), trio.current_time()
        peer = self.expected.get(remote) if remote is not None else None
        raw = RawConnection(read_write_closer, peer is not None)
        if remote is None:  # gone already
            await raw.close()
            return
        host = remote.host
        if peer is None and not self.visits.may_come(host, came):
            why = "too many from there ended soon, or too many came at once from everywhere"
            complain(logging.getLogger("shoal.channel"), host, f"a connection from {host} is closed at once: {why}")
            await raw.close()
            return
        muxed: Any = None
        try:
            if peer is not None:
                muxed = (await self.upgrade_outbound_raw_conn(raw, peer)).muxed_conn  # type: ignore[attr-defined]
            else:
                muxed = await self.upgrade_inbound_raw_conn(raw, maddr)
        except Exception as error:  # a scanner, another protocol, a peer that went away
            logging.getLogger("shoal.channel").debug("inbound connection refused: %s", error)
            await raw.close()
        else:
            if peer is None:
                self.strangers[muxed] = host
            await muxed.event_closed.wait()
        finally:
            if peer is None and muxed is not None and self.strangers.pop(muxed, None) is None:
                self.visits.left(host, came, trio.current_time())


def make_swarm(seed: bytes, congestion: str = "", meter: HostMeter | None = None) -> Swarm:
    """A swarm with the key of `seed`: TCP, Noise and yamux only, nothing dialled, pruned or limited on its own.
    `congestion`: TCP congestion control of its connections; the system's own unless said. `meter`: what may be read when."""
    key_pair = create_new_key_pair(seed)
    noise = NoiseTransport(key_pair, noise_privkey=create_noise_key_pair().private_key)
    config = ConnectionConfig(
        min_connections=0,
        low_watermark=0,
        high_watermark=MAX_CONNECTIONS,
        max_connections=MAX_CONNECTIONS,
        inbound_upgrade_timeout=HANDSHAKE_S,
        outbound_upgrade_timeout=HANDSHAKE_S,
    )
    upgrader = _Upgrader({NOISE: noise}, {YAMUX: Muxer})  # type: ignore[dict-item]
    upgrader.congestion, upgrader.meter = congestion, meter
    swarm = _Swarm(
        ID.from_pubkey(key_pair.public_key),
        PeerStore(),
        upgrader,
        transports=[TCP()],
        retry_config=RetryConfig(max_retries=0),
        connection_config=config,
    )
    swarm.expected, swarm.visits, swarm.strangers = {}, Visits(), {}
    return swarm


async def take_in(swarm: Any, stream: trio.SocketStream, peer: ID, *, first: bool) -> None:
    """Make a connection of `swarm` out of a TCP stream that both ends opened. `first`: this end begins the handshake, as one that
    dialled does; exactly one of the two must. Whatever libp2p raises when it fails; the stream is then closed."""
    raw = RawConnection(TrioTCPStream(stream), first)
    try:
        with trio.fail_after(HANDSHAKE_S):
            if first:
                await swarm.upgrade_outbound_raw_conn(raw, peer)
            else:
                found: Any = await swarm.upgrade_inbound_raw_conn(raw, multiaddr("/ip4/0.0.0.0/tcp/0"))
                if found.peer_id != peer:
                    raise ParseError(f"another peer answers: {found.peer_id}")
    except BaseException:
        stream.socket.close()
        raise


def peer_id(text: str) -> ID:
    return ID.from_string(text)


async def select(stream: Any, protocol: str) -> None:
    """Agree on `protocol` for a stream we opened. Ends only by answer or by the connection's end: the caller's
    deadline breaks the connection, since the library's own would cancel a write."""
    await MultiselectClient().select_one_of([protocol], MultiselectCommunicator(stream), 3600)  # type: ignore[list-item]


async def accept(stream: Any, protocols: Sequence[str]) -> str | None:
    """Agree on one of `protocols` for a stream that the peer opened. As `select`."""
    handlers: Any = dict.fromkeys(protocols)
    chosen, _ = await Multiselect(handlers).negotiate(MultiselectCommunicator(stream), 3600)
    return chosen
