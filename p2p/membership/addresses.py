"""Which of the addresses that a peer announces the head tells others, and whom. Pure.

A peer says what it likes, and whoever is told dials it: so an address inside a network is told only to those in that network, and
only when the peer itself was seen there; a public one only of the host that the head sees the peer at, for any other may be
somebody else's. Must not know rosters or channels.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from p2p.ip import plain_ip

MAX_TOLD = 4
"""Addresses of a peer that another one is told at the most. A machine has one or two of each kind; more only make others dial."""

MAX_OTHER_FAMILY = 1
"""Public addresses of a peer that others are told, of the family (IPv4, IPv6) that the head does not see it by. Nobody checks
them: each identity can make others dial so many hosts that are not its own."""

Scope = Literal["public", "inside", "local", "never"]
"""Who can dial an address: everybody, those in the same network, those on the same machine or link, nobody."""

_FORM = re.compile(r"/(ip4|ip6)/([0-9A-Fa-f.:]{2,45})/tcp/([0-9]{1,5})(?:/p2p/([1-9A-HJ-NP-Za-km-z]{1,64}))?", re.ASCII)
_TWIN = re.compile(r"/(memory)/([0-9A-Za-z]{1,64})", re.ASCII)

_TRANSLATED = tuple(map(ipaddress.ip_network, ("2002::/16", "2001::/32", "64:ff9b::/96", "64:ff9b:1::/48", "::/96")))
"""Networks of IPv6 whose addresses hold one of IPv4: they would lead around every rule for that."""

_NOBODY = ipaddress.ip_network("0.0.0.0/8")

HERE, PRIVATE, LINK = "here", "private", "link"
"""Zones from which the head sees peers: its own machine, a private network, its own link. Any other zone is a host's address."""

TWIN = "/memory"
"""Zone of an in-memory network, as tests have it: its addresses are told to those who are in it, too."""


def scope_of(host: str) -> Scope:
    """Who can dial this host, an IP address as text. Private, shared (100.64/10), test and unique local networks are "inside"."""
    try:
        ip = plain_ip(host)
    except ValueError:
        return "never"
    if ip.is_loopback or ip.is_link_local:
        return "local"
    if ip.is_unspecified or ip.is_multicast or ip.is_reserved or getattr(ip, "is_site_local", False):
        return "never"
    if any(ip in net for net in ((_NOBODY,) if ip.version == 4 else _TRANSLATED)):
        return "never"
    return "public" if ip.is_global else "inside"


@dataclass(frozen=True, slots=True)
class Reach:
    """Where a peer was seen, and what it may be told to be dialled by: most likely first, at most MAX_TOLD of each."""

    zone: str = ""
    """"" where the transport cannot say"""
    far: tuple[str, ...] = ()
    """by anybody"""
    inside: tuple[str, ...] = ()
    """by who is in the same network"""
    local: tuple[str, ...] = ()
    """by who was seen at the very same place"""

    def told_to(self, other: Reach) -> tuple[str, ...]:
        """The addresses of this peer that `other` is told."""
        if self.zone in ("", TWIN) or not other.zone:
            return self.far
        if self.zone == other.zone:
            return self.local if self.zone in (HERE, LINK) else self.inside
        return self.inside if {self.zone, other.zone} <= {HERE, PRIVATE, LINK} else self.far


def reach_of(peer: str, announced: Sequence[str], seen: str, own: Collection[str] = ()) -> Reach:
    """What becomes of the addresses that `peer` announces. `seen`: its end of the connection; `own`: this host's addresses. What
    is no plain address of a host, or of another peer, is left out. Public addresses are believed of the host where the peer is
    seen, of this host for a neighbour (one router may be in front of both), and MAX_OTHER_FAMILY of the other family."""
    ours = {_host(address) for address in own}
    host, zone = _host(seen), _zone(seen, ours)
    believed, unseen = ({host, *ours} if zone in (HERE, LINK, PRIVATE) else {host}), 0
    found: list[tuple[bool, Scope, str]] = []
    for text in dict.fromkeys(announced):
        if zone == TWIN and _TWIN.fullmatch(text):
            found.append((False, "public", text))
            continue
        parts = _FORM.fullmatch(text)
        if parts is None or parts[4] not in (None, peer) or not 0 < int(parts[3]) < 65_536:
            continue
        scope, there = scope_of(parts[2]), _host(text)
        if scope == "never" or (parts[1] == "ip6") != (":" in parts[2]):
            continue
        if scope == "public" and there not in believed:
            if not host or (":" in there) == (":" in host) or unseen == MAX_OTHER_FAMILY:
                continue
            unseen += 1
        found.append((there != host, scope, text))
    found.sort(key=lambda one: one[0])  # where it was seen, it is likeliest to answer

    def told(*scopes: Scope) -> tuple[str, ...]:
        return tuple(text for _, scope, text in found if scope in scopes)[:MAX_TOLD]

    return Reach(zone, told("public"), told("public", "inside"), told("public", "inside", "local"))


def _zone(seen: str, own: Collection[str]) -> str:
    """Where the head saw a peer."""
    if _TWIN.fullmatch(seen):
        return TWIN
    host = _host(seen)
    if not host:
        return ""
    scope = scope_of(host)
    if host in own or (scope == "local" and plain_ip(host).is_loopback):
        return HERE
    return {"local": LINK, "inside": PRIVATE}.get(scope, host)


def _host(address: str) -> str:
    """The host of an address, in its canonical form; "" when it has none."""
    parts = address.split("/")
    try:
        return str(plain_ip(parts[2])) if len(parts) >= 3 and parts[1] in ("ip4", "ip6") else ""
    except ValueError:
        return ""
