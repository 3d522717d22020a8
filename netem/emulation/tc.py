"""The commands that build a profile's network from veth pairs and the kernel's own queues (`tc`: htb, netem, bfifo).

Pure: a profile in, lists of words out; the output of `tc -s -j` in, numbers out. Must not know processes: `backends` runs them.

A host has a namespace, and so does the gateway in front of it, as at home: host -- gateway -- core. The uplink is shaped as it
leaves the gateway, the downlink as it leaves the core, each by a chain

    htb (rate)  >  netem (delay, jitter, loss)  >  bfifo (the queue, in bytes)

A gateway and not the host itself: Linux lets TCP fill a queue on its own machine by a packet or two only, and queues that fill
are what is emulated. The core routes, so nothing is flooded; neighbours on shaped links are fixed, so no packet waits for ARP.
Traffic within a site has a second htb class, with the LAN's chain. See tc-htb(8), tc-netem(8), tc-bfifo(8), tc-stab(8).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from netem.emulation.namespaces import DEVICE, NETWORK
from netem.networks.profile import Access, Profile

Command = list[str]

ETHERNET = 14
"""Bytes of a frame beside its IP packet. The kernel counts them; a profile's rates, and the switch, do not."""

BURST_S = 0.001
"""Seconds of a link's rate that it may send at once: shorter than the lateness of any timer here."""

NETEM_PACKETS = 50_000
"""Packets that netem may hold: a limit that is never reached, since packets under way are no queue."""

ORDERED = "100gbit"
"""A rate for netem. With any rate it keeps packets in order under jitter; this one is so high that it has no other effect."""

WAN, LAN = "10", "20"
"""Minor numbers of the htb classes."""

LAN_GATEWAY, GATEWAY, CORE = "169.254.1.1", "169.254.2.1", "169.254.2.2"
"""Link-local addresses, the same at every host."""


@dataclass(frozen=True, slots=True)
class ShapedLink:
    """One direction of a host's link: the device that is shaped, and its namespace."""

    namespace: str
    device: str


@dataclass(frozen=True, slots=True)
class NetworkPlan:
    """Names and addresses of a network that is to be. `prefix` begins every namespace's name."""

    profile: Profile
    prefix: str

    @property
    def core(self) -> str:
        return f"{self.prefix}--core"  # no host's: their names begin with a letter

    def namespace(self, host: str) -> str:
        return f"{self.prefix}-{host}"

    def gateway(self, host: str) -> str:
        return f"{self.prefix}--gw-{host}"

    def address(self, host: str) -> str:
        return str(NETWORK[1 + self._number(host)])

    def uplink(self, host: str) -> ShapedLink:
        return ShapedLink(self.gateway(host), "wan")

    def downlink(self, host: str) -> ShapedLink:
        return ShapedLink(self.core, f"host{self._number(host)}")

    @property
    def namespaces(self) -> list[str]:
        hosts = [h.name for h in self.profile.hosts]
        return [self.core, *(self.namespace(h) for h in hosts), *(self.gateway(h) for h in hosts)]

    def neighbours(self, host: str) -> list[str]:
        """Addresses of the other hosts on its site's LAN."""
        site = self.profile.host(host).site
        return [self.address(h.name) for h in self.profile.hosts if site and h.site == site and h.name != host]

    def _number(self, host: str) -> int:
        return next(i for i, h in enumerate(self.profile.hosts) if h.name == host)


def needs_netem(profile: Profile) -> bool:
    """Whether any link of the profile has delay, jitter or loss, which only netem gives."""
    return any(_has_netem(access) for access in (*(h.access for h in profile.hosts), *profile.sites.values()))


