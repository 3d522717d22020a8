"""A port of the home's router that leads to this host, kept while the host is up: asked for by PCP or NAT-PMP (`router`), else by
UPnP (Internet Gateway Device).

miniupnpc does UPnP's talking: it looks for a router for a second and asks it. All of it blocks, in a thread. Must not know
libp2p.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Protocol

import trio

from p2p.channel.opening import endpoint_of
from p2p.channel.pcp import RouterPort, RouterRefused
from p2p.channel.router import map_port, own_router, unmap_port

log = logging.getLogger("shoal.channel")

LEASE_S = 1800
"""Seconds that a mapping lasts unless it is renewed: so long a router keeps it after this host has lost its power."""

RENEW_S = 600.0
"""Seconds from one renewal to the next, and from one failed attempt to the next: a router that starts anew has forgotten it."""

LEAST_RENEW_S = 30.0
"""Seconds between two questions, however short the router's leases are."""

DISCOVER_MS = 1000
"""Milliseconds that routers have to answer the search for them."""


@dataclass(frozen=True, slots=True)
class PortMapping:
    """A mapped port."""

    address: str
    """"/ip4/ADDRESS/tcp/PORT" of the router, outside"""
    port: int
    """outside"""
    by: RouterPort | None = None
    """what PCP or NAT-PMP gave; None: UPnP"""


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
            found = await trio.to_thread.run_sync(_map, ends[0].port, host.mapping)
            if isinstance(found, PortMapping) and (host.mapping is None or host.mapping.address != found.address):
                log.info("the router leads %s here", found.address)
            elif isinstance(found, str):
                log.info("no port of the router leads here: %s", found)
            host.mapping = found if isinstance(found, PortMapping) else None
            await trio.sleep(renew_after(host.mapping))
    finally:
        if (mapping := host.mapping) is not None:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(_unmap, ends[0].port, mapping)


def renew_after(mapping: PortMapping | None) -> float:
    """Seconds until the router is asked again: before half of a lease that it made shorter than it was asked for."""
    lease_s = mapping.by.lease_s if mapping is not None and mapping.by is not None else LEASE_S
    return min(RENEW_S, max(lease_s / 2, LEAST_RENEW_S))


def _gateway() -> Any:
    import miniupnpc

    upnp = miniupnpc.UPnP()
    upnp.discoverdelay = DISCOVER_MS
    if not upnp.discover():
        raise OSError("no router answers to UPnP")
    upnp.selectigd()
    return upnp


def _map(port: int, before: PortMapping | None) -> PortMapping | str:
    """Ask for the same port outside, or another one; `before` is renewed. The mapping, or why there is none."""
    router, why = own_router(), "no router is known"
    if router is not None:
        try:
            found = map_port(router, port, LEASE_S, before.by.nonce if before is not None and before.by is not None else b"")
            return PortMapping(f"/ip4/{found.address}/tcp/{found.port}", found.port, by=found)
        except (OSError, RouterRefused) as error:
            why = str(error) or type(error).__name__
    mapping = _map_upnp(port)
    return mapping if isinstance(mapping, PortMapping) else f"{why}; {mapping}"


def _map_upnp(port: int) -> PortMapping | str:
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


def _unmap(port: int, mapping: PortMapping) -> None:
    try:
        if mapping.by is None:
            _gateway().deleteportmapping(mapping.port, "TCP")
        elif (router := own_router()) is not None:
            unmap_port(router, port, mapping.by)
    except Exception as error:
        log.debug("the router keeps port %d until its lease ends: %s", mapping.port, error)
