"""TCP connections that leave from the port that this host listens on, and those that two hosts open towards each other at once.

A NAT maps an inside port to an outside one; where it does so whoever is talked to, a connection from the listening port makes the
outside port known on which others can be met. Both sides then connect to each other at about the same time: each one's SYN opens
its own NAT for the other's (RFC 5128, section 3.4; "TCP simultaneous open" in RFC 9293, section 3.5). Must not know libp2p.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

import trio

from p2p.ip import plain_ip

AGAIN_S = 0.2
"""Seconds after an attempt that failed at once to the next one. A router that refuses instead of dropping does so until the other
side's own packet has passed it."""

MAX_ADDRESS = 200
"""Characters of an address that is looked at: the longest one of a host, with a peer id behind it, has 110 or so."""

OWN_FAULT = frozenset({errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EINVAL, errno.ENETUNREACH, errno.EHOSTUNREACH})
"""Errors of a dial that may come from the port that it was to leave from: the same two ends may be connected already, or the
address listened on has no way to that target."""


class TcpEnd(NamedTuple):
    """An IP address and a TCP port."""

    host: str
    port: int


def endpoint_of(address: str) -> TcpEnd | None:
    """The endpoint of "/ip4/ADDRESS/tcp/PORT" or "/ip6/..."; None for any other multiaddr, and for more than MAX_ADDRESS
    characters: strangers say such addresses."""
    parts = address.split("/") if len(address) <= MAX_ADDRESS else ()
    if len(parts) < 5 or parts[0] or parts[1] not in ("ip4", "ip6") or parts[3] != "tcp":
        return None
    try:
        host, port = ipaddress.ip_address(parts[2]), int(parts[4]) if parts[4].isdigit() else -1
    except ValueError:  # "²" is a digit, and no number
        return None
    return TcpEnd(str(host), port) if (host.version == 6) == (parts[1] == "ip6") and 0 <= port < 65_536 else None


def end_of(name: Sequence[Any]) -> TcpEnd:
    """What a socket says of an end (host, port, and of IPv6 more), as `endpoint_of` writes it: no scope, and an IPv4 address as
    itself where a socket of both families says it. ValueError when its host is no address."""
    return TcpEnd(str(plain_ip(str(name[0]).partition("%")[0])), int(name[1]))


def source_for(target: str, listening: Sequence[TcpEnd]) -> TcpEnd | None:
    """Where a connection to the host `target` can leave from, of what is listened on; None when nothing fits. Not from a loopback
    address: it is nobody's NAT, and many programs of one machine share it."""
    for one in listening:
        if (":" in one.host) == (":" in target) and not ipaddress.ip_address(one.host).is_loopback:
            return one
    return None


def is_own_fault(error: BaseException | None) -> bool:
    """Whether a dial failed for the port that it was to leave from, and may work from another one."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in OWN_FAULT:
            return True
        error = error.__cause__ or error.__context__
    return False


async def open_towards(target: TcpEnd, source: TcpEnd) -> trio.SocketStream:
    """A connection from `source`, which may be listened on, to `target`: tried again and again until it is there or the caller
    cancels. OSError when `source` cannot be used at all."""
    family = socket.AF_INET6 if ":" in target.host else socket.AF_INET
    while True:
        sock = trio.socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            await sock.bind(tuple(source))
        except BaseException:
            sock.close()
            raise
        try:
            await sock.connect(tuple(target))
            return trio.SocketStream(sock)
        except OSError:  # refused, or connected already the other way: then the caller hears of that one
            sock.close()
        except BaseException:
            sock.close()
            raise
        await trio.sleep(AGAIN_S)
