"""A profile: a wide-area network as each host sees it. All back ends and the simulator read the same profiles.

Pure: TOML text or values in, frozen values out. Must not know namespaces, clocks or what travels.

The network is a star: each host has an uplink and a downlink to a core without limits, so the one-way delay between two
hosts is the sum of theirs. Hosts of one **site** reach each other over the site's LAN and do not use their WAN links for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from learner.section import Section, check_section, read_toml
from netem.networks.nat import Kind, Nat
from p2p.errors import UsageError

LEARNER = "learner"
"""The source's name, always the first host."""

IPv6 = Literal["none", "only", "also"]
"""Which hosts have an address of IPv6: none; all, and no other; all, beside that of IPv4. It is not translated: what is behind
NAT has a firewall in its router."""

LEAST_MTU_OF_IPV6 = 1280
"""Bytes that every link must carry in one packet (RFC 8200, section 5)."""

MAX_HOSTS = 16_384
"""Hosts of one profile, at most: the simulator is run with ten thousand."""


@dataclass(frozen=True, slots=True)
class Access:
    """A host's link to the core (or to its site's LAN). Rates in bit/s, times in seconds, `loss` a probability."""

    up: float
    down: float
    delay: float
    """one way, to or from the core"""
    jitter: float = 0.0
    """standard deviation added to the delay of a packet; packets of a link stay in order"""
    loss: float = 0.0
    """probability that a packet is lost, in each direction"""
    queue: float = 0.1
    """seconds of packets, at the link's rate, that may wait for it; more are dropped"""


def _mbit(up: float, down: float, delay_ms: float, jitter_ms: float = 0.0, loss: float = 0.0, queue_ms: float = 100.0) -> Access:
    return Access(up * 1e6, down * 1e6, delay_ms / 1e3, jitter=jitter_ms / 1e3, loss=loss, queue=queue_ms / 1e3)


PRESETS: dict[str, Access] = {
    "lan": _mbit(1000, 1000, 0.1, queue_ms=10),
    "dc": _mbit(10_000, 10_000, 0.25, queue_ms=10),
    "us-wan": _mbit(1000, 1000, 15, jitter_ms=0.5, loss=1e-5, queue_ms=50),
    "transatlantic": _mbit(500, 500, 20, jitter_ms=0.5, loss=1e-5, queue_ms=50),
    "intercontinental": _mbit(300, 300, 45, jitter_ms=1, loss=1e-4, queue_ms=100),
    "home-fiber": _mbit(500, 1000, 5, jitter_ms=0.5, loss=1e-5, queue_ms=50),
    "home-cable": _mbit(20, 200, 10, jitter_ms=3, loss=1e-4, queue_ms=200),
    "home-dsl": _mbit(10, 50, 12, jitter_ms=2, loss=1e-4, queue_ms=200),
    "lte": _mbit(15, 60, 25, jitter_ms=10, loss=1e-3, queue_ms=300),
    "starlink": _mbit(15, 150, 25, jitter_ms=8, loss=5e-3, queue_ms=100),
    "geo-sat": _mbit(3, 50, 300, jitter_ms=15, loss=5e-3, queue_ms=500),
}
"""Access links people have. The delay is that of one end: two us-wan hosts are 30 ms apart (a round trip of 60 ms),
transatlantic 40, intercontinental 90, two geostationary ones 600."""


@dataclass(frozen=True, slots=True)
class Step:
    """From `at` seconds on, the host's rates are these (bit/s)."""

    at: float
    up: float
    down: float


@dataclass(frozen=True, slots=True)
class Host:
    name: str
    access: Access
    site: str = ""
    dialable: bool = True
    """False: behind NAT, reached only over connections it opened"""
    trace: tuple[Step, ...] = ()
    """rates over time; they replace the access link's from the first step on"""
    nat: Nat | None = None
    """None: a public address, and nothing is filtered"""


