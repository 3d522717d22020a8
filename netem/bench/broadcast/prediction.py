"""What the simulator says of a broadcast that was emulated: the links alone, and with the machine that the emulation ran on.

An emulated swarm shares the cores of one machine. The simulator is told how many, and what a chunk cost them in the very
rounds that it is compared with: with that it must agree, or one of the two is wrong. Must not know how either is run.
"""

from __future__ import annotations

import os
from statistics import median
from typing import Any

from netem.contest.scenario import Scenario
from netem.simulator.cores import Machine
from netem.simulator.simulate import OWN_CORES, simulate
from netem.simulator.wire import count_chunks
from p2p.weights.encode import chunk_bytes_for

SEEDS = 3
"""Simulations, each with a seed of its own, whose median counts."""


def foretell(scenario: Scenario, policy: str, rounds: int, cpu_s: float, duplicate_bytes: int) -> dict[str, Any]:
    """`ratio`: t_max / T* of the last of `rounds`, on cores shared as here, `chunk_ms` for each chunk that arrived (its
    sender's, its receiver's and everybody's idle work in it), of which `cpu_s` core seconds in one round are the sum.
    `links_ratio`: the same where each peer has a core. Medians over SEEDS."""
    size = chunk_bytes_for(scenario.payload_bytes)
    arrived = count_chunks(scenario.payload_bytes, size) * (len(scenario.profile.hosts) - 1) + duplicate_bytes / size
    shared = Machine(cores=os.cpu_count(), chunk_s=cpu_s / arrived)
    return {
        "ratio": _ratio(scenario, policy, rounds, shared), "links_ratio": _ratio(scenario, policy, rounds, OWN_CORES),
        "cores": shared.cores, "chunk_ms": 1e3 * shared.chunk_s,
    }  # fmt: skip


def _ratio(scenario: Scenario, policy: str, rounds: int, machine: Machine) -> float:
    return median(
        simulate(
            scenario.profile, scenario.payload_bytes, policy=policy, rounds=rounds, seed=seed, machine=machine, mesh=scenario.mesh
        )[-1].ratio
        for seed in range(SEEDS)
    )  # fmt: skip
