"""`shoal bench networks --nodes A,B`: large swarms of equal nodes in the simulator, and the control messages that they cost.

What nodes say to each other during a version (announcements, wants, credits of pulls) is counted as it is sent, its bytes from
every SAMPLE-th message; what the head tells them of each other is made from production's own rosters. Must not know how a network
is drawn or simulated.
"""

from __future__ import annotations

import random
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Any

from netem.networks.profile import Profile, build_profile
from netem.simulator.flows import FlowNetwork
from netem.simulator.loop import BroadcastSimulation, SimResult
from netem.simulator.simulate import FULL_MESH, OWN_CORES
from netem.simulator.wire import make_version
from p2p.broadcast.peer_groups import Grid
from p2p.broadcast.policies.registry import DEFAULT
from p2p.broadcast.rosters import grouping_of
from p2p.errors import UsageError
from p2p.limits import KIB, MAX_CHUNK, MIB
from p2p.protocol.join import RosterEntry, make_roster
from p2p.protocol.wire import encode
from p2p.weights.encode import chunk_bytes_for

LEARNER_UP, UP, DOWN, DELAY_MS = 40, 20, 50, 25
"""Mbit/s, and milliseconds one way between two hosts: the network of the tables that end at 1,000 nodes."""

PAYLOAD = 32 * MIB
"""Bytes of a version. The work of a simulation grows with nodes times chunks; a publisher makes chunks of 64 KiB of it."""

SAMPLE = 257
"""One control message of so many is encoded for its length."""

ROSTERS = 100
"""Nodes whose rosters are made, evenly spread; the others' are as long."""

MOST = 20_000
"""Nodes of one swarm, at most."""


class CountingNetwork(FlowNetwork):
    """Counts the control messages that hosts send."""

    sent: Counter[str]
    """messages of each host"""
    kinds: Counter[str]
    """messages of each kind"""

    def __init__(self, profile: Profile, draw: random.Random | None = None) -> None:
        super().__init__(profile, draw)
        self.begin()

    def send_small(self, now: float, source: str, target: str, size: int, tag: object = None) -> None:
        """See `FlowNetwork.send_small`."""
        kind = type(tag).__name__
        self.sent[source] += 1
        self.kinds[kind] += 1
        if self.kinds[kind] % SAMPLE == 1:
            self._samples[kind] += 1
            self._sampled[kind] += len(encode(tag))  # type: ignore[arg-type]  # tags of small messages are messages
        super().send_small(now, source, target, size, tag)

    def begin(self) -> None:
        """Count from here on."""
        self.sent, self.kinds = Counter[str](), Counter[str]()
        self._sampled, self._samples = Counter[str](), Counter[str]()  # bytes of those that were encoded, and how many

    def bytes_of(self, kind: str) -> float:
        """Of one message, in the mean of the sample."""
        return self._sampled[kind] / max(1, self._samples[kind])


def bench_scale(
    counts: Sequence[int], *, rounds: int, seed: int, chunk: int = 0, say: Callable[[str], None]
) -> dict[str, Any]:
    """What `shoal bench networks --nodes A,B --json` prints. `chunk`: bytes; 0 for what a publisher makes. UsageError for numbers
    that make no swarm."""
    chunk = chunk or chunk_bytes_for(PAYLOAD)
    if rounds < 1 or seed < 0 or not counts or not all(2 <= n <= MOST for n in counts) or not KIB <= chunk <= MAX_CHUNK:
        raise UsageError(
            f"swarms of {list(counts)} nodes (2 to {MOST}), {rounds} versions (1 or more), seed {seed} (0 or more), chunks of "
            f"{chunk} bytes ({KIB} to {MAX_CHUNK})"
        )
    rows = list[dict[str, Any]]()
    for count in counts:
        for row in measure_swarm(count, rounds=rounds, seed=seed, chunk=chunk):
            rows.append(row)
            say(describe(row))
    return {"seed": seed, "payload": PAYLOAD, "chunk": chunk, "versions": rows}


