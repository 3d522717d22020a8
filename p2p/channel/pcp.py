"""PCP (RFC 6887) and NAT-PMP (RFC 6886), as far as one TCP port over IPv4 takes: what is asked of a router, and what it answers.

No library that is kept up speaks PCP, and the one for NAT-PMP rests on another that is not. Both are a datagram to the router's
port 5351 and one back; a router that speaks NAT-PMP alone answers PCP with its own version. Pure; must not know sockets
or UPnP.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from ipaddress import IPv4Address

MOST_ANSWER = 1100
"""Bytes of an answer (RFC 6887, section 7)."""

_TCP = 6
"""The protocol's number."""
_PCP, _NAT_PMP = 2, 0
"""Versions: the first byte of everything."""
_MAP, _ANSWER = 1, 0x80
"""PCP's code of what maps a port, and what an answer's code has beyond its question's."""
_PMP_ADDRESS, _PMP_MAP_TCP = 0, 2
"""NAT-PMP's codes."""
_OK, _UNKNOWN_VERSION = 0, 1
"""Result codes."""
_WHY = {
    1: "it does not speak this version", 2: "it does not allow it", 3: "it has no network", 4: "it has no room for another port",
    8: "it has no room for another port", 9: "its limit for this host is reached", 11: "that port is taken",
    12: "another NAT lies between",
}  # fmt: skip
"""Result codes of both (RFC 6887, section 7.4; 1 to 4 are also NAT-PMP's), in words."""


class RouterRefused(Exception):
    """The router answered, and maps no port."""


@dataclass(frozen=True, slots=True)
class RouterPort:
    """What a router leads here."""

    address: str
    """IPv4, outside"""
    port: int
    """outside"""
    lease_s: int
    nonce: bytes
    """with which it was asked for by PCP, and is given back; empty: by NAT-PMP"""


def default_router(routes: str) -> str | None:
    """The router of the default route with the least metric, from Linux's text (/proc/net/route); None: there is none."""
    found: list[tuple[int, str]] = []
    for line in routes.splitlines()[1:]:
        fields = line.split()
        if len(fields) >= 8 and fields[1] == fields[7] == "00000000" and fields[2] != "00000000":
            found.append((int(fields[6]), str(IPv4Address(bytes.fromhex(fields[2])[::-1]))))
    return min(found)[1] if found else None


def pcp_request(client: str, port: int, outside: int, lease_s: int, nonce: bytes) -> bytes:
    """MAP: lead `outside`, or another port, to `port` of `client`; for 0 s: no longer. `nonce`: 12 bytes."""
    head = struct.pack("!BBHI", _PCP, _MAP, 0, lease_s) + _mapped(client)
    return head + nonce + struct.pack("!B3xHH", _TCP, port, outside) + _mapped("0.0.0.0")


def read_pcp(answer: bytes, port: int, nonce: bytes) -> RouterPort | None:
    """What a router said to `pcp_request`; None: it does not speak PCP, but perhaps NAT-PMP. RouterRefused where it maps none;
    ValueError for what answers something else."""
    if len(answer) < 4 or len(answer) > MOST_ANSWER:
        raise ValueError(f"an answer of {len(answer)} bytes")
    version, code, result = answer[0], answer[1], answer[3]
    if version == _NAT_PMP or (version == _PCP and result == _UNKNOWN_VERSION):
        return None
    if version != _PCP or code != _MAP | _ANSWER or len(answer) < 60 or answer[24:36] != nonce:
        raise ValueError("an answer to something else")
    if result != _OK:
        raise RouterRefused(_WHY.get(result, f"it refuses, result {result}"))
    protocol, inside, outside = struct.unpack("!B3xHH", answer[36:44])
    if protocol != _TCP or inside != port or answer[44:56] != _mapped("0.0.0.0")[:12]:
        raise ValueError("an answer to something else")
    (lease_s,) = struct.unpack("!I", answer[4:8])
    return RouterPort(_outside(answer[56:60]), outside, lease_s, nonce)


def pmp_request(port: int, outside: int, lease_s: int) -> bytes:
    """Lead `outside`, or another port, to `port` of who asks; for 0 s: no longer."""
    return struct.pack("!BBHHHI", _NAT_PMP, _PMP_MAP_TCP, 0, port, outside, lease_s)


PMP_ADDRESS_REQUEST = bytes((_NAT_PMP, _PMP_ADDRESS))
"""Asks for the router's address outside."""


def read_pmp(answer: bytes, port: int, address: str) -> RouterPort:
    """What a router whose address outside is `address` said to `pmp_request`. RouterRefused and ValueError as `read_pcp`."""
    _check_pmp(answer, _PMP_MAP_TCP, 16)
    inside, outside, lease_s = struct.unpack("!HHI", answer[8:16])
    if inside != port:
        raise ValueError("an answer to something else")
    return RouterPort(address, outside, lease_s, nonce=b"")


def read_pmp_address(answer: bytes) -> str:
    """The router's address outside."""
    _check_pmp(answer, _PMP_ADDRESS, 12)
    return _outside(answer[8:12])


def _outside(packed: bytes) -> str:
    address = IPv4Address(packed)
    if address.is_unspecified:
        raise RouterRefused(_WHY[3])
    return str(address)


def _check_pmp(answer: bytes, code: int, size: int) -> None:
    if len(answer) < 4 or answer[0] != _NAT_PMP or answer[1] != code | _ANSWER:
        raise ValueError("an answer to something else")
    (result,) = struct.unpack("!H", answer[2:4])
    if result != _OK:
        raise RouterRefused(_WHY.get(result, f"it refuses, result {result}"))
    if len(answer) < size:
        raise ValueError(f"an answer of {len(answer)} bytes")


def _mapped(address: str) -> bytes:
    """An IPv4 address as PCP has it, within IPv6."""
    return bytes(10) + b"\xff\xff" + IPv4Address(address).packed