@dataclass(frozen=True, slots=True)
class Profile:
    """Hosts, the learner first. `sites` maps a site's name to the LAN its hosts share."""

    name: str
    hosts: tuple[Host, ...]
    sites: dict[str, Access]
    mtu: int
    congestion: str
    """TCP congestion control of every host; it decides what loss costs, so a profile always names one"""
    scale: float
    """rates (and traces) were multiplied by this; results must print it"""
    ipv6: IPv6 = "none"

    @property
    def learner(self) -> Host:
        return self.hosts[0]

    def host(self, name: str) -> Host:
        """The host called `name`. KeyError when there is none."""
        return next((h for h in self.hosts if h.name == name), None) or _no_host(name)

    @property
    def natted(self) -> bool:
        """Whether any host is behind NAT or a firewall."""
        return any(h.nat is not None for h in self.hosts)

    def gateway(self, host: Host) -> Host:
        """The host whose access link `host` uses: the first one of its home, mostly itself."""
        if host.nat is None:
            return host
        return next(h for h in self.hosts if h.nat is not None and h.nat.home == host.nat.home)

    def delay(self, one: Host, other: Host) -> float:
        """Seconds one way between two hosts, jitter and queues aside."""
        if one.nat and other.nat and one.nat.home == other.nat.home:
            return 0.0
        if one.site and one.site == other.site:
            return 2 * self.sites[one.site].delay
        return one.access.delay + other.access.delay

    def scaled(self, factor: float) -> Profile:
        """The profile with all rates times `factor`, so that a small machine can emulate a fast network. Times stay, so results
        must state the factor."""
        def link(a: Access) -> Access:
            return replace(a, up=a.up * factor, down=a.down * factor)

        hosts = tuple(
            replace(
                h, access=link(h.access), trace=tuple(Step(s.at, s.up * factor, s.down * factor) for s in h.trace)
            )
            for h in self.hosts
        )
        return replace(
            self, hosts=hosts, sites={n: link(a) for n, a in self.sites.items()}, scale=self.scale * factor
        )


def _no_host(name: str) -> Host:
    raise KeyError(f"no host {name!r}")


# --- the file ------------------------------------------------------------------------------------------------------------


class _Access(Section):
    """A preset, then what differs from it; without a preset, at least both rates."""

    preset: str | None = None
    up_mbit: float | None = Field(default=None, gt=0)
    down_mbit: float | None = Field(default=None, gt=0)
    delay_ms: float | None = Field(default=None, ge=0, le=10_000)
    jitter_ms: float | None = Field(default=None, ge=0, le=1000)
    loss: float | None = Field(default=None, ge=0, lt=1)
    queue_ms: float | None = Field(default=None, gt=0, le=10_000)

    @model_validator(mode="after")
    def _known(self) -> _Access:
        if self.preset is not None and self.preset not in PRESETS:
            raise ValueError(f"preset {self.preset!r} is not one of {', '.join(PRESETS)}")
        if self.preset is None and (self.up_mbit is None or self.down_mbit is None):
            raise ValueError("needs a preset, or up_mbit and down_mbit")
        return self

    def access(self) -> Access:
        base = PRESETS[self.preset] if self.preset is not None else Access(0.0, 0.0, 0.0)
        given = {
            "up": (self.up_mbit, 1e6), "down": (self.down_mbit, 1e6), "delay": (self.delay_ms, 1e-3),
            "jitter": (self.jitter_ms, 1e-3), "loss": (self.loss, 1.0), "queue": (self.queue_ms, 1e-3),
        }  # fmt: skip
        return replace(base, **{name: value * unit for name, (value, unit) in given.items() if value is not None})


class _Behind(_Access):
    """A host's link and what it is behind."""

    nat: Kind | None = None
    home: str = Field(default="", pattern=r"^[a-z0-9-]{0,32}$")
    """hosts of one home are behind one router and share the access link of the first; empty: each has a router of its own"""
    forward: list[int] = Field(default_factory=list)
    hairpin: bool = False
    upnp: bool = False
    pcp: bool = False

    @model_validator(mode="after")
    def _nat(self) -> _Behind:
        if self.nat is None and (self.home or self.forward or self.hairpin or self.maps):
            raise ValueError("home, forward, hairpin, upnp and pcp say more of a NAT: give its kind as nat")
        if self.nat is not None and self.nat not in ("cone", "firewall") and self.forward:
            raise ValueError(f"nat {self.nat!r} forwards no port")
        if self.nat is not None and self.nat != "cone" and (self.hairpin or self.maps):
            raise ValueError(f"nat {self.nat!r} neither hairpins nor maps ports")
        if self.nat == "firewall" and self.home:
            raise ValueError("a host behind a firewall is alone")
        if any(not 0 < port < 65_536 for port in self.forward):
            raise ValueError("forward: ports are from 1 to 65535")
        return self

    @property
    def maps(self) -> bool:
        """Whether the router maps ports."""
        return self.upnp or self.pcp

    def behind(self, name: str) -> Nat | None:
        """What a host called `name` is behind."""
        if self.nat is None:
            return None
        return Nat(self.nat, self.home or name, tuple(self.forward), self.hairpin, upnp=self.upnp, pcp=self.pcp)


class _Learner(_Behind):
    site: str = ""


