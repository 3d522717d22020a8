"""Asking a router for a port by PCP and NAT-PMP: routers of both kinds, that refuse, are silent, or say anything."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p.channel import mapping, pcp
from p2p.channel import router as router_shell
from p2p.channel.mapping import LEASE_S, RENEW_S, PortMapping, renew_after
from p2p.channel.pcp import RouterPort, RouterRefused, default_router, pcp_request, read_pcp, read_pmp
from p2p.channel.router import map_port, unmap_port

NONCE = bytes(range(12))
OUTSIDE = "203.0.113.9"


@contextmanager
def router(monkeypatch: pytest.MonkeyPatch, answer: Callable[[bytes], list[bytes]]) -> Iterator[list[bytes]]:
    """A router on loopback: what it was asked. `answer(question)`: datagrams that it sends back."""
    asked: list[bytes] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        monkeypatch.setattr(router_shell, "ROUTER_PORT", sock.getsockname()[1])
        monkeypatch.setattr(router_shell, "RESEND_S", (0.05, 0.05, 0.3))

        def serve() -> None:
            while True:
                question, sender = sock.recvfrom(2000)
                if not question:
                    return
                asked.append(question)
                for data in answer(question):
                    sock.sendto(data, sender)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield asked
        finally:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
                end.sendto(b"", sock.getsockname())
            thread.join()


def pcp_answer(
    question: bytes, *, result: int = 0, port: int | None = None, lease: int | None = None, nonce: bytes = b""
) -> bytes:
    assert question[0] == 2 and question[1] == 1 and len(question) == 60
    (asked_lease,) = struct.unpack("!I", question[4:8])
    inside, outside = struct.unpack("!HH", question[40:44])
    head = struct.pack("!BBBBII", 2, 0x81, 0, result, asked_lease if lease is None else lease, 77) + bytes(12)
    ports = struct.pack("!B3xHH", 6, inside, outside if port is None else port)
    return head + (nonce or question[24:36]) + ports + bytes(10) + b"\xff\xff" + IPv4Address(OUTSIDE).packed


def pmp_answer(question: bytes, result: int = 0) -> bytes:
    """As of a router that knows NAT-PMP alone."""
    if question[0] != 0:
        return struct.pack("!BBHI", 0, question[1] | 0x80, 1, 77)
    if question[1] == 0:
        return struct.pack("!BBHI", 0, 0x80, result, 77) + IPv4Address(OUTSIDE).packed
    inside, outside, lease = struct.unpack("!HHI", question[4:12])
    return struct.pack("!BBHIHHI", 0, 0x82, result, 77, inside, outside + 1 if lease else 0, lease)


def test_a_router_that_speaks_pcp(monkeypatch: pytest.MonkeyPatch) -> None:
    with router(monkeypatch, lambda q: [b"junk", pcp_answer(q, nonce=bytes(12)), pcp_answer(q, lease=600)]) as asked:
        found = map_port("127.0.0.1", 4001, LEASE_S)
        assert (found.address, found.port, found.lease_s) == (OUTSIDE, 4001, 600) and len(found.nonce) == 12
        assert asked[0][8:24] == bytes(10) + b"\xff\xff" + bytes((127, 0, 0, 1)), "it says who asks"
        assert map_port("127.0.0.1", 4001, LEASE_S, found.nonce).nonce == found.nonce
        asked.clear()
        unmap_port("127.0.0.1", 4001, found)
        assert asked[0][4:8] == bytes(4) and asked[0][24:36] == found.nonce


def test_a_router_that_speaks_nat_pmp_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with router(monkeypatch, lambda q: [pmp_answer(q)]) as asked:
        found = map_port("127.0.0.1", 4001, LEASE_S)
        assert found == RouterPort(OUTSIDE, 4002, LEASE_S, b"")
        unmap_port("127.0.0.1", 4001, found)
        assert [len(q) for q in asked] == [60, 2, 12, 12] and asked[-1][-4:] == bytes(4)


@pytest.mark.parametrize("answer", [lambda q: pcp_answer(q, result=2), lambda q: pmp_answer(q, result=2)], ids=["pcp", "nat-pmp"])
def test_a_router_that_refuses_says_why(monkeypatch: pytest.MonkeyPatch, answer: Callable[[bytes], bytes]) -> None:
    with router(monkeypatch, lambda q: [answer(q)]), pytest.raises(RouterRefused, match="does not allow it"):
        map_port("127.0.0.1", 4001, LEASE_S)


@pytest.mark.parametrize("said", [[], [b"\x02\x81"], [bytes(2000)]], ids=["silent", "short", "long"])
def test_a_router_that_says_nothing_of_use_is_given_up(monkeypatch: pytest.MonkeyPatch, said: list[bytes]) -> None:
    with router(monkeypatch, lambda q: said) as asked, pytest.raises(OSError, match="no router answers to PCP"):
        map_port("127.0.0.1", 4001, LEASE_S)
    assert len(asked) == 3


def test_who_does_not_speak_it_is_asked_by_upnp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "own_router", lambda: "127.0.0.1")  # what the kernel says of routes is this machine's own
    upnp = PortMapping("/ip4/203.0.113.9/tcp/4001", 4001)
    monkeypatch.setattr(mapping, "_map_upnp", lambda port: upnp)  # miniupnpc would look for a router in this network
    with router(monkeypatch, lambda q: []):
        assert mapping._map(4001, None) == upnp  # what keep_mapped does in a thread
    with router(monkeypatch, lambda q: [pcp_answer(q, port=5005)]):
        found = mapping._map(4001, upnp)  # the same
        assert isinstance(found, PortMapping) and found.address == f"/ip4/{OUTSIDE}/tcp/5005" and found.by is not None
        again = mapping._map(4001, found)  # the same
        assert isinstance(again, PortMapping) and again.by == found.by, "renewed, with its nonce"
    monkeypatch.setattr(mapping, "_map_upnp", lambda port: "no router answers to UPnP")  # as above
    with router(monkeypatch, lambda q: [pcp_answer(q, result=8)]):
        assert mapping._map(4001, None) == "it has no room for another port; no router answers to UPnP"  # the same


def test_a_short_lease_is_renewed_in_time() -> None:
    def lease(seconds: int) -> float:
        return renew_after(PortMapping("", 1, RouterPort(OUTSIDE, 1, seconds, NONCE)))

    assert renew_after(None) == renew_after(PortMapping("", 1)) == lease(1800) == lease(1 << 31) == RENEW_S
    assert lease(300) == 150 and lease(0) == lease(1) == 30


@given(st.binary(max_size=70) | st.binary(min_size=56, max_size=64).map(lambda b: b"\x02\x81\x00\x00" + b))
def test_whatever_a_router_says_is_an_answer_or_an_error(answer: bytes) -> None:
    for read in (lambda a: read_pcp(a, 4001, NONCE), lambda a: read_pmp(a, 4001, OUTSIDE), pcp.read_pmp_address):
        try:
            read(answer)
        except (ValueError, RouterRefused):
            pass


def test_a_router_without_an_address_outside_maps_nothing() -> None:
    answer = pcp_answer(pcp_request("192.168.1.2", 4001, 4001, 60, NONCE))[:56] + bytes(4)
    for read, said in ((lambda a: read_pcp(a, 4001, NONCE), answer), (pcp.read_pmp_address, b"\x00\x80" + bytes(10))):
        with pytest.raises(RouterRefused, match="no network"):
            read(said)


def test_another_port_or_protocol_is_no_answer() -> None:
    question = pcp_request("192.168.1.2", 4001, 4001, 60, NONCE)
    good = pcp_answer(question)
    assert read_pcp(good, 4001, NONCE) == RouterPort(OUTSIDE, 4001, 60, NONCE)
    for bad in (good[:36] + b"\x11" + good[37:], good[:40] + b"\x00\x01" + good[42:], good[:44] + bytes(16)):
        with pytest.raises(ValueError, match="something else"):
            read_pcp(bad, 4001, NONCE)


ROUTES = """Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t0000A8C0\t00000000\t0001\t0\t0\t100\t00FFFFFF\t0\t0\t0
wlan0\t00000000\t0102A8C0\t0003\t0\t0\t600\t00000000\t0\t0\t0
eth0\t00000000\t0100A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0
tun0\t00000000\t00000000\t0001\t0\t0\t50\t00000000\t0\t0\t0
tun1\t00000000\t0100000A\t0003\t0\t0\t0\t00000080\t0\t0\t0
"""


def test_the_router_is_that_of_the_best_default_route() -> None:
    assert default_router(ROUTES) == "192.168.0.1"
    assert default_router(ROUTES.splitlines()[0]) is None and default_router("") is None