def measure_swarm(count: int, *, rounds: int, seed: int, chunk: int) -> Iterator[dict[str, Any]]:
    """One row a version, as soon as it is everywhere: the next may take an hour."""
    began, cpu = time.monotonic(), time.process_time()
    profile = swarm_of(count)
    grid = Grid({host.name: host.site for host in profile.hosts[1:]}, mesh=FULL_MESH - 1)
    simulation = BroadcastSimulation(
        profile, policy=DEFAULT, seed=seed, grid=grid, faults=(), fault_round=1, unnoticed_s=0.0, machine=OWN_CORES,
        network=CountingNetwork,
    )  # fmt: skip
    network = simulation.network
    assert isinstance(network, CountingNetwork)
    told = roster_bytes(grid, profile)
    for number in range(1, rounds + 1):
        network.begin()
        result = simulation.round(make_version(number, PAYLOAD, chunk))
        took = {"cpu_s": time.process_time() - cpu, "wall_s": time.monotonic() - began}
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        values = _values(result, network, simulation.source, count)
        yield {"nodes": count, "version": number, **values, "roster_bytes": told, **took, "peak_mib": peak}
        began, cpu = time.monotonic(), time.process_time()


def swarm_of(count: int) -> Profile:
    """A learner and so many equal nodes."""
    link = {"up_mbit": UP, "down_mbit": DOWN, "delay_ms": DELAY_MS / 2}
    return build_profile({"learner": link | {"up_mbit": LEARNER_UP}, "nodes": [link | {"count": count}]}, f"{count} nodes")


def _values(result: SimResult, network: CountingNetwork, source: str, count: int) -> dict[str, Any]:
    kinds = {
        kind: {"messages_a_node": n / count, "bytes_each": network.bytes_of(kind)} for kind, n in network.kinds.most_common()
    }
    control = sum(n * network.bytes_of(kind) for kind, n in network.kinds.items())
    return {
        "t_s": result.t_max, "ratio": result.ratio, "source_share": result.source_bytes / PAYLOAD,
        "duplicates": result.duplicate_bytes / (PAYLOAD * count), "events": result.events, "kinds": kinds,
        "control_bytes_a_node": control / count, "control_share": control / count / PAYLOAD,
        "learner_messages": network.sent[source],
        "most_messages_of_a_node": max((n for host, n in network.sent.items() if host != source), default=0),
    }  # fmt: skip


def roster_bytes(grid: Grid, profile: Profile) -> float:
    """Bytes of the roster and the grouping that the head tells a node once it has all its neighbours, in the mean."""
    names = [host.name for host in profile.hosts[1:]]
    entries = {name: RosterEntry(f"12D3KooW{name:x>44}", ("/ip4/203.0.113.201/tcp/40001",), name) for name in names}
    found = []
    for name in names[:: max(1, len(names) // ROSTERS)]:
        places = grid.places(name)
        listed = names if places is None else list(places.groups)
        roster = make_roster(1, [entries[other] for other in listed if other in entries])
        found.append(len(encode(roster)) + len(encode(grouping_of(places))))
    return fmean(found)


def describe(row: dict[str, Any]) -> str:
    """One line for people."""
    kinds = ", ".join(f"{kind} {of['messages_a_node']:.0f} of {of['bytes_each']:.0f} bytes" for kind, of in row["kinds"].items())
    return (
        f"{row['nodes']} nodes, version {row['version']}: T {row['t_s']:.1f} s, {row['ratio']:.3f} T*; the learner sent "
        f"{row['source_share']:.2f} copies and {row['learner_messages']} messages; came twice {row['duplicates']:.2%}; control "
        f"messages a node: {kinds}: {row['control_bytes_a_node'] / 1e3:.0f} kB, {row['control_share']:.2%} of the payload; "
        f"a roster is {row['roster_bytes'] / 1e3:.0f} kB; simulated in {row['cpu_s']:.0f} s of a core, "
        f"{row['peak_mib'] / 1024:.1f} GiB"
    )
