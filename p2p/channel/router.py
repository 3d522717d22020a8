"""Asks the router of the default route for a port, by PCP or NAT-PMP (`pcp`). Thin shell over a datagram socket; blocks, for
ANSWER_S a question at most. Must not know what the messages look like, nor UPnP.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from p2p.channel.pcp import (
    MOST_ANSWER,
    PMP_ADDRESS_REQUEST,
    RouterPort,
    default_router,
    pcp_request,
    pmp_request,
    read_pcp,
    read_pmp,
    read_pmp_address,
)

Read = TypeVar("Read")

ROUTER_PORT = 5351
"""UDP port of a router that speaks either."""

ROUTES = Path("/proc/net/route")
"""Linux's routes; elsewhere the router is not known."""

RESEND_S = (0.25, 0.5, 1.0)
"""Seconds to wait for an answer, from one sending to the next (RFC 6886, section 3.1)."""

ANSWER_S = sum(RESEND_S)
"""Seconds that a question takes at most."""


def own_router() -> str | None:
    """This host's router, as far as it is known."""
    try:
        return default_router(ROUTES.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def map_port(router: str, port: int, lease_s: int, nonce: bytes = b"") -> RouterPort:
    """Have `router` lead a port to this host's `port`, if it may be the same one; `nonce` renews what was given for it.
    OSError where nobody answers, RouterRefused where it maps none. Blocks."""
    nonce = nonce or secrets.token_bytes(12)
    with _socket(router) as sock:
        client = sock.getsockname()[0]
        found = _ask(sock, pcp_request(client, port, port, lease_s, nonce), lambda answer: read_pcp(answer, port, nonce))
        if found is not None:
            return found
        address = _ask(sock, PMP_ADDRESS_REQUEST, read_pmp_address)
        return _ask(sock, pmp_request(port, port, lease_s), lambda answer: read_pmp(answer, port, address))


def unmap_port(router: str, port: int, mapped: RouterPort) -> None:
    """Have it lead there no longer. As `map_port`."""
    with _socket(router) as sock:
        if mapped.nonce:
            request = pcp_request(sock.getsockname()[0], port, mapped.port, 0, mapped.nonce)
            _ask(sock, request, lambda answer: read_pcp(answer, port, mapped.nonce))
        else:
            _ask(sock, pmp_request(port, 0, 0), lambda answer: read_pmp(answer, port, mapped.address))


def _socket(router: str) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.connect((router, ROUTER_PORT))  # what others send does not come in
    return sock


def _ask(sock: socket.socket, request: bytes, read: Callable[[bytes], Read]) -> Read:
    for seconds in RESEND_S:
        sock.send(request)
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            sock.settimeout(left)
            try:
                return read(sock.recv(MOST_ANSWER + 1))
            except TimeoutError:
                break
            except ValueError:
                continue  # of an earlier question, or not of the router
    raise OSError("no router answers to PCP or NAT-PMP")
