"""One drawn network in the simulator: its versions, each against what no schedule can beat. Pure.

Must not know how networks are drawn, nor what is required of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from netem.bench.networks.draw import DrawnNetwork
from netem.networks.bound import traced_bound
from netem.simulator.simulate import simulate
from netem.simulator.wire import wire_bytes
from p2p.errors import ShoalError
from p2p.weights.encode import chunk_bytes_for

LARGE_DELAYS, SMALL_DELAYS = 3, 5
"""One-way delays of the farthest node that are taken off: to a distributor, from it, and for news of it; for small payloads a
request and its answer as well."""


@dataclass(frozen=True, slots=True)
class MeasuredVersion:
    """One version over one network."""

    number: int
    """from 1"""
    t_star: float
    """the bound, at the rates in force from its publication on"""
    t_max: float
    """seconds until every node had it"""
    r: float
    """(t_max - delays) / t_star"""
    copies: float
    """what the source sent, in payloads"""
    duplicates: float
    """what reached nodes that had it, in payloads"""


@dataclass(frozen=True, slots=True)
class MeasuredNetwork:
    network: DrawnNetwork
    heads: float
    """bytes on a link for a byte of payload: heads of packets and records"""
    versions: tuple[MeasuredVersion, ...]
    error: str = ""
    """why there are none"""


def measure_network(network: DrawnNetwork, *, seed: int = 0, known: bool = False) -> MeasuredNetwork:
    """Send all versions of `network`, one after another. `known`: hosts know their uplinks from the beginning."""
    size = chunk_bytes_for(network.payload, nodes=len(network.profile.hosts) - 1)
    heads = wire_bytes(size, network.profile.mtu) / size
    try:
        results = simulate(network.profile, network.payload, rounds=network.versions, seed=seed, packets=True, known=known)
    except ShoalError as error:
        return MeasuredNetwork(network, heads, (), str(error))
    taken_off = delays_of(network)
    versions = []
    for number, result in enumerate(results, 1):
        t_star = traced_bound(network.profile, network.payload, result.began)
        versions.append(MeasuredVersion(
            number, t_star, result.t_max, (result.t_max - taken_off) / t_star, copies=result.source_bytes / network.payload,
            duplicates=result.duplicate_bytes / network.payload,
        ))  # fmt: skip
    return MeasuredNetwork(network, heads, tuple(versions))


def delays_of(network: DrawnNetwork) -> float:
    """Seconds of one-way delays that r leaves out."""
    return (LARGE_DELAYS if network.large else SMALL_DELAYS) * network.farthest_s
