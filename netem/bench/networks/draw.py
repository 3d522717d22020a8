"""Networks that nobody chose: drawn from stated distributions, by a seed and a number. Pure.

The same seed and number give the same network on any machine: all draws come from Python's Mersenne Twister, seeded by text,
and every drawn value is rounded to DIGITS digits, so that the last bit of a logarithm does not matter. Must not know how a
network is measured.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import exp, log
from random import Random

from netem.networks.bound import best_rate, profile_bound
from netem.networks.profile import LEARNER, Access, Host, Profile, Step
from p2p.errors import UsageError
from p2p.limits import KIB, MIB

BOUNDS = ("source", "downlink", "sum")
"""What T* follows from: the learner's uplink, the least downlink of a node, or the sum of all uplinks. Network i is of stratum
i mod 3: it is drawn again until its rates say so."""

KINDS = ("steady", "changing", "crossed")
"""Rates that stay; rates of some hosts that step up and down, between versions and within them; traffic of others on the
learner's uplink, which takes a part of it now and then."""
STEADY_SHARE, CHANGING_SHARE = 0.75, 0.125
"""Parts of all networks that are of the first two kinds."""

SMALL_SHARE = 0.3
"""Part of the networks with a payload below LARGE."""
LARGE = 8 * MIB
"""Bytes from which a payload is large, and judged as such."""
SMALLEST, LARGEST = 512 * KIB, 64 * MIB
"""Bytes of a payload. Between these and LARGE its logarithm is uniform."""

ALONE_SHARE, MANY_SHARE = 0.1, 0.15
"""Parts of the networks with one node, and with more than SEVERAL."""
SEVERAL, MOST = 24, 48
"""Nodes of most networks, and of those with many, at most; the logarithm is uniform."""

LEARNER_MBIT, NODE_MBIT, SIGMA = 30.0, 20.0, 1.0
"""Medians of the uplinks in Mbit/s, and the standard deviation of their natural logarithms."""
LEAST_MBIT, MOST_MBIT = 1.0, 1000.0
"""No rate is drawn beyond these."""
EQUAL_SHARE = 0.25
"""Part of the networks whose nodes all have the same rates."""
ASYMMETRY = 1.0, 10.0
"""Downlink over uplink of a host; its logarithm is uniform."""
REVERSED_SHARE, REVERSED = 0.15, (0.2, 1.0)
"""Part of the networks in which a third of the nodes has less downlink than uplink, and their asymmetry."""

DELAY_MS, QUEUE_MS = (0.5, 60.0), (30.0, 500.0)
"""One-way delay of a host to the core, which is half of a way between hosts, and packets that wait for its links; logarithms are
uniform."""
LOSSY_SHARE, LOSS = 0.3, (1e-5, 1e-2)
"""Part of the hosts that lose packets, and the probability."""
JITTERY_SHARE, JITTER_MS = 0.3, (0.5, 10.0)
"""Part of the hosts whose delay varies, and its standard deviation."""
MTUS = (1500, 1500, 1500, 1500, 1500, 1500, 1500, 1492, 1420, 1280)
"""Drawn evenly: Ethernet, PPPoE, WireGuard, the least that IPv6 allows."""

FEW_VERSIONS, MANY_VERSIONS, MANY_VERSIONS_SHARE = 4, 10, 0.2
"""Versions of a network, and the part of the networks with many."""

LONGEST_S = 120.0
"""Networks with a longer T* are drawn again."""

STEP_FACTORS = 0.3, 1.5
"""A rate that changes is what was drawn times this; logarithm uniform."""
CROSSED = 0.2, 0.6
"""The part of the learner's uplink that others take."""
STEPS_EVERY = 0.3, 2.5
"""From one change to the next, in multiples of T*."""

OUTLIVES = 3.0
"""Traces reach so many times as far as all versions and the pauses between them take at T*."""

DIGITS = 3
"""Significant digits of what is drawn."""


@dataclass(frozen=True, slots=True)
class DrawnNetwork:
    """A network and what is sent over it."""

    name: str
    """says how to draw it again"""
    bound: str
    kind: str
    profile: Profile
    payload: int
    """bytes of each version"""
    versions: int

    @property
    def large(self) -> bool:
        return self.payload >= LARGE

    @property
    def farthest_s(self) -> float:
        """Seconds one way from the learner to the node that is farthest from it."""
        profile = self.profile
        return max(profile.delay(profile.learner, host) for host in profile.hosts[1:])


def name_of(seed: int, index: int) -> str:
    return f"net-{seed}-{index}"


def draw_by_name(name: str) -> DrawnNetwork:
    """The network that `name_of` calls so. UsageError for any other name."""
    found = re.fullmatch(r"net-(\d{1,9})-(\d{1,9})", name)
    if found is None:
        raise UsageError(f"no network {name!r}: they are called net-SEED-INDEX")
    return draw_network(int(found[1]), int(found[2]))


