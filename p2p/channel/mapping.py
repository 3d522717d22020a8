"""A port of the home's router that leads to this host, asked for by UPnP (Internet Gateway Device) and kept while the host is up.

miniupnpc does the talking, in a thread: it looks for a router for a second and asks it. Most home routers speak UPnP; those that
speak only PCP or NAT-PMP are left to hole punching. Must not know libp2p.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Protocol

import trio

from p2p.channel.opening import endpoint_of

log = logging.getLogger("shoal.channel")

LEASE_S = 1800
"""Seconds that a mapping lasts unless it is renewed: so long a router keeps it after this host has lost its power."""

RENEW_S = 600.0
"""Seconds from one renewal to the next, and from one failed attempt to the next: a router that starts anew has forgotten it."""

DISCOVER_MS = 1000
"""Milliseconds that routers have to answer the search for them."""


@dataclass(frozen=True, slots=True)
class PortMapping:
    """A mapped port."""

    address: str
    """"/ip4/ADDRESS/tcp/PORT" of the router, outside"""
    port: int
    """outside"""


class Mapped(Protocol):
    """Who wants a port mapped."""

    mapping: PortMapping | None

    @property
    def listening(self) -> Any:
        """Its listening addresses, "/ip4/ADDRESS/tcp/PORT"."""


async def keep_mapped(host: Mapped) -> None:
    """Have a port mapped to what `host` listens on, for ever, and say it in `host.mapping`; take it back at the end."""
    ends = [end for end in map(endpoint_of, host.listening) if end is not None and ":" not in end.host]
    if not ends or ends[0].host.startswith("127."):
        return
    try:
        while True:
            found = await trio.to_thread.run_sync(_map, ends[0].port)
            if isinstance(found, PortMapping) and host.mapping != found:
                log.info("the router leads %s here", found.address)
            elif isinstance(found, str):
                log.info("no port of the router leads here: %s", found)
            host.mapping = found if isinstance(found, PortMapping) else None
            await trio.sleep(RENEW_S)
    finally:
        if (mapping := host.mapping) is not None:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(_unmap, mapping.port)


def _gateway() -> Any:
    import miniupnpc

    upnp = miniupnpc.UPnP()
    upnp.discoverdelay = DISCOVER_MS
    if not upnp.discover():
        raise OSError("no router answers to UPnP")
    upnp.selectigd()
    return upnp


def _map(port: int) -> PortMapping | str:
    """Ask for the same port outside, or one of the next ones. The mapping, or why there is none."""
    try:
        upnp = _gateway()
        outside = str(upnp.externalipaddress())
        for candidate in range(port, min(port + 4, 65_536)):
            taken = upnp.getspecificportmapping(candidate, "TCP")
            if taken and taken[0] != upnp.lanaddr:
                continue
            what = candidate, "TCP", upnp.lanaddr, port, "shoal", "", LEASE_S  # the C function takes no keywords
            if upnp.addportmapping(*what):
                return PortMapping(f"/ip4/{outside}/tcp/{candidate}", candidate)
        return "its ports are taken"
    except Exception as error:  # miniupnpc raises bare Exceptions with the router's words
        return str(error) or type(error).__name__


def _unmap(port: int) -> None:
    try:
        _gateway().deleteportmapping(port, "TCP")
    except Exception as error:
        log.debug("the router keeps port %d until its lease ends: %s", port, error)