def up_commands(plan: NetworkPlan) -> list[Command]:
    """The commands that make the network, in order. To undo them, also half-way, delete `plan.namespaces`."""
    out = [*(["ip", "netns", "add", name] for name in plan.namespaces), _forwards(plan.core)]
    for number, host in enumerate(plan.profile.hosts):
        out += _wired(plan, host.name, number)
        lan = plan.profile.sites[host.site] if host.site else None
        for link, rate, lan_rate, match in (
            (plan.uplink(host.name), host.access.up, lan.up if lan else 0.0, "dst"),
            (plan.downlink(host.name), host.access.down, lan.down if lan else 0.0, "src"),
        ):
            size = ["stab", "overhead", str(-ETHERNET)]
            out.append(_tc(link, "qdisc", "add", "root", "handle", "1:", *size, "htb", "default", WAN))
            out += _chain(link, WAN, host.access, rate, plan.profile.mtu)
            if lan is not None:
                out += _chain(link, LAN, lan, lan_rate, plan.profile.mtu)
            for other in plan.neighbours(host.name):
                match_ip = ["match", "ip", match, f"{other}/32", "flowid", f"1:{LAN}"]
                out.append(_tc(link, "filter", "add", "parent", "1:", "protocol", "ip", "prio", "1", "u32", *match_ip))
    return out


def rate_commands(plan: NetworkPlan, host: str, up: float, down: float) -> list[Command]:
    """The commands that set the rates (bit/s) of the host's access link. With a rate of 0 its queue takes no packets; those in it
    leave at the old rate, and the htb class owes nothing when the outage is over."""
    access, out = plan.profile.host(host).access, list[Command]()
    for link, rate in ((plan.uplink(host), up), (plan.downlink(host), down)):
        if rate > 0:
            out.append(_class(link, "change", WAN, rate, plan.profile.mtu))
        out.append(_queue(link, "change", WAN, access=access, rate=rate, mtu=plan.profile.mtu))
    return out


def stats_commands(plan: NetworkPlan) -> list[Command]:
    """The commands that print the counters of all shaped links, for `dropped_and_lost`."""
    shaped = [plan.core, *(plan.gateway(h.name) for h in plan.profile.hosts)]
    return [["tc", "-n", name, "-s", "-j", "qdisc", "show"] for name in shaped]


class Losses(NamedTuple):
    """Packets that did not arrive, since the network came up."""

    dropped: int
    """packets that found a queue full"""
    lost: int
    """packets that netem's loss took"""


def dropped_and_lost(outputs: Iterable[str]) -> Losses:
    """The counters in the output of `stats_commands`. netem counts the drops of the queue below it as its own too."""
    dropped = lost = 0
    for qdisc in (q for text in outputs for q in json.loads(text or "[]")):
        drops = qdisc.get("drops", 0)
        if qdisc.get("kind") == "netem":
            lost += drops
        elif qdisc.get("kind") == "bfifo":
            dropped += drops
            lost -= drops if qdisc.get("parent") in (f"{WAN}1:1", f"{LAN}1:1") else 0
    return Losses(dropped, lost)


# --- wires ---------------------------------------------------------------------------------------------------------------


