"""The kernel's NAT in front of emulated hosts: what each kind maps and filters, with real packets. Needs root, TUN and nft."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from netem.emulation.backends import SWITCH, TC, choose, open_backend
from netem.emulation.homes import why_no_nat
from netem.emulation.namespaces import HostNamespace
from netem.networks.profile import LEARNER, build_profile
from p2p.errors import UsageError
from tests.support.watchdog import PATIENCE_S
from tests.wan.test_switch import WHY_NOT, on_host

pytestmark = pytest.mark.skipif(bool(WHY_NOT or why_no_nat()), reason=WHY_NOT or why_no_nat() or "-")

LINK = {"up_mbit": 50.0, "down_mbit": 50.0, "delay_ms": 5.0}
PROFILE: dict[str, Any] = {
    "learner": {**LINK, "nat": "cone", "forward": [4001], "hairpin": True, "home": "flat"},
    "nodes": [
        {"name": "mate", **LINK, "nat": "cone", "home": "flat"},
        {"name": "open", **LINK},
        {"name": "open-2", **LINK},
        {"name": "cone", **LINK, "nat": "cone"},
        {"name": "cone-2", **LINK, "nat": "cone"},
        {"name": "symmetric", **LINK, "nat": "symmetric"},
        {"name": "cgnat", **LINK, "nat": "cgnat"},
        {"name": "cgnat-symmetric", **LINK, "nat": "cgnat-symmetric"},
        {"name": "firewall", **LINK, "nat": "firewall"},
        {"name": "upnp", **LINK, "nat": "cone", "upnp": bool(shutil.which("miniupnpd"))},
        {"name": "pcp", **LINK, "nat": "cone", "pcp": bool(shutil.which("miniupnpd"))},
    ],
}

LISTEN = """
import socket
s = socket.create_server(("0.0.0.0", 4001)); print("up", flush=True)
while True:
    c, sender = s.accept()
    c.sendall(("%s %d" % sender).encode()); c.close()
"""

ASK = """
import socket, sys
s = socket.socket(); s.settimeout(float(sys.argv[2])); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
s.bind(("0.0.0.0", int(sys.argv[3])))
try:
    s.connect((sys.argv[1], 4001)); print(s.recv(100).decode())
except OSError as error:
    print("no:", type(error).__name__)
"""

PUNCH = """
import socket, sys, time
address, port, at = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
time.sleep(max(0.0, at - time.monotonic()))
s = socket.socket(); s.settimeout(4); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1); s.bind(("0.0.0.0", 4002))
try:
    s.connect((address, port)); s.sendall(b"hello"); print(s.recv(100).decode()); time.sleep(0.2)
except OSError as error:
    print("no:", type(error).__name__)
