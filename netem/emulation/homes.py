"""Hosts behind NAT: a namespace for each router, and the kernel's own NAT and filter in it (nf_tables). Needs root and nft.

    host -- bridge of the home -- router -- (carrier's router) -- TUN device, which the switch reads

Every home has the same private addresses, as homes do. The TUN device has the public address; it is the router's (or the
carrier's), so the home's hosts share its rates. `rules_of`, `plan_of` are pure; `open_hosts` is the thin shell.
"""

from __future__ import annotations

import ipaddress
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from netem.emulation.namespaces import (
    DEVICE,
    QUEUE,
    HostNamespace,
    call,
    check_possible,
    congestion_in,
    remove,
    tun_in,
)
from netem.networks.nat import Nat
from netem.networks.profile import Profile
from p2p.errors import UsageError
from p2p.processes import start, wait_or_kill

PUBLIC = ipaddress.ip_network("11.77.0.0/16")
"""Addresses in a network with NAT. They are of the public internet, since members tell public and private addresses apart; the
namespaces lead nowhere, so no packet of theirs leaves this machine."""

PUBLIC_IPV6 = ipaddress.ip_network("2a77:7777::/64")
"""The same in a network of IPv6."""

GATEWAY, CUSTOMER = "fe80::1", "fe80::2"
"""Addresses on a link within a home, or between a home and its carrier: of the router that leads out, and of the home's."""

HOME = ipaddress.ip_network("192.168.1.0/24")
"""Addresses inside a home: the router has the first, its hosts the next ones."""

CARRIER = ipaddress.ip_network("100.64.0.0/24")
"""Addresses between a carrier's router, which has the first, and the home's, which has the second (RFC 6598)."""

UPNPD_END_S = 5.0
"""Seconds that a router's miniupnpd has to end."""


@dataclass(frozen=True, slots=True)
class Home:
    """One router and the hosts behind it. The first host's access link is the router's."""

    name: str
    hosts: tuple[str, ...]
    nats: tuple[Nat, ...]
    public: str
    """the address that the world sees"""

    def inner(self, host: str) -> str:
        """The address of a host inside."""
        return str(HOME[2 + self.hosts.index(host)])


def why_no_nat() -> str:
    """Why NAT cannot be emulated here, and what to do; "" when it can."""
    return "" if shutil.which("nft") else "NAT is emulated with the program nft, which is missing: apt-get install nftables"


class AddressPlan(NamedTuple):
    """Who is where."""

    addresses: dict[str, str]
    """the public address of each host"""
    ipv6: dict[str, str]
    """that of IPv6 of each host which has one beside"""
    homes: list[Home]
    """a host behind a firewall alone is in none"""


def plan_of(profile: Profile) -> AddressPlan:
    """The addresses and homes of a profile's hosts."""
    addresses: dict[str, str] = {}
    homes: dict[str, Home] = {}
    ipv6 = {host.name: str(PUBLIC_IPV6[number]) for number, host in enumerate(profile.hosts, start=1)}
    for number, host in enumerate(profile.hosts, start=1):
        addresses[host.name] = ipv6[host.name] if profile.ipv6 == "only" else str(PUBLIC[number])
        if host.nat is None or host.nat.kind == "firewall":
            continue
        before = homes.get(host.nat.home)
        if before is None:
            homes[host.nat.home] = Home(host.nat.home, (host.name,), (host.nat,), addresses[host.name])
        else:
            addresses[host.name] = before.public
            hosts, nats = (*before.hosts, host.name), (*before.nats, host.nat)
            homes[host.nat.home] = Home(before.name, hosts, nats, before.public)
    return AddressPlan(addresses, ipv6 if profile.ipv6 == "also" else {}, list(homes.values()))