class _Nodes(_Behind):
    name: str = Field(default="node", pattern=r"^[a-z][a-z0-9-]{0,31}$")
    """hosts are called name-1, name-2, ... (just name when count is 1 and it is given)"""
    count: int = Field(default=1, ge=1, le=MAX_HOSTS)
    site: str = ""
    dialable: bool = True
    trace: list[list[float]] = Field(default_factory=list)
    """[[seconds, up_mbit, down_mbit], ...], times rising from 0"""

    @model_validator(mode="after")
    def _trace(self) -> _Nodes:
        if any(len(row) != 3 for row in self.trace):
            raise ValueError("trace: each row is [seconds, up_mbit, down_mbit]")
        times = [row[0] for row in self.trace]
        if times != sorted(set(times)) or (times and times[0] < 0):
            raise ValueError("trace: times must rise, from 0 or later")
        if any(rate < 0 for row in self.trace for rate in row[1:]):
            raise ValueError("trace: a rate below 0 (0 is an outage)")
        return self


class _File(Section):
    name: str = ""
    mtu: int = Field(default=1500, ge=576, le=65_000)
    congestion: Literal["cubic", "bbr", "reno"] = "cubic"
    scale: float = Field(default=1.0, gt=0, le=1000)
    ipv6: IPv6 = "none"
    sites: dict[str, _Access] = Field(default_factory=dict)
    learner: _Learner
    nodes: list[_Nodes] = Field(min_length=1)


def load_profile(file: str | Path) -> Profile:
    """Read a profile. UsageError, one line that names the key, for anything wrong."""
    path = Path(file)
    values = read_toml(path, "profile")
    return build_profile(values, str(path), path.stem)


def build_profile(values: dict[str, Any], source: str, name: str = "profile") -> Profile:
    """A profile from plain values, rates scaled as it says. UsageError names `source` and the first wrong key."""
    file = check_section(_File, values, source)
    hosts = [Host(LEARNER, file.learner.access(), file.learner.site, nat=file.learner.behind(LEARNER))]
    hosts += [host for group in file.nodes for host in _hosts(group, alone=len(file.nodes) > 1)]
    _check(source, hosts, file.sites)
    if file.ipv6 != "none":
        _check_ipv6(source, hosts, file)
    sites = {site: section.access() for site, section in file.sites.items()}
    whole = Profile(
        file.name or name, tuple(hosts), sites, mtu=file.mtu, congestion=file.congestion, scale=1.0, ipv6=file.ipv6
    )
    return whole.scaled(file.scale) if file.scale != 1.0 else whole


def _hosts(group: _Nodes, *, alone: bool) -> list[Host]:
    names = [group.name] if group.count == 1 and alone else [f"{group.name}-{i + 1}" for i in range(group.count)]
    trace = tuple(Step(at, up * 1e6, down * 1e6) for at, up, down in group.trace)
    return [Host(n, group.access(), group.site, group.dialable, trace=trace, nat=group.behind(n)) for n in names]


def _check(source: str, hosts: Sequence[Host], sites: dict[str, _Access]) -> None:
    names = [h.name for h in hosts]
    if len(names) > MAX_HOSTS:
        raise UsageError(f"{source}: nodes: {len(names)} hosts, at most {MAX_HOSTS}")
    twice = next((n for n in names if names.count(n) > 1), None) if len(set(names)) < len(names) else None
    if twice is not None:
        raise UsageError(f"{source}: nodes: two hosts are called {twice!r}: give their groups other names")
    for host in hosts:
        if host.site and host.site not in sites:
            raise UsageError(f"{source}: {host.name}: no site {host.site!r} under [sites]")
        if host.site and host.nat is not None:
            raise UsageError(f"{source}: {host.name}: a site and a NAT at once are not emulated")
        if host.nat is not None:
            _check_home(source, host, [h for h in hosts if h.nat is not None and h.nat.home == host.nat.home])


def _check_ipv6(source: str, hosts: Sequence[Host], file: _File) -> None:
    if file.mtu < LEAST_MTU_OF_IPV6:
        raise UsageError(f"{source}: mtu: {file.mtu}, but IPv6 needs {LEAST_MTU_OF_IPV6} (RFC 8200)")
    if file.ipv6 == "also":
        return
    translated = next((host for host in hosts if host.nat is not None and host.nat.kind != "firewall"), None)
    if translated is not None:
        raise UsageError(f"{source}: {translated.name}: NAT of IPv6 is not emulated; a firewall is")


def _check_home(source: str, host: Host, mates: Sequence[Host]) -> None:
    assert host.nat is not None
    for other in mates:
        assert other.nat is not None
        router, mine = ((h.nat.kind, h.nat.upnp, h.nat.pcp, h.access) for h in (other, host) if h.nat is not None)
        if router != mine:
            both = f"{source}: {host.name} and {other.name}"
            raise UsageError(f"{both} share a router: its kind, upnp, pcp and link must be the same")
        if other is not host and set(other.nat.forward) & set(host.nat.forward):
            raise UsageError(f"{source}: {host.name} and {other.name} share a router: a port of it leads to one of them")