def draw_network(seed: int, index: int) -> DrawnNetwork:
    """Network `index`, from 0, of those of `seed`."""
    draw, bound, name = Random(f"shoal bench networks {seed} {index}"), BOUNDS[index % len(BOUNDS)], name_of(seed, index)
    while True:
        kind = _of(draw, KINDS, (STEADY_SHARE, CHANGING_SHARE))
        small = draw.random() < SMALL_SHARE
        payload = int(_log_uniform(draw, SMALLEST, LARGE) if small else _log_uniform(draw, LARGE, LARGEST))
        payload = min(payload, LARGE - 1) if small else max(payload, LARGE)
        versions = MANY_VERSIONS if draw.random() < MANY_VERSIONS_SHARE else FEW_VERSIONS
        profile = _draw_profile(draw, name)
        t_star = profile_bound(profile, payload)
        if t_star <= LONGEST_S and bound_of(profile) == bound:
            break
    hosts = _with_changes(draw, kind, profile.hosts, t_star, versions)
    profile = Profile(name, hosts, {}, mtu=profile.mtu, congestion=profile.congestion, scale=1.0)
    return DrawnNetwork(name, bound, kind, profile, payload=payload, versions=versions)


def bound_of(profile: Profile) -> str:
    """Which of BOUNDS a profile without sites is of."""
    up, down = [h.access.up for h in profile.hosts[1:]], [h.access.down for h in profile.hosts[1:]]
    source = profile.learner.access.up
    rate = best_rate(source, up, down)
    return "source" if rate == source else "downlink" if rate == min(down) else "sum"


def _of(draw: Random, names: tuple[str, ...], shares: tuple[float, ...]) -> str:
    at = draw.random()
    for name, share in zip(names, shares, strict=False):
        if at < share:
            return name
        at -= share
    return names[-1]


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _log_uniform(draw: Random, least: float, most: float) -> float:
    return _rounded(exp(draw.uniform(log(least), log(most))))


def _log_normal(draw: Random, median: float) -> float:
    """In bit/s, for a median in Mbit/s."""
    return 1e6 * _rounded(min(max(median * exp(draw.gauss(0.0, SIGMA)), LEAST_MBIT), MOST_MBIT))


def _draw_access(draw: Random, up: float, asymmetry: tuple[float, float]) -> Access:
    down = min(max(_rounded(up * _log_uniform(draw, *asymmetry)), LEAST_MBIT * 1e6), MOST_MBIT * 1e6)
    return Access(
        up, down, 1e-3 * _log_uniform(draw, *DELAY_MS),
        jitter=1e-3 * _log_uniform(draw, *JITTER_MS) if draw.random() < JITTERY_SHARE else 0.0,
        loss=_log_uniform(draw, *LOSS) if draw.random() < LOSSY_SHARE else 0.0,
        queue=1e-3 * _log_uniform(draw, *QUEUE_MS),
    )  # fmt: skip


def _draw_profile(draw: Random, name: str) -> Profile:
    at = draw.random()
    if at < ALONE_SHARE:
        nodes = 1
    elif at < ALONE_SHARE + MANY_SHARE:
        nodes = int(_log_uniform(draw, SEVERAL + 1, MOST + 1))
    else:
        nodes = int(_log_uniform(draw, 2, SEVERAL + 1))
    nodes = min(nodes, MOST)
    learner = _draw_access(draw, _log_normal(draw, LEARNER_MBIT), ASYMMETRY)
    equal, turned = draw.random() < EQUAL_SHARE, draw.random() < REVERSED_SHARE
    hosts = [Host(LEARNER, learner)]
    common = _log_normal(draw, NODE_MBIT)
    one = _draw_access(draw, common, ASYMMETRY)
    for number in range(1, nodes + 1):
        access = one
        if not equal:
            asymmetry = REVERSED if turned and draw.random() < 1 / 3 else ASYMMETRY
            access = _draw_access(draw, _log_normal(draw, NODE_MBIT), asymmetry)
        hosts.append(Host(f"node-{number}", access))
    return Profile(name, tuple(hosts), {}, mtu=draw.choice(MTUS), congestion="bbr", scale=1.0)


def _with_changes(
    draw: Random, kind: str, hosts: tuple[Host, ...], t_star: float, versions: int
) -> tuple[Host, ...]:
    """The hosts, some with traces that reach beyond the end of all versions."""
    if kind == "steady":
        return hosts
    until = OUTLIVES * versions * (t_star + 2.0)
    out = []
    for place, host in enumerate(hosts):
        if kind == "crossed" and place == 0:
            host = _traced(draw, host, t_star, until, crossed=True)
        elif kind == "changing" and draw.random() < 1 / 3:
            host = _traced(draw, host, t_star, until, crossed=False)
        out.append(host)
    if not any(host.trace for host in out):
        out[-1] = _traced(draw, out[-1], t_star, until, crossed=False)
    return tuple(out)


def _traced(draw: Random, host: Host, t_star: float, until: float, *, crossed: bool) -> Host:
    steps: list[Step] = []
    at, up, down, taken = 0.0, host.access.up, host.access.down, False
    while at < until:
        at = round(at + max(0.5, t_star * _log_uniform(draw, *STEPS_EVERY)), 1)
        if crossed:
            taken = not taken
            steps.append(Step(at, up * (1 - draw.uniform(*CROSSED)) if taken else up, down))
        else:
            factor = _log_uniform(draw, *STEP_FACTORS)
            steps.append(Step(at, up * factor, down * factor))
    return Host(host.name, host.access, trace=tuple(steps))