def rules_of(forward: Mapping[int, str], *, wan: str, public: str, random_ports: bool, hairpin: bool) -> str:
    """The nf_tables rules of one router. `forward`: port of the router -> inside address. `wan`: its device to the world."""
    mapping = "masquerade random,fully-random" if random_ports else "masquerade"
    led = "\n".join(f'  ip daddr {public} tcp dport {port} dnat to {host}:{port}' for port, host in forward.items())
    back = f'  ip saddr {HOME} ip daddr {HOME} ct status dnat masquerade\n' if hairpin else ""
    only = "" if hairpin else f'  iifname != "{wan}" accept\n'
    return f"""
table ip home {{
 chain before {{
  type nat hook prerouting priority dstnat; policy accept;
{only}{led}
 }}
 chain after {{
  type nat hook postrouting priority srcnat; policy accept;
  oifname "{wan}" {mapping}
{back} }}
 chain across {{
  type filter hook forward priority filter; policy drop;
  ct state established,related accept
  iifname != "{wan}" accept
  ct status dnat accept
 }}
 chain inward {{
  type filter hook input priority filter; policy drop;
  ct state established,related accept
  iifname != "{wan}" accept
 }}
}}
"""


def filter_of(let_in: Mapping[str, Iterable[int]], *, wan: str) -> str:
    """The nf_tables rules for IPv6 of a home's router: in comes what answers, ICMPv6, and for each address these TCP ports."""
    ports = "".join(f"  ip6 daddr {host} tcp dport {port} accept\n" for host, ports in let_in.items() for port in ports)
    return _filter("ip6", "across", "forward", ports, wan)


def firewall_of(let_in: Iterable[int]) -> str:
    """The nf_tables rules of a host behind a stateful firewall that lets these TCP ports in. ICMPv6 is let in, since packets that
    are too big are told of by it (RFC 4890)."""
    ports = "".join(f"  tcp dport {port} accept\n" for port in let_in)
    return _filter("inet", "inward", "input", ports, DEVICE)


def _filter(family: str, chain: str, hook: str, let_in: str, wan: str) -> str:
    """Of what comes from `wan` what answers, ICMPv6, and what the lines `let_in` accept."""
    return f"""
table {family} home {{
 chain {chain} {{
  type filter hook {hook} priority filter; policy drop;
  ct state established,related accept
  meta l4proto ipv6-icmp accept
{let_in}  iifname != "{wan}" accept
 }}
}}
"""


@contextmanager
def open_hosts(profile: Profile, prefix: str) -> Iterator[dict[str, HostNamespace]]:
    """As `namespaces.open_namespaces`, with IPv6, and the routers of a profile that has NAT. UsageError where that cannot be
    made."""
    check_possible()
    if profile.natted and (why := why_no_nat()):
        raise UsageError(why)
    addresses, ipv6, homes = plan_of(profile)
    made: dict[str, HostNamespace] = {}
    with ExitStack() as stack:
        for host in profile.hosts:
            namespace = _namespace(f"{prefix}-{host.name}", stack)
            if host.nat is not None and host.nat.kind != "firewall":
                continue
            tun = _outside(namespace, addresses[host.name], profile.mtu, stack)
            if host.nat is not None:
                _nft(namespace, firewall_of(host.nat.forward))
            if ipv6:
                _has_ipv6(namespace, ipv6[host.name], PUBLIC_IPV6.prefixlen)
            congestion = congestion_in(namespace, profile.congestion)
            made[host.name] = HostNamespace(namespace, addresses[host.name], tun, congestion, ipv6=ipv6.get(host.name, ""))
        for home in homes:
            made |= _build_home(home, profile, prefix, stack)
            if ipv6:
                made |= _give_ipv6(home, {host: (made[host], ipv6[host]) for host in home.hosts})
        yield {host.name: made[host.name] for host in profile.hosts}


