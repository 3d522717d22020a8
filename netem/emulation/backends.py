"""The two back ends that emulate a profile's network on this machine: `tc` where the kernel has netem, else our own switch.

Thin shell. A `Backend` is owned by one process, whose main thread is in `run`; the rest may be called from any thread.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from netem.emulation.fabric import Fabric, RateOverTime
from netem.emulation.homes import open_hosts, why_no_nat
from netem.emulation.namespaces import (
    HostNamespace,
    call,
    check_namespaces,
    check_possible,
    congestion_in,
    open_namespaces,
    remove,
)
from netem.emulation.switch import IDLE_S, Switch
from netem.emulation.tc import NetworkPlan, dropped_and_lost, needs_netem, rate_commands, stats_commands, up_commands
from netem.networks.profile import Profile
from p2p.errors import UsageError

AUTO, TC, SWITCH = "auto", "tc", "switch"
BACKENDS = (AUTO, TC, SWITCH)


@dataclass(frozen=True, slots=True)
class Weather:
    """How well the emulation kept up, and what it dropped, since the last call of `Backend.weather`."""

    late_s: float
    """seconds that the latest packet was handed over too late: more than a few milliseconds mean that the machine was measured
    and not the profile. Always 0 with `tc`, which does not say"""
    dropped: int
    """packets that found a queue full"""
    lost: int
    """packets that the profile's loss took"""


class Backend:
    """A network that is up, until the `with` block that made it ends."""

    name: str
    hosts: dict[str, HostNamespace]
    namespaces: list[str]
    """all namespaces that were made for it"""

    def run(self, stop: Callable[[], bool]) -> None:
        """Move packets and change rates until `stop()` is true."""
        raise NotImplementedError

    def weather(self) -> Weather:
        """Counts since the last call."""
        raise NotImplementedError

    def set_rates(self, host: str, up: float, down: float, seconds: float | None) -> None:
        """Set the rates of `host`'s access link, in bit/s, from now on or for `seconds`; 0 is an outage. KeyError for an unknown
        host."""
        raise NotImplementedError


class ChosenBackend(NamedTuple):
    """A back end that can run on this machine."""

    name: str
    """TC or SWITCH"""
    note: str
    """why it is not tc, in one line for people; "" otherwise"""


def choose(asked: str, *profiles: Profile) -> ChosenBackend:
    """The back end for these profiles. "auto" takes tc only where the kernel has all of it; a tc that is asked for by name need
    only do what the profiles need. UsageError for an unknown name, and where the back end asked for cannot run."""
    if asked not in BACKENDS:
        raise UsageError(f"no back end {asked!r}: {', '.join(BACKENDS)}")
    natted, ipv6 = any(profile.natted for profile in profiles), any(p.ipv6 != "none" for p in profiles)
    if asked == TC and (natted or ipv6):
        raise UsageError(f"back end tc: {'NAT' if natted else 'IPv6'} is emulated by the back end switch only")
    if natted and (lacking := why_no_nat()):
        raise UsageError(lacking)
    asked = SWITCH if natted or ipv6 else asked
    all_of_it = asked == AUTO or not profiles or any(needs_netem(profile) for profile in profiles)
    why = "" if asked == SWITCH else why_not_tc(netem=all_of_it)
    if asked == TC and why:
        raise UsageError(f"back end tc: {why}")
    if asked == SWITCH or why:
        check_possible()
        return ChosenBackend(SWITCH, f"back end switch (user space), not tc: {why}" if why else "")
    return ChosenBackend(TC, "")


def why_not_tc(*, netem: bool = True) -> str:
    """Why `tc` cannot be used on this machine; "" when it can. It is tried out in a namespace of its own, since the kernel may
    load a module only when it is asked for. `netem`: whether delay, jitter or loss are needed."""
    check_namespaces()
    if shutil.which("tc") is None:
        return "the program tc is missing: apt-get install iproute2"
    probe = f"shoal-probe-{threading.get_native_id()}"
    htb = ["qdisc", "add", "dev", "lo", "root", "handle", "1:", "htb", "default", "10"]
    rate = ["class", "add", "dev", "lo", "parent", "1:", "classid", "1:10", "htb", "rate", "1mbit"]
    delay = ["qdisc", "add", "dev", "lo", "parent", "1:10", "handle", "101:", "netem", "delay", "1ms"]
    bfifo = ["qdisc", "add", "dev", "lo", "parent", "101:1" if netem else "1:10", "handle", "102:", "bfifo", "limit", "3000"]
    call("ip", "netns", "add", probe)
    try:
        for name, words in (("htb", htb), ("htb", rate), *([("netem", delay)] if netem else []), ("bfifo", bfifo)):
            done = subprocess.run(["tc", "-n", probe, *words], capture_output=True, text=True, check=False)
            if done.returncode != 0:
                return f"this kernel lacks sch_{name} ({' '.join(done.stderr.split()) or 'tc failed'})"
    finally:
        remove([probe])
    return ""