"""


@contextmanager
def listening_hosts(profile: dict[str, Any], listen: str) -> Iterator[dict[str, HostNamespace]]:
    """The hosts of an emulated network, the program `listen` on each."""
    with open_backend(SWITCH, build_profile(profile, "test"), f"shoal-{os.getpid()}") as network:
        over = threading.Event()
        thread = threading.Thread(target=network.run, args=(over.is_set,))
        thread.start()
        listeners = [subprocess.Popen(on_host(host, sys.executable, "-c", listen), stdout=subprocess.PIPE, text=True)
                     for host in network.hosts.values()]  # fmt: skip
        try:
            for listener in listeners:
                assert listener.stdout is not None and listener.stdout.readline() == "up\n"
            yield network.hosts
        finally:
            for listener in listeners:
                listener.kill()
                listener.communicate()
            over.set()
            thread.join()


@pytest.fixture(scope="module")
def hosts() -> Iterator[dict[str, HostNamespace]]:
    with listening_hosts(PROFILE, LISTEN) as found:
        yield found


def ask(hosts: dict[str, HostNamespace], who: str, whom: str, *, seconds: float = 1.5, port: int = 0) -> str:
    """What `whom` says when `who` connects to its public address: from where it sees it come."""
    command = on_host(hosts[who], sys.executable, "-c", ASK, hosts[whom].address, str(seconds), str(port))
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True).stdout.strip()


def punch(hosts: dict[str, HostNamespace], one: str, other: str) -> list[str]:
    """What each says of a simultaneous open from port 4002 to port 4002."""
    at = str(time.monotonic() + 1.0)
    pairs = [
        subprocess.Popen(
            on_host(hosts[a], sys.executable, "-c", PUNCH, hosts[b].address, "4002", at), stdout=subprocess.PIPE, text=True
        )
        for a, b in ((one, other), (other, one))
    ]
    return [process.communicate(timeout=PATIENCE_S)[0].strip() for process in pairs]


@pytest.mark.parametrize("whom", ["cone", "symmetric", "cgnat", "cgnat-symmetric", "firewall"])
def test_nobody_is_let_in_unasked(hosts: dict[str, HostNamespace], whom: str) -> None:
    assert ask(hosts, "open", whom) == "no: TimeoutError"


def test_a_forwarded_port_leads_in_and_hairpins(hosts: dict[str, HostNamespace]) -> None:
    assert ask(hosts, "cone", LEARNER).split()[0] == hosts["cone"].address
    assert ask(hosts, "mate", LEARNER).split()[0] == "192.168.1.1", "by the router's public address, from inside"


@pytest.mark.parametrize("kind", ["cone", "cgnat", "firewall"])
def test_a_port_is_kept_whoever_is_asked(hosts: dict[str, HostNamespace], kind: str) -> None:
    for whom in ("open", "open-2"):
        assert ask(hosts, kind, whom, port=4003) == f"{hosts[kind].address} 4003"


@pytest.mark.parametrize("kind", ["symmetric", "cgnat-symmetric"])
def test_a_symmetric_nat_takes_another_port_each_time(hosts: dict[str, HostNamespace], kind: str) -> None:
    seen = {ask(hosts, kind, whom, port=4003) for whom in ("open", "open-2", LEARNER)}
    assert len(seen) == 3 and all(one.split()[0] == hosts[kind].address for one in seen)


@pytest.mark.parametrize(("one", "other"), [("cone", "cone-2"), ("cone", "cgnat"), ("cgnat", "firewall")])
def test_both_that_open_at_once_meet(hosts: dict[str, HostNamespace], one: str, other: str) -> None:
    assert punch(hosts, one, other) == ["hello", "hello"]


def test_symmetric_ones_do_not(hosts: dict[str, HostNamespace]) -> None:
    assert punch(hosts, "symmetric", "cgnat-symmetric") == ["no: TimeoutError"] * 2


def test_tc_has_no_nat() -> None:
    with pytest.raises(UsageError, match="NAT is emulated by the back end switch"):
        choose(TC, build_profile(PROFILE, "test"))


MAP = """
import sys, trio
from p2p.channel.mapping import keep_mapped
class Host:
    mapping, listening = None, [f"/ip4/{sys.argv[1]}/tcp/4001"]
async def main():
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_mapped, Host)
        while Host.mapping is None:
            await trio.sleep(0.05)
        by = Host.mapping.by
        print(Host.mapping.address, "UPnP" if by is None else "PCP" if by.nonce else "NAT-PMP", flush=True)
        await trio.to_thread.run_sync(sys.stdin.readline)
        nursery.cancel_scope.cancel()
trio.run(main)
"""


@pytest.mark.skipif(shutil.which("miniupnpd") is None, reason="the program miniupnpd is missing: apt-get install miniupnpd")
@pytest.mark.parametrize(("name", "by"), [("upnp", "UPnP"), ("pcp", "PCP")])
def test_a_router_maps_a_port_for_who_asks(hosts: dict[str, HostNamespace], name: str, by: str) -> None:
    host = hosts[name]
    command = on_host(host, sys.executable, "-c", MAP, host.inner)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        said = process.stdout.readline().split()
        try:
            assert said == [f"/ip4/{host.address}/tcp/4001", by], process.stderr.read()
            assert ask(hosts, "open", name).split()[0] == hosts["open"].address
        finally:
            process.communicate("end\n", timeout=PATIENCE_S)
    assert ask(hosts, "open", name, seconds=1.0).startswith("no:"), "the port was given back"