def _build_home(home: Home, profile: Profile, prefix: str, stack: ExitStack) -> dict[str, HostNamespace]:
    router, mtu, nat = _namespace(f"{prefix}--home-{home.name}", stack), str(profile.mtu), home.nats[0]
    _forwards(router)
    call("ip", "-n", router, "link", "add", "lan", "mtu", mtu, "type", "bridge")
    call("ip", "-n", router, "addr", "add", f"{HOME[1]}/{HOME.prefixlen}", "dev", "lan")
    call("ip", "-n", router, "link", "set", "lan", "up")
    routers: tuple[str, ...] = (router,)
    forward = {port: home.inner(host) for host, nat in zip(home.hosts, home.nats, strict=True) for port in nat.forward}
    hairpin = any(nat.hairpin for nat in home.nats)
    if nat.carrier:
        carrier = _namespace(f"{prefix}--carrier-{home.name}", stack)
        routers = router, carrier
        _forwards(carrier)
        far = ["peer", "name", "lan", "mtu", mtu, "netns", carrier]
        call("ip", "-n", router, "link", "add", "wan", "mtu", mtu, "type", "veth", *far)
        call("ip", "-n", carrier, "addr", "add", f"{CARRIER[1]}/{CARRIER.prefixlen}", "dev", "lan")
        call("ip", "-n", carrier, "link", "set", "lan", "up")
        call("ip", "-n", router, "addr", "add", f"{CARRIER[2]}/{CARRIER.prefixlen}", "dev", "wan")
        call("ip", "-n", router, "link", "set", "wan", "up")
        call("ip", "-n", router, "route", "add", "default", "via", str(CARRIER[1]))
        _nft(router, rules_of({}, wan="wan", public=str(CARRIER[2]), random_ports=False, hairpin=False))
        outside = _outside(carrier, home.public, profile.mtu, stack)
        _nft(carrier, rules_of({}, wan=DEVICE, public=home.public, random_ports=nat.random_ports, hairpin=False))
    else:
        outside = _outside(router, home.public, profile.mtu, stack)
        _nft(router, rules_of(forward, wan=DEVICE, public=home.public, random_ports=nat.random_ports, hairpin=hairpin))
        if nat.upnp or nat.pcp:
            _run_upnpd(router, home.public, nat, stack)
    out: dict[str, HostNamespace] = {}
    for number, host in enumerate(home.hosts):
        namespace, inner = f"{prefix}-{host}", home.inner(host)
        call("ip", "-n", namespace, "link", "add", DEVICE, "mtu", mtu, "type", "veth", "peer", "name", f"lan{number}", "mtu", mtu,
             "netns", router)  # fmt: skip
        call("ip", "-n", router, "link", "set", f"lan{number}", "master", "lan", "up")
        call("ip", "-n", namespace, "addr", "add", f"{inner}/{HOME.prefixlen}", "dev", DEVICE)
        call("ip", "-n", namespace, "link", "set", DEVICE, "up")
        call("ip", "-n", namespace, "route", "add", "default", "via", str(HOME[1]))
        tun = outside if number == 0 else -1
        out[host] = HostNamespace(
            namespace, home.public, tun, congestion_in(namespace, profile.congestion), inner=inner, routers=routers
        )
    return out


def _give_ipv6(home: Home, hosts: Mapping[str, tuple[HostNamespace, str]]) -> dict[str, HostNamespace]:
    """The hosts of a home with these addresses: routed by its routers, of which the home's filters."""
    routers = next(iter(hosts.values()))[0].routers
    for number, router in enumerate(routers):
        outermost = number == len(routers) - 1
        _forwards(router, "ipv6/conf/all/forwarding")
        call("ip", "-n", router, "addr", "add", f"{GATEWAY}/64", "dev", "lan", "nodad")
        if outermost:
            call("ip", "-n", router, "route", "add", str(PUBLIC_IPV6), "dev", DEVICE)
        else:
            call("ip", "-n", router, "addr", "add", f"{CUSTOMER}/64", "dev", "wan", "nodad")
            call("ip", "-n", router, "route", "add", "default", "via", GATEWAY, "dev", "wan")
        inward = [] if number == 0 else ["via", CUSTOMER]
        for _, address in hosts.values():
            call("ip", "-n", router, "route", "add", f"{address}/128", *inward, "dev", "lan")
    let_in = {hosts[host][1]: nat.forward for host, nat in zip(home.hosts, home.nats, strict=True)}
    _nft(routers[0], filter_of(let_in, wan=DEVICE if len(routers) == 1 else "wan"))
    for host, address in hosts.values():
        _has_ipv6(host.namespace, address)
        call("ip", "-n", host.namespace, "route", "add", "default", "via", GATEWAY, "dev", DEVICE)
    return {name: replace(host, ipv6=address) for name, (host, address) in hosts.items()}