def _wired(plan: NetworkPlan, host: str, number: int) -> list[Command]:
    """The commands that connect host, gateway and core, with the routes both ways."""
    here, gateway, core, mtu = plan.namespace(host), plan.gateway(host), plan.core, str(plan.profile.mtu)
    address, far = plan.address(host), plan.downlink(host).device
    near_mac, far_mac = (f"02:53:48:{side:02x}:{number >> 8:02x}:{number & 255:02x}" for side in (1, 2))
    return [
        _ip(here, "link", "set", "lo", "up"),
        _ip(here, "link", "add", DEVICE, "mtu", mtu, "type", "veth", "peer", "name", "lan", "mtu", mtu, "netns", gateway),
        # No segmentation offload: with packets of 64 KiB neither a queue in bytes nor a loss for each packet would mean anything.
        _ip(here, "link", "set", DEVICE, "gso_max_segs", "1", "up"),
        _ip(gateway, "link", "set", "lan", "up"),
        _ip(gateway, "link", "add", "wan", "mtu", mtu, "address", near_mac, "type", "veth", "peer", "name", far, "mtu", mtu,
            "address", far_mac, "netns", core),
        _ip(gateway, "link", "set", "wan", "up"),
        _ip(core, "link", "set", far, "up"),
        _ip(gateway, "addr", "add", f"{LAN_GATEWAY}/32", "dev", "lan"),
        _ip(gateway, "addr", "add", f"{GATEWAY}/32", "dev", "wan"),
        _ip(core, "addr", "add", f"{CORE}/32", "dev", far),
        _ip(here, "addr", "add", f"{address}/32", "dev", DEVICE),
        _ip(here, "route", "add", "default", "via", LAN_GATEWAY, "dev", DEVICE, "onlink", "src", address),
        _ip(gateway, "route", "add", f"{address}/32", "dev", "lan"),
        _ip(gateway, "neigh", "add", CORE, "lladdr", far_mac, "dev", "wan", "nud", "permanent"),
        _ip(gateway, "route", "add", "default", "via", CORE, "dev", "wan", "onlink"),
        _ip(core, "neigh", "add", GATEWAY, "lladdr", near_mac, "dev", far, "nud", "permanent"),
        _ip(core, "route", "add", f"{address}/32", "via", GATEWAY, "dev", far, "onlink"),
        _forwards(gateway),
    ]  # fmt: skip


def _ip(namespace: str, *words: str) -> Command:
    return ["ip", "-n", namespace, *words]


def _forwards(namespace: str) -> Command:
    return ["ip", "netns", "exec", namespace, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"]


# --- shaping -------------------------------------------------------------------------------------------------------------


def _tc(link: ShapedLink, what: str, action: str, *words: str) -> Command:
    return ["tc", "-n", link.namespace, what, action, "dev", link.device, *words]


def _chain(link: ShapedLink, minor: str, access: Access, rate: float, mtu: int) -> list[Command]:
    """The commands for one link: htb class, netem if the link has delay, jitter or loss, and the queue."""
    out = [_class(link, "add", minor, rate, mtu)]
    if _has_netem(access):
        out.append(_tc(link, "qdisc", "add", "parent", f"1:{minor}", "handle", f"{minor}1:", "netem", *netem_words(access)))
    return [*out, _queue(link, "add", minor, access=access, rate=rate, mtu=mtu)]


def _has_netem(access: Access) -> bool:
    return access.delay > 0 or access.jitter > 0 or access.loss > 0


def _class(link: ShapedLink, action: str, minor: str, rate: float, mtu: int) -> Command:
    frame = mtu + ETHERNET
    burst = str(max(frame, round(rate * BURST_S / 8)))
    words = ["rate", f"{max(8, round(rate))}bit", "burst", burst, "cburst", burst, "quantum", str(frame)]
    return _tc(link, "class", action, "parent", "1:", "classid", f"1:{minor}", "htb", *words)


def _queue(link: ShapedLink, action: str, minor: str, access: Access, rate: float, mtu: int) -> Command:
    """The command for a link's queue. It takes a packet while at most `queue` seconds of others are ahead, as `fabric.Pipe`
    does."""
    limit = round(rate * access.queue / 8) + mtu if rate > 0 else 1
    parent = f"{minor}1:1" if _has_netem(access) else f"1:{minor}"
    return _tc(link, "qdisc", action, "parent", parent, "handle", f"{minor}2:", "bfifo", "limit", str(limit))


def netem_words(access: Access) -> list[str]:
    """The options of netem for one end of a path: its delay, normally distributed jitter that keeps the order, loss."""
    words = ["limit", str(NETEM_PACKETS), "delay", _ms(access.delay)]
    if access.jitter > 0:
        words += [_ms(access.jitter), "distribution", "normal", "rate", ORDERED]
    if access.loss > 0:
        words += ["loss", "random", f"{100 * access.loss:.6f}%"]
    return words


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.6f}ms"
