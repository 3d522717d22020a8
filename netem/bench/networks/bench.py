"""`shoal bench networks`: drawn networks through the simulator, and what their versions come to.

Summing up is pure; `bench_networks` is the shell. Must not know how a network is drawn or simulated.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from netem.bench.networks.draw import BOUNDS, KINDS, DrawnNetwork, draw_by_name, draw_network
from netem.bench.networks.measure import MeasuredNetwork, MeasuredVersion, measure_network
from p2p.errors import UsageError

SHARES = (0.5, 0.9, 0.99)
"""Parts of all versions of which it is said within how much they are."""

WORST = 12
"""Networks that are named, those with the versions farthest from the bound."""

TARGETS = {
    "large": {"p50": 1.05, "p99": 1.15, "most": 1.3}, "first": {"p99": 1.3}, "small": {"p99": 1.15}, "copies": {"most": 1.02},
}  # fmt: skip
"""What is asked of each class of versions; set before anything was measured."""

MOST_NETWORKS = 100_000
"""Networks of one run, at most."""


def bench_networks(
    names: Sequence[str], *, count: int, seed: int, jobs: int, say: Callable[[str], None], known: bool = False
) -> dict[str, Any]:
    """What `shoal bench networks --json` prints: for the networks called `names`, or the first `count` of `seed`. `known`: hosts
    know their uplinks from the beginning."""
    if not 1 <= count <= MOST_NETWORKS or seed < 0 or jobs < 1:
        raise UsageError(f"{count} networks (1 to {MOST_NETWORKS}) of seed {seed} (0 or more) in {jobs} processes (1 or more)")
    networks = [draw_by_name(name) for name in names] if names else [draw_network(seed, i) for i in range(count)]
    measured = []
    for one in _measure_all(networks, jobs, known):
        measured.append(one)
        if names:
            say(describe(one.network))
        if len(measured) % 20 == 0:
            say(f"{len(measured)} of {len(networks)} networks")
    head = {"seed": None if names else seed, "known": known}
    return {**head, "networks": [values_of(one) for one in measured], **summary(measured)}


def _measure_all(networks: Sequence[DrawnNetwork], jobs: int, known: bool) -> Iterator[MeasuredNetwork]:
    measure = partial(measure_network, known=known)
    if jobs == 1:
        yield from map(measure, networks)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap(measure, networks)


# --- summing up ----------------------------------------------------------------------------------------------------------


def within(values: Sequence[float], share: float) -> float:
    """The least of `values` that at least this part of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-round(1e6 * share * len(ordered)) // 1_000_000) - 1)]


def _row(values: Sequence[float]) -> dict[str, float | int]:
    row: dict[str, float | int] = {"versions": len(values)}
    if values:
        row |= {f"p{round(100 * share)}": within(values, share) for share in SHARES}
        row |= {"most": max(values), "over_1_10": sum(v > 1.10 for v in values) / len(values)}
    return row


def summary(measured: Sequence[MeasuredNetwork]) -> dict[str, Any]:
    """Percentiles of r by class, copies of the source, tenth against second versions, the worst by name."""
    pairs = [(one, version) for one in measured for version in one.versions]
    large = [p for p in pairs if p[0].network.large and p[1].number > 1]
    first = [p for p in pairs if p[0].network.large and p[1].number == 1]
    small = [p for p in pairs if not p[0].network.large]
    classes = {"large": large, "first": first, "small": [p for p in small if p[1].number > 1],
               "small_first": [p for p in small if p[1].number == 1]}  # fmt: skip
    rows = {name: _row([v.r for _, v in chosen]) for name, chosen in classes.items()}
    rows |= {f"large, {b}": _row([v.r for one, v in large if one.network.bound == b]) for b in BOUNDS}
    rows |= {f"large, {k}": _row([v.r for one, v in large if one.network.kind == k]) for k in KINDS}
    rows["large, one node"] = _row([v.r for one, v in large if len(one.network.profile.hosts) == 2])
    copies = [v.copies for one, v in large if one.network.bound == "source" and one.network.kind == "steady"]
    later = [one.versions[9].t_max / one.versions[1].t_max for one in measured
             if len(one.versions) >= 10 and one.network.kind == "steady"]  # fmt: skip
    rows |= {"copies": _row(copies), "tenth over second": _row(later)}
    each = [(one, max(one.versions, key=lambda v: v.r)) for one in measured if one.versions]
    worst = sorted(each, key=lambda p: -p[1].r)[:WORST]
    return {
        "rows": rows, "worst": [worst_values(one, version) for one, version in worst],
        "failed": {one.network.name: one.error for one in measured if one.error},
        "ok": not any(one.error for one in measured) and meets(rows),
    }  # fmt: skip


def meets(rows: dict[str, dict[str, Any]]) -> bool:
    """Whether every class that has versions keeps to TARGETS."""
    return all(rows[name].get(what, 0.0) <= most for name, asked in TARGETS.items() for what, most in asked.items())


def worst_values(one: MeasuredNetwork, version: MeasuredVersion) -> dict[str, Any]:
    network = one.network
    return {
        "name": network.name, "version": version.number, "r": version.r, "t_star": version.t_star, "copies": version.copies,
        "what": describe(network), "replay": f"shoal bench networks --replay {network.name}",
    }  # fmt: skip


def describe(network: DrawnNetwork) -> str:
    """One line; rates up/down in Mbit/s."""
    hosts = network.profile.hosts
    nodes = [f"{_short(h.access.up / 1e6)}/{_short(h.access.down / 1e6)}" for h in hosts[1:9]]
    more = f" and {len(hosts) - 9} more" if len(hosts) > 9 else ""
    source = network.profile.learner.access
    return (
        f"{network.name}: {network.bound}, {network.kind}, {network.payload / 2**20:.1f} MiB; learner "
        f"{_short(source.up / 1e6)}/{_short(source.down / 1e6)}; {len(hosts) - 1} nodes {', '.join(nodes)}{more}; farthest "
        f"{1e3 * network.farthest_s:.0f} ms; queues {1e3 * min(h.access.queue for h in hosts):.0f} to "
        f"{1e3 * max(h.access.queue for h in hosts):.0f} ms; MTU {network.profile.mtu}"
    )


def _short(value: float) -> str:
    return f"{value:.3g}"


def values_of(one: MeasuredNetwork) -> dict[str, Any]:
    network = one.network
    return {
        "name": network.name, "bound": network.bound, "kind": network.kind, "nodes": len(network.profile.hosts) - 1,
        "payload_bytes": network.payload, "heads": one.heads, "farthest_s": network.farthest_s, "error": one.error,
        "versions": [{"number": v.number, "t_star": v.t_star, "t_max": v.t_max, "r": v.r, "copies": v.copies,
                      "duplicates": v.duplicates} for v in one.versions],
    }  # fmt: skip
