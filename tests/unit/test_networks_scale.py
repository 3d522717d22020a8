"""Large swarms in the simulator: what is counted is what was sent, and it is the same again."""

from __future__ import annotations

import random

import pytest

from netem.bench.networks.scale import CountingNetwork, bench_scale, describe, measure_swarm, roster_bytes, swarm_of
from p2p.broadcast.peer_groups import Grid
from p2p.errors import UsageError
from p2p.limits import KIB
from p2p.protocol.versions import Have
from p2p.protocol.wire import encode

TOOK = ("cpu_s", "wall_s", "peak_mib")


def test_control_messages_of_a_swarm_are_counted() -> None:
    rows, again = (list(measure_swarm(40, rounds=2, seed=3, chunk=64 * KIB)) for _ in range(2))
    assert [row["version"] for row in rows] == [1, 2]
    for row, other in zip(rows, again, strict=True):
        assert {k: v for k, v in row.items() if k not in TOOK} == {k: v for k, v in other.items() if k not in TOOK}
        assert 1.0 < row["ratio"] < 1.3 and row["source_share"] >= 1
        have = row["kinds"]["Have"]
        assert have["messages_a_node"] > 40 and 20 < have["bytes_each"] < 200
        assert row["control_share"] < 0.01 and row["most_messages_of_a_node"] >= have["messages_a_node"]
        assert "40 nodes" in describe(row)


def test_bytes_are_those_of_the_sample() -> None:
    profile = swarm_of(2)
    network, node = CountingNetwork(profile, random.Random(0)), profile.hosts[1].name
    message = Have(b"m" * 32, (3, 4))
    for _ in range(5):
        network.send_small(0.0, node, "learner", 100, message)
    assert network.kinds == {"Have": 5} and network.sent == {node: 5}
    assert network.bytes_of("Have") == len(encode(message)) and network.bytes_of("Want") == 0
    network.begin()
    assert not network.kinds and not network.sent


def test_in_groups_a_roster_grows_with_the_neighbours_and_not_with_the_swarm() -> None:
    sizes = []
    for count in (31, 310, 3100):
        profile = swarm_of(count)
        sizes.append(roster_bytes(Grid({host.name: "" for host in profile.hosts[1:]}, mesh=31), profile))
    mesh, groups, many = sizes
    assert mesh > 31 * 60 and many < 5 * groups


@pytest.mark.parametrize(("counts", "rounds", "chunk"), [
    ([1], 2, 0), ([30_000], 2, 0), ([16], 0, 0), ([], 1, 0), ([16], 1, 100), ([16], 1, 1 << 30)
])  # fmt: skip
def test_what_is_no_swarm_is_told(counts, rounds, chunk) -> None:
    with pytest.raises(UsageError, match="swarms of"):
        bench_scale(counts, rounds=rounds, seed=0, chunk=chunk, say=print)
