"""The fluid bound T* of a broadcast; every measurement is given as a multiple of it. Pure numbers.

Kumar and Ross, "Peer-assisted file distribution: the minimum distribution time" (2006): with an uplink u_s at the source
and receivers with uplinks u_i and downlinks d_i, no schedule is faster than

    T* = max( M / u_s,  M / min d_i,  N M / (u_s + sum u_i) )

and fluid depth-2 trees reach it: the source sends each receiver a sub-stream, which that receiver repeats to all others, and
sends the rest to all of them itself. The bound leaves latency out.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from netem.networks.profile import LEARNER, Host, Profile


def fluid_bound(payload_bits: float, source_up: float, uplinks: Sequence[float], downlinks: Sequence[float]) -> float:
    """T* in seconds; rates in bit/s, an uplink and a downlink for each receiver. ValueError without receivers, and when a rate of
    0 would make the broadcast endless."""
    if not uplinks or len(uplinks) != len(downlinks):
        raise ValueError(f"{len(uplinks)} uplinks and {len(downlinks)} downlinks")
    if source_up <= 0 or min(downlinks) <= 0 or min(uplinks) < 0:
        raise ValueError("a rate of 0: this broadcast never ends")
    return payload_bits / best_rate(source_up, uplinks, downlinks)


def best_rate(source_up: float, uplinks: Sequence[float], downlinks: Sequence[float]) -> float:
    """The rate, in bit/s, at which all receivers can be fed at once."""
    return min(source_up, min(downlinks), (source_up + sum(uplinks)) / len(uplinks))


def profile_bound(profile: Profile, payload_bytes: int) -> float:
    """T* in seconds of a broadcast from the learner to every node of `profile`. The hosts of a site count as one receiver with
    the sum of their rates; over the site's LAN each gets what any of them has, at the LAN's rate. The hosts of a home, behind one
    router, count as one receiver with that router's rates, and their LAN as free."""
    bits, source_up = 8.0 * payload_bytes, 0.0
    up: dict[str, float] = {}
    down: dict[str, float] = {}
    least = 0.0
    for host in profile.hosts:
        if profile.gateway(host) is not host:
            continue
        lan = profile.sites[host.site] if host.site else None
        if host.name != LEARNER:
            least = max(least, bits / (host.access.down + (lan.down if lan is not None else 0.0)))
        if host.name == LEARNER or (host.site and host.site == profile.learner.site):
            source_up += host.access.up
        else:
            unit = f"site {host.site}" if host.site else host.name
            up[unit] = up.get(unit, 0.0) + host.access.up
            down[unit] = down.get(unit, 0.0) + host.access.down
    return max(least, fluid_bound(bits, source_up, list(up.values()), list(down.values())) if up else 0.0)


def traced_bound(profile: Profile, payload_bytes: int, since: float) -> float:
    """As `profile_bound` from the time `since` on, where hosts have traces: the least time in which the source can send the
    payload once, each node can receive it, and all uplinks together can carry it to every node. A lower bound: what must pass
    each of these cuts, at the rates in force. ValueError for sites; infinite if it never ends."""
    if profile.sites:
        raise ValueError("a traced bound knows no sites")
    bits, nodes = 8.0 * payload_bytes, profile.hosts[1:]
    source = _time_for(bits, [_rates(profile.learner, up=True)], since)
    down = max(_time_for(bits, [_rates(host, up=False)], since) for host in nodes)
    return max(source, down, _time_for(len(nodes) * bits, [_rates(host, up=True) for host in profile.hosts], since))


def _rates(host: Host, *, up: bool) -> list[tuple[float, float]]:
    """(from when, bit/s) of one direction of a host, in order."""
    access = host.access
    return [(-inf, access.up if up else access.down), *((s.at, s.up if up else s.down) for s in host.trace)]


def _time_for(bits: float, links: Sequence[list[tuple[float, float]]], since: float) -> float:
    """Seconds from `since` until links with these rates have carried `bits` together."""
    times = sorted({since, *(at for link in links for at, _ in link if at > since)})
    for start, end in zip(times, [*times[1:], inf], strict=True):
        rate = sum(next(rate for at, rate in reversed(link) if at <= start) for link in links)
        if rate > 0 and bits <= (end - start) * rate:
            return start + bits / rate - since
        bits -= (end - start) * rate if rate else 0.0
    return inf
