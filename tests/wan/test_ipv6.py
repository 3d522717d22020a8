"""Emulated networks of IPv6: the kernel's firewall in front of hosts, and Shoal's own peers behind it. Needs root, TUN, nft."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from netem.contest.scenario import build_scenario
from netem.contest.trial import run_scenario
from netem.emulation.backends import TC, choose
from netem.emulation.homes import why_no_nat
from netem.emulation.namespaces import HostNamespace
from netem.networks.profile import LEARNER, build_profile
from p2p.errors import UsageError
from tests.support.watchdog import PATIENCE_S
from tests.wan.test_nat import listening_hosts
from tests.wan.test_nat_links import LINK, pairs
from tests.wan.test_switch import WHY_NOT, on_host

pytestmark = pytest.mark.skipif(bool(WHY_NOT or why_no_nat()), reason=WHY_NOT or why_no_nat() or "-")

PROFILE: dict[str, Any] = {
    "ipv6": "only", "mtu": 1500, "learner": {**LINK, "nat": "firewall", "forward": [4001]},
    "nodes": [{"name": "open", **LINK}, {"name": "wall", "count": 2, **LINK, "nat": "firewall"}],
}  # fmt: skip

LISTEN = """
import socket
s = socket.create_server(("::", 4001), family=socket.AF_INET6); print("up", flush=True)
while True:
    c, sender = s.accept()
    c.sendall(("%s %d" % sender[:2]).encode()); c.close()
"""

TALK = """
import socket, sys, time
address, port, own, at = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
time.sleep(max(0.0, at - time.monotonic()))
s = socket.socket(socket.AF_INET6); s.settimeout(3); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1); s.bind(("::", own))
try:
    s.connect((address, port)); s.sendall(b"hello"); print(s.recv(100).decode()); time.sleep(0.2)
except OSError as error:
    print("no:", type(error).__name__)
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[dict[str, HostNamespace]]:
    with listening_hosts(PROFILE, LISTEN) as found:
        yield found


def talk(
    hosts: dict[str, HostNamespace], who: str, whom: str, port: int, *, own: int = 0, at: float = 0.0
) -> subprocess.Popen[str]:
    command = on_host(hosts[who], sys.executable, "-c", TALK, hosts[whom].address, *map(str, (port, own, at)))
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def answer(process: subprocess.Popen[str]) -> str:
    return process.communicate(timeout=PATIENCE_S)[0].strip()


def test_a_firewall_lets_in_what_answers_and_its_open_ports(hosts: dict[str, HostNamespace]) -> None:
    assert {host.address for host in hosts.values()} == {f"2a77:7777::{number}" for number in range(1, 5)}
    assert answer(talk(hosts, "open", "wall-1", 4001)) == "no: TimeoutError"
    assert answer(talk(hosts, "wall-1", "open", 4001, own=4003)) == f"{hosts['wall-1'].address} 4003"
    assert answer(talk(hosts, "wall-1", LEARNER, 4001, own=4003)) == f"{hosts['wall-1'].address} 4003"


def test_both_behind_one_that_open_at_once_meet(hosts: dict[str, HostNamespace]) -> None:
    at = time.monotonic() + 1.0
    both = [talk(hosts, *who, 4002, own=4002, at=at) for who in (("wall-1", "wall-2"), ("wall-2", "wall-1"))]
    assert [answer(process) for process in both] == ["hello", "hello"]


def test_nodes_behind_firewalls_are_linked_and_have_the_payload() -> None:
    profile = {**PROFILE, "mtu": 9000}
    result = run_scenario(build_scenario({"profile": profile, "payload": "1 MiB", "warm_up": 0}, "test"), backend="switch")
    assert result["rounds"][-1]["t_max"] is not None, "all had the payload"
    found = pairs(result)
    assert found.pop(("wall-1", "wall-2")) == "met"
    assert len(found) == 2 and set(found.values()) <= {"direct IPv6", "met"}


def test_tc_has_no_ipv6() -> None:
    with pytest.raises(UsageError, match="IPv6 is emulated by the back end switch only"):
        choose(TC, build_profile({**PROFILE, "learner": LINK, "nodes": [LINK]}, "test"))


def test_where_the_ipv4_of_nobody_can_be_met_ipv6_links_them() -> None:
    """Homes with carriers that take another port for each connection, which the open node sees; each router has a firewall of
    IPv6."""
    nodes: list[dict[str, Any]] = [
        {"name": "open", **LINK},
        {"name": "mobile", "count": 2, **LINK, "nat": "cgnat-symmetric"},
        {"name": "flat", "count": 2, **LINK, "nat": "symmetric", "home": "flat"},
    ]
    profile = {"ipv6": "also", "mtu": 9000, "learner": {**LINK, "nat": "cone", "forward": [4001]}, "nodes": nodes}
    result = run_scenario(build_scenario({"profile": profile, "payload": "1 MiB", "warm_up": 0}, "test"), backend="switch")
    assert result["rounds"][-1]["t_max"] is not None, "all had the payload"
    found = pairs(result)
    assert found.pop(("flat-1", "flat-2")) in ("direct IPv4", "direct IPv6"), "over their own LAN"
    assert {kind for pair, kind in found.items() if "open" not in pair} == {"met"}, found
    assert len(found) == 9 and {kind for pair, kind in found.items() if "open" in pair} <= {"direct IPv6", "direct IPv4", "met"}
