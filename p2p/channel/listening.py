"""What a listening host needs of the operating system: a free port, the addresses of its interfaces, open files.

Must not know libp2p: addresses are multiaddrs as text, "/ip4/ADDRESS/tcp/PORT".
"""

from __future__ import annotations

import errno
import logging
import resource
import socket
from collections.abc import Sequence

import psutil

from p2p.errors import UsageError
from p2p.ip import plain_ip, tcp_multiaddr
from p2p.printable import printable

log = logging.getLogger("shoal.channel")

MAX_FILES = 65_536
"""Open files this process asks to be allowed: every connection is one, and many systems give 1024 unless asked."""


SHOWN = 100
"""Characters of an address that people are shown: the longest IPv6 multiaddr has half of that, a DNS name may have more."""


def check_free(listen: Sequence[str]) -> None:
    """UsageError when an address cannot be bound. libp2p listens with SO_REUSEPORT, so it would share a port in use
    with the process that has it and get half of its connections."""
    for text in listen:
        parts = text.split("/")
        numbered = len(parts) == 5 and parts[4].isascii() and parts[4].isdigit()
        if not numbered or parts[0] or parts[1] not in ("ip4", "ip6") or parts[3] != "tcp":
            raise UsageError(f"cannot listen on {text!r}: want /ip4/ADDRESS/tcp/PORT or /ip6/ADDRESS/tcp/PORT")
        family = socket.AF_INET if parts[1] == "ip4" else socket.AF_INET6
        host, port = parts[2], int(parts[4])
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
                probe.listen(1)  # on Linux two binds with SO_REUSEADDR may pass and only listen tell
        except OverflowError:
            raise UsageError(f"cannot listen on {text}: no such port as {port}") from None
        except OSError as error:
            why = f"port {port} is in use" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
            raise UsageError(f"cannot listen on {text}: {why}") from None


def anywhere(port: int = 0) -> list[str]:
    """Addresses to listen on at all interfaces: of IPv4, and of IPv6 where this machine has an address that others can dial."""
    dialable = any(
        not plain_ip(one.address).is_loopback
        for addresses in psutil.net_if_addrs().values()
        for one in addresses
        if one.family == socket.AF_INET6 and "%" not in one.address
    )
    both = dialable and _can_bind_ipv6()
    return [tcp_multiaddr(host, port) for host in (("0.0.0.0", "::") if both else ("0.0.0.0",))]


def _can_bind_ipv6() -> bool:
    """A sandbox may list addresses, and allow no socket."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::", 0))
    except OSError:
        return False
    return True


def spell_out(text: str) -> list[str]:
    """A bound multiaddr as dialable ones: a wildcard becomes the addresses of this machine, loopback last."""
    _, family, host, *rest = text.split("/")
    if host not in ("0.0.0.0", "::"):
        return [text]
    wanted = socket.AF_INET if family == "ip4" else socket.AF_INET6
    hosts = [
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family == wanted and "%" not in address.address  # link-local ones need a zone to be dialled
    ]
    hosts.sort(key=lambda host: host.startswith("127.") or host == "::1")
    return ["/".join(["", family, host, *rest]) for host in hosts]


def short_address(text: str) -> str:
    """A multiaddr for people, without the peer id: "192.0.2.1:4001", "[2001:db8::1]:4001". Another form stays as it is, at most
    SHOWN characters of it: it comes from a ticket or a peer."""
    plain = printable(text.split("/p2p/")[0], SHOWN)
    parts = plain.split("/")
    if len(parts) != 5 or parts[0] or parts[3] != "tcp":
        return plain
    return f"[{parts[2]}]:{parts[4]}" if parts[1] == "ip6" else f"{parts[2]}:{parts[4]}"


def allow_many_files() -> None:
    """Raise the limit of open files of this process, as far as it may, to MAX_FILES."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:  # some systems say a hard limit that they do not grant
            log.warning("only %d open files are allowed: %s", soft, error)
