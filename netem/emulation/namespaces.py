"""One network namespace for each host, each with a TUN device whose packets our switch moves. Needs Linux and root.

Must not know rates or delays: the switch delays packets between two devices.
"""

from __future__ import annotations

import ctypes
import fcntl
import ipaddress
import os
import shutil
import struct
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from p2p.errors import UsageError

DEVICE = "shoal0"
"""Name of the TUN device in every namespace."""

NETWORK = ipaddress.ip_network("10.77.0.0/16")
"""Addresses of hosts, in the order of the profile: more than a profile may have."""

QUEUE = 4096
"""Packets that a device holds for the switch: 6 MB at 1500 bytes, a few milliseconds of a busy switch."""

_TUNSETIFF = 0x400454CA
"""The ioctl that makes a TUN device (linux/if_tun.h)."""

_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
"""Its flags: IP packets, without a header before each (linux/if_tun.h)."""

_CLONE_NEWNET = 0x40000000
"""Says to setns(2) that the namespace is one of networks (linux/sched.h)."""


@dataclass(frozen=True, slots=True)
class HostNamespace:
    """The namespace in which a host's programs run."""

    namespace: str
    address: str
    tun: int
    """the device's file descriptor, non-blocking: one IP packet a read or write; -1 where the kernel has the packets"""
    congestion: str
    """TCP congestion control in force there: the one asked for, or the kernel's own where it lets no namespace choose"""
    inner: str = ""
    """its own address where that is another one than `address`, by which others know it: behind NAT"""
    routers: tuple[str, ...] = ()
    """the namespaces of the routers that it is behind, the home's first"""
    ipv6: str = ""
    """its address of IPv6, where it has one beside that of IPv4"""


NEEDED = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
"""What a process must be allowed that makes network namespaces, and the numbers of these capabilities (linux/capability.h)."""

INSTEAD = "run it with sudo; in a container, start that with --cap-add NET_ADMIN --cap-add SYS_ADMIN --device /dev/net/tun"
"""What to do where that is not allowed."""


def why_no_namespaces(root: bool, capabilities: int, program: str | None) -> str:
    """Why a process cannot make namespaces, and what to do, in one line; "" when it can. `capabilities`: those in effect, as
    bits; `program`: where ip is."""
    lacking = [name for name, number in NEEDED.items() if not capabilities >> number & 1]
    if not root:
        return f"network emulation makes network namespaces, which only root may: {INSTEAD}"
    if lacking:
        return f"network emulation makes network namespaces, and this root lacks {' and '.join(lacking)}: {INSTEAD}"
    if program is None:
        return "network emulation needs the program ip: apt-get install iproute2"
    return ""


def check_namespaces() -> None:
    """UsageError where namespaces cannot be made: not root, no capabilities, or no program ip."""
    if why := why_no_namespaces(os.geteuid() == 0, _capabilities(), shutil.which("ip")):
        raise UsageError(why)


def _capabilities() -> int:
    """Those in effect for this process; all, where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff:"))
    except (OSError, ValueError, StopIteration):
        return -1


def check_possible() -> None:
    """UsageError where namespaces or TUN devices cannot be made."""
    check_namespaces()
    if not Path("/dev/net/tun").exists():
        raise UsageError("network emulation needs /dev/net/tun: modprobe tun, or a container with --device /dev/net/tun")


@contextmanager
def open_namespaces(names: Sequence[str], *, mtu: int, prefix: str, congestion: str = "") -> Iterator[dict[str, HostNamespace]]:
    """A namespace called PREFIX-NAME for each of `names`, removed when the block ends. UsageError where they cannot be made."""
    check_possible()
    made: dict[str, HostNamespace] = {}
    try:
        for number, name in enumerate(names, start=1):
            namespace = f"{prefix}-{name}"
            call("ip", "netns", "add", namespace)
            made[name] = HostNamespace(namespace, "", -1, "")
            address = str(NETWORK[number])
            tun = tun_in(namespace)
            made[name] = HostNamespace(namespace, address, tun, congestion_in(namespace, congestion))
            call("ip", "-n", namespace, "link", "set", "lo", "up")
            call("ip", "-n", namespace, "link", "set", DEVICE, "mtu", str(mtu), "txqueuelen", str(QUEUE), "up")
            call("ip", "-n", namespace, "addr", "add", f"{address}/{NETWORK.prefixlen}", "dev", DEVICE)
        yield made
    finally:
        for host in made.values():
            if host.tun >= 0:
                os.close(host.tun)
        remove(host.namespace for host in made.values())


def call(*command: str) -> str:
    """What `command` prints. UsageError, with what it said, when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = " ".join(done.stderr.split()) or "failed"
        if command[:3] == ("ip", "netns", "add") and ("not permitted" in said or "denied" in said):  # a container's own rules
            raise UsageError(f"this system lets nobody make network namespaces here ({said}): {INSTEAD}")
        raise UsageError(f"{' '.join(command)}: {said}")
    return done.stdout


def remove(namespaces: Iterable[str]) -> None:
    """Delete those of `namespaces` that exist, and their devices with them."""
    for namespace in namespaces:
        subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


def congestion_in(namespace: str, wanted: str) -> str:
    """Set the TCP congestion control of a namespace ("" leaves it); returns the one in force then, since a kernel may refuse."""
    file = "/proc/sys/net/ipv4/tcp_congestion_control"
    script = f'[ -z "$1" ] || echo "$1" 2>/dev/null > {file}; cat {file}'
    command = ["ip", "netns", "exec", namespace, "sh", "-c", script, "sh", wanted]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def tun_in(namespace: str) -> int:
    """The descriptor of a TUN device made in `namespace`. The calling thread enters the namespace and comes back; other threads
    of the process stay where they are."""
    libc = ctypes.CDLL(None, use_errno=True)
    here = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(there, _CLONE_NEWNET) != 0:
            raise UsageError(f"cannot enter namespace {namespace}: {os.strerror(ctypes.get_errno())}")
        try:
            tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)  # belongs where it is opened
            fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
        finally:
            if libc.setns(here, _CLONE_NEWNET) != 0:
                os._exit(70)  # this thread would go on in a network that is not its own
    finally:
        os.close(here)
        os.close(there)
    return tun