@contextmanager
def open_backend(name: str, profile: Profile, prefix: str) -> Iterator[Backend]:
    """Bring `profile` up by TC or SWITCH, in namespaces whose names begin with `prefix`. UsageError where that fails."""
    if name == TC:
        with _open_tc(profile, prefix) as backend:
            yield backend
    else:
        names = [h.name for h in profile.hosts]
        plain = partial(open_namespaces, names, mtu=profile.mtu, prefix=prefix, congestion=profile.congestion)
        with open_hosts(profile, prefix) if profile.natted or profile.ipv6 != "none" else plain() as hosts:
            yield SwitchBackend(profile, hosts)


class SwitchBackend(Backend):
    """A TUN device for each host, and our own switch between them."""

    name = SWITCH

    def __init__(self, profile: Profile, hosts: dict[str, HostNamespace]) -> None:
        self.hosts = hosts
        self.namespaces = list(dict.fromkeys(name for host in hosts.values() for name in (host.namespace, *host.routers)))
        self._fabric = Fabric(profile)
        linked = {name: host for name, host in hosts.items() if host.tun >= 0}  # others share the link of one of these
        addresses = {host.address: name for name, host in linked.items()}
        addresses |= {host.ipv6: profile.gateway(profile.host(name)).name for name, host in hosts.items() if host.ipv6}
        self._switch = Switch(self._fabric, {name: host.tun for name, host in linked.items()}, addresses)
        self._seen = 0, 0

    def run(self, stop: Callable[[], bool]) -> None:
        self._switch.run(stop)

    def weather(self) -> Weather:
        """See `Backend.weather`."""
        late, self._switch.late = self._switch.late, 0.0
        pipes = [*self._fabric.up.values(), *self._fabric.down.values()]
        before, self._seen = self._seen, (sum(p.overflowed for p in pipes), sum(p.lost for p in pipes))
        return Weather(late, self._seen[0] - before[0], self._seen[1] - before[1])

    def set_rates(self, host: str, up: float, down: float, seconds: float | None) -> None:
        self._switch.call(lambda fabric, now: fabric.set_rates(now, host, up, down, seconds))


class TcBackend(Backend):
    """The kernel's own queues; this process only changes their rates over time."""

    name = TC

    def __init__(self, plan: NetworkPlan, hosts: dict[str, HostNamespace], now: Callable[[], float] = time.monotonic) -> None:
        self.hosts, self.namespaces = hosts, plan.namespaces
        self._plan, self._now, self._began = plan, now, now()
        self._up = {h.name: RateOverTime(h.access.up, ((s.at, s.up) for s in h.trace)) for h in plan.profile.hosts}
        self._down = {h.name: RateOverTime(h.access.down, ((s.at, s.down) for s in h.trace)) for h in plan.profile.hosts}
        self._applied = {h.name: (h.access.up, h.access.down) for h in plan.profile.hosts}
        self._lock = threading.Lock()
        self._seen = 0, 0

    def run(self, stop: Callable[[], bool]) -> None:
        while not stop():
            self._apply()
            time.sleep(IDLE_S)

    def weather(self) -> Weather:
        said = [call(*command) for command in stats_commands(self._plan)]
        before, self._seen = self._seen, dropped_and_lost(said)
        return Weather(0.0, self._seen[0] - before[0], self._seen[1] - before[1])

    def set_rates(self, host: str, up: float, down: float, seconds: float | None) -> None:
        """See `Backend.set_rates`."""
        now = self._now() - self._began
        with self._lock:
            until = None if seconds is None else now + seconds
            self._up[host].set(now, up, until)
            self._down[host].set(now, down, until)
        self._apply()

    def _apply(self) -> None:
        with self._lock:
            now = self._now() - self._began
            for host, applied in self._applied.items():
                wanted = self._up[host].at(now), self._down[host].at(now)
                if wanted != applied:
                    for command in rate_commands(self._plan, host, *wanted):
                        call(*command)
                    self._applied[host] = wanted


@contextmanager
def _open_tc(profile: Profile, prefix: str) -> Iterator[Backend]:
    check_namespaces()
    plan = NetworkPlan(profile, prefix)
    try:
        for command in up_commands(plan):
            call(*command)
        hosts = {}
        for host in profile.hosts:
            where, address = plan.namespace(host.name), plan.address(host.name)
            congestion = congestion_in(where, profile.congestion)
            hosts[host.name] = HostNamespace(where, address, tun=-1, congestion=congestion)
        yield TcBackend(plan, hosts)
    finally:
        remove(plan.namespaces)
