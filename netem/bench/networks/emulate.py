"""`shoal bench networks --emulate`: drawn networks over real TCP on emulated links, beside the simulator, and beside libtorrent.

Choosing, scaling and summing up are pure; `bench_emulated` is the shell. Must not know how a network is drawn or simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count as count_from
from itertools import islice
from statistics import median
from typing import Any

from netem.bench.networks.bench import describe
from netem.bench.networks.draw import DrawnNetwork, draw_by_name, draw_network
from netem.bench.networks.measure import delays_of, measure_network
from netem.contest.scenario import Require, Scenario
from netem.contest.trial import describe as describe_round
from netem.contest.trial import run_scenario
from netem.contest.tuning import available_congestion, missing
from netem.emulation.backends import AUTO
from netem.networks.bound import profile_bound
from p2p.errors import ShoalError, UsageError

OURS, OTHER = "shoal", "libtorrent"

MOST_NODES = 16
"""Nodes of a network that is emulated, at most: each is a process."""

LONGEST_S = 20.0
"""Seconds of T* of such a network, at most."""

CARRIED = 120e6
"""bit/s that all nodes together may take at T*. Rates and payload of a faster network are halved until that is so, T* stays: more
than two cores encrypt, carry and check says more about the cores."""

VERSIONS = 4
"""Versions of each, at most; the first does not count."""

NEAR = 0.10
"""Part of the simulator's time by which an emulation may differ and need no explanation."""

MOST_EMULATED = 1000
"""Networks of one run, at most."""


@dataclass(frozen=True, slots=True)
class EmulatedNetwork:
    """What came of one network. Times in seconds, from publication until every node has it; medians of later versions."""

    network: DrawnNetwork
    """as it was emulated: scaled"""
    t_star: float
    simulated: float | None
    """None: the simulator says that it stands still"""
    emulated: float | None
    other: float | None
    """of libtorrent; None where it was not run, or did not end in time"""
    first: float | None
    """the first version's time, emulated"""
    copies: float
    """what the source sent, in payloads, median of later versions"""
    duplicates: float
    """what reached nodes that had it, in payloads, the same"""
    dropped: float
    """packets that found a queue full, the same"""
    late_s: float
    """the latest that the emulator handed over a packet"""
    failures: tuple[str, ...] = ()

    @property
    def near(self) -> bool:
        """Whether emulation and simulator say the same."""
        if self.emulated is None or self.simulated is None:
            return False
        return abs(self.emulated - self.simulated) <= NEAR * self.simulated

    @property
    def ahead(self) -> bool:
        """Whether libtorrent took longer, or did not end."""
        return self.emulated is not None and (self.other is None or self.emulated < self.other)


def fits(network: DrawnNetwork) -> bool:
    """Whether it can be emulated: T* of rates that change is another in each run."""
    small = len(network.profile.hosts) - 1 <= MOST_NODES
    return network.kind == "steady" and small and profile_bound(network.profile, network.payload) <= LONGEST_S


def scaled(network: DrawnNetwork) -> DrawnNetwork:
    """The network with rates and payload halved until CARRIED is kept; T* is the same."""
    t_star = profile_bound(network.profile, network.payload)
    taken, factor = 8 * network.payload * (len(network.profile.hosts) - 1) / t_star, 1.0
    while taken * factor > CARRIED:
        factor /= 2
    return replace(network, profile=network.profile.scaled(factor), payload=max(1, int(network.payload * factor)))