def _has_ipv6(namespace: str, address: str, prefix: int = 128) -> None:
    """`prefix`: of the network in which it is; 128 behind a router."""
    call("ip", "-n", namespace, "addr", "add", f"{address}/{prefix}", "dev", DEVICE, "nodad")


def _namespace(name: str, stack: ExitStack) -> str:
    call("ip", "netns", "add", name)
    stack.callback(remove, [name])
    call("ip", "-n", name, "link", "set", "lo", "up")
    return name


def _outside(namespace: str, address: str, mtu: int, stack: ExitStack) -> int:
    """A TUN device with a public address in `namespace`; its descriptor."""
    tun = tun_in(namespace)
    stack.callback(os.close, tun)
    call("ip", "-n", namespace, "link", "set", DEVICE, "mtu", str(mtu), "txqueuelen", str(QUEUE), "up")
    if ":" in address:
        _has_ipv6(namespace, address, PUBLIC_IPV6.prefixlen)
    else:
        call("ip", "-n", namespace, "addr", "add", f"{address}/{PUBLIC.prefixlen}", "dev", DEVICE)
    return tun


def _forwards(namespace: str, switch: str = "ipv4/ip_forward") -> None:
    call("ip", "netns", "exec", namespace, "sh", "-c", f"echo 1 > /proc/sys/net/{switch}")


def _nft(namespace: str, rules: str) -> None:
    call("ip", "netns", "exec", namespace, "nft", rules)


def _run_upnpd(router: str, public: str, nat: Nat, stack: ExitStack) -> None:
    """miniupnpd in a router until the network ends. It writes the ports that it maps into chains of its own."""
    if shutil.which("miniupnpd") is None:
        raise UsageError("upnp and pcp: the program miniupnpd is missing: apt-get install miniupnpd")
    _nft(router, UPNP_CHAINS)
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-upnpd-"))
    config = Path(folder) / "miniupnpd.conf"
    said = {"upnp": "yes" if nat.upnp else "no", "pcp": "yes" if nat.pcp else "no"}
    config.write_text(UPNPD.format(wan=DEVICE, public=public, lan=HOME[1], prefix=HOME.prefixlen, **said), encoding="ascii")
    command = ["ip", "netns", "exec", router, "miniupnpd", "-d", "-f", str(config), "-P", f"{folder}/pid"]
    process = start(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stack.callback(wait_or_kill, process, UPNPD_END_S)
    stack.callback(process.terminate)


UPNP_CHAINS = """
table inet filter {
 chain forward { type filter hook forward priority -5; policy accept; jump miniupnpd; }
 chain miniupnpd { }
 chain prerouting { type nat hook prerouting priority -105; policy accept; jump prerouting_miniupnpd; }
 chain prerouting_miniupnpd { }
 chain postrouting { type nat hook postrouting priority 105; policy accept; jump postrouting_miniupnpd; }
 chain postrouting_miniupnpd { }
}
"""
"""Chains as miniupnpd 2.3 with nf_tables wants them."""

UPNPD = """
ext_ifname={wan}
ext_ip={public}
listening_ip=lan
enable_natpmp={pcp}
enable_upnp={upnp}
secure_mode=yes
system_uptime=yes
uuid=00000000-0000-0000-0000-000000000001
allow 1024-65535 {lan}/{prefix} 1024-65535
deny 0-65535 0.0.0.0/0 0-65535
"""
"""A router's miniupnpd.conf."""
