"""IP addresses as one writes them. Pure."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address

IPAddress = IPv4Address | IPv6Address
"""An address of either family."""


def tcp_multiaddr(address: str, port: int) -> str:
    """"/ip4/ADDRESS/tcp/PORT", or "/ip6/...". ValueError for no address."""
    return f"/ip{ip_address(address).version}/{address}/tcp/{port}"


def plain_ip(host: str) -> IPAddress:
    """An IPv4 address in the clothes of IPv6 as what it is. ValueError for no address."""
    ip = ip_address(host)
    return ip.ipv4_mapped or ip if isinstance(ip, IPv6Address) else ip