def bench_emulated(
    names: Sequence[str], *, count: int, seed: int, congestion: str = "", alone: bool = False, backend: str = AUTO,
    say: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """What `shoal bench networks --emulate --json` prints: for the networks called `names`, or the first `count` of `seed` that
    fit. `congestion`: TCP congestion control of all hosts, in place of that which was drawn; `alone`: without libtorrent.
    UsageError for a network that does not fit, and where links cannot be emulated."""
    if not 1 <= count <= MOST_EMULATED or seed < 0:
        raise UsageError(f"{count} networks (1 to {MOST_EMULATED}) of seed {seed} (0 or more)")
    if congestion and congestion not in (known := available_congestion()):
        raise UsageError(f"the kernel has no congestion control {congestion!r}: {', '.join(known)}")
    networks = [draw_by_name(name) for name in names] or list(islice(_fitting(seed), count))
    for network in networks:
        if not fits(network):
            most = f"{MOST_NODES} nodes and {LONGEST_S:g} s of T*"
            raise UsageError(f"{network.name} is not emulated: want steady rates, at most {most}")
    why = "not asked for" if alone else missing(OTHER)
    if why and not alone:
        say(f"without {OTHER}: {why}")
    found = []
    for network in networks:
        small = scaled(network)
        small = replace(small, profile=replace(small.profile, congestion=congestion or small.profile.congestion))
        found.append(_emulate(small, against=not why, backend=backend, say=say))
        say(told(found[-1]))
    result = summary(found, against=not why)
    against = f", {result['ahead']} before {OTHER}" if not why else ""
    say(f"of {len(found)} networks {result['near']} within {NEAR:.0%} of the simulator{against}")
    return result


def _fitting(seed: int) -> Iterator[DrawnNetwork]:
    return (network for index in count_from() if fits(network := draw_network(seed, index)))


def _emulate(network: DrawnNetwork, *, against: bool, backend: str, say: Callable[[str], None]) -> EmulatedNetwork:
    say(f"{describe(network)}; rates times {network.profile.scale:g}")
    versions = min(network.versions, VERSIONS)
    simulated = [v.t_max for v in measure_network(network).versions[1:versions]]
    ours, failures = _run(OURS, network, versions, backend)
    others, others_failed = _run(OTHER, network, versions, backend) if against else ([], [])
    later = ours[1:]
    return EmulatedNetwork(
        network, profile_bound(network.profile, network.payload), simulated=_median(simulated),
        emulated=_median([r["t_max"] for r in later]) if len(ours) == versions else None,
        other=_median([r["t_max"] for r in others[1:]]) if len(others) == versions else None,
        first=ours[0]["t_max"] if ours else None, copies=_median([r["source_share"] for r in later]) or 0.0,
        duplicates=_median([r["duplicate_bytes"] / network.payload for r in later]) or 0.0,
        dropped=_median([r["dropped"] for r in later]) or 0.0,
        late_s=max((r["late_ms"] for r in ours), default=0.0) / 1e3, failures=(*failures, *others_failed),
    )  # fmt: skip


def _run(peer: str, network: DrawnNetwork, versions: int, backend: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The rounds that were whole, as `round_values` has them, and why others were not."""
    scenario = Scenario(
        network.name, network.profile, network.payload, peer, rounds=versions - 1, warm_up=1, seed=1, faults=(), require=Require()
    )
    try:
        rounds = run_scenario(scenario, backend=backend)["rounds"]
    except UsageError:
        raise
    except ShoalError as error:
        return [], [f"{peer}: {error}"]
    return [r for r in rounds if r["t_max"] is not None], [f"{peer}: {describe_round(r)}" for r in rounds if r["t_max"] is None]


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def told(one: EmulatedNetwork) -> str:
    """One line about it."""
    late = f", the emulator {1e3 * one.late_s:.0f} ms late" if one.late_s > 0.01 else ""
    failed = f"; {'; '.join(one.failures)}" if one.failures else ""
    return (
        f"  T* {one.t_star:.2f} s: simulated {_s(one.simulated)}, emulated {_s(one.emulated)} (first "
        f"{_s(one.first)}; {one.copies:.2f} copies, {one.duplicates:.2f} came twice, {one.dropped:.0f} packets "
        f"dropped), {OTHER} {_s(one.other)}{late}{failed}"
    )


def _s(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def summary(found: Sequence[EmulatedNetwork], *, against: bool) -> dict[str, Any]:
    """Each network, and of how many the emulation is near the simulator's and ahead of libtorrent's time. ok: of all."""
    near, ahead = sum(one.near for one in found), sum(one.ahead for one in found)
    return {
        "ok": near == len(found) and (not against or ahead == len(found)), "count": len(found), "near": near,
        "ahead": ahead if against else None,
        "networks": [
            {
                "name": one.network.name, "what": describe(one.network), "scale": one.network.profile.scale,
                "congestion": one.network.profile.congestion,
                "payload_bytes": one.network.payload, "t_star": one.t_star, "simulated": one.simulated, "emulated": one.emulated,
                "r": None if one.emulated is None else (one.emulated - delays_of(one.network)) / one.t_star, "first": one.first,
                OTHER: one.other, "copies": one.copies, "duplicates": one.duplicates,
                "dropped": one.dropped, "late_ms": 1e3 * one.late_s, "near": one.near, "ahead": one.ahead,
                "failures": list(one.failures),
            }
            for one in found
        ],
    }  # fmt: skip
