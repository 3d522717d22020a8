"""What kind of NAT or firewall a host of a profile is behind. Pure; must not know namespaces or rules of a kernel.

The words are those of RFC 4787: a NAT **maps** an inside address and port to an outside port, and **filters** what comes in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["cone", "symmetric", "cgnat", "cgnat-symmetric", "firewall"]
"""cone: one outside port for each inside one, whoever is talked to (in effect: the port is kept where it is free).
symmetric: another outside port for each connection. cgnat: a cone behind the cone of a carrier. cgnat-symmetric: a cone behind a
symmetric NAT of a carrier. firewall: no NAT, a public address. All of them let in what answers, and nothing else."""

KINDS: tuple[str, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Nat:
    """A host's NAT. Hosts with the same `home` are behind one router, and share its access link."""

    kind: Kind
    home: str
    """the router's name; of a host alone the host's own"""
    forward: tuple[int, ...] = ()
    """TCP ports of the router that lead to this host; of a firewall those that it lets in"""
    hairpin: bool = False
    """whether those of the same home reach a forwarded port by the router's public address, too"""
    upnp: bool = False
    """whether the router maps a port for who asks by UPnP"""
    pcp: bool = False
    """the same by PCP or NAT-PMP"""

    @property
    def carrier(self) -> bool:
        """Whether a carrier's NAT stands between the home and the public internet."""
        return self.kind.startswith("cgnat")

    @property
    def random_ports(self) -> bool:
        """Whether the outermost NAT takes another port for each connection."""
        return self.kind.endswith("symmetric")
