"""Simulated broadcasts: the same twice, closed forms where there are some, and everything everywhere under every fault."""

from __future__ import annotations

import os

import pytest

from netem.bench.broadcast.prediction import foretell
from netem.contest.scenario import find_scenario
from netem.networks.faults import Corrupt, Join, Kill, SetRates, Withhold
from netem.networks.profile import Profile, build_profile
from netem.simulator.cores import Cores, Machine
from netem.simulator.flows import FlowNetwork
from netem.simulator.loop import SimFault, SimResult
from netem.simulator.simulate import simulate
from netem.simulator.wire import HEAD, RUN, count_chunks, make_version, wire_bytes
from p2p.broadcast.policies.registry import POLICIES
from p2p.errors import ShoalError, UsageError
from p2p.limits import DEFAULT_SEGMENT, KIB, MIB
from p2p.weights.manifest import open_header

CHUNK = 64 * KIB
NODES = 5


def network(
    *, nodes: int = NODES, up: float = 40.0, node_up: float = 20.0, down: float = 100.0, delay_ms: float = 10.0, mtu: int = 9000
) -> Profile:
    """Rates in Mbit/s; every pair of hosts is 2 delays apart."""
    node = {"name": "n", "count": nodes, "up_mbit": node_up, "down_mbit": down, "delay_ms": delay_ms, "queue_ms": 200.0}
    learner = {"up_mbit": up, "down_mbit": down, "delay_ms": delay_ms, "queue_ms": 200.0}
    return build_profile({"mtu": mtu, "learner": learner, "nodes": [node]}, "test")


def broadcast(profile: Profile, payload: int, **options: object) -> SimResult:
    return simulate(profile, payload, **{"chunk_bytes": CHUNK, **options})[0]  # type: ignore[arg-type]


def wire_seconds(payload: int, mbit: float, mtu: int = 9000, chunk: int = CHUNK) -> float:
    return 8 * payload / chunk * wire_bytes(chunk, mtu) / (mbit * 1e6)


# --- what travels


def test_a_version_is_cut_into_segments_and_those_into_chunks() -> None:
    size, payload = 192 * KIB, 2 * DEFAULT_SEGMENT + 200_001
    version = make_version(1, payload, size)
    manifest = open_header(version.parts[0], head_key=HEAD.public_key, run=RUN, min_epoch=0, now=0.0)
    chunks = [manifest.add(part, HEAD.public_key) for part in version.parts[1:]]
    assert manifest.whole and manifest.size == payload and manifest.mid == version.mid
    assert chunks == [list(range(43)), list(range(43, 86)), [86, 87], []] and count_chunks(payload, size) == 88
    whole = [size] * 42 + [DEFAULT_SEGMENT - 42 * size]
    assert [manifest.chunk_size(c) for c in range(88)] == [*whole, *whole, size, 200_001 - size]
    assert len({manifest.chunk_digest(c) for c in range(88)}) == 88


def test_wire_bytes_counts_the_heads_of_packets() -> None:
    assert wire_bytes(1, 1500) == 1 + 55 + 30 + 52
    assert wire_bytes(64 * KIB, 1500) == 64 * KIB + 55 + 2 * 30 + 46 * 52
    assert wire_bytes(64 * KIB, 9000) / (64 * KIB) == pytest.approx(1.0081, abs=1e-4)


# --- determinism


def test_the_same_seed_gives_the_same_results_to_the_last_bit() -> None:
    faults = (SetRates(at=0.3, host="n-2", up=5e6, down=50e6), Kill(at=0.6, host="n-3"))
    one, other = (simulate(network(), 2 * MIB, rounds=2, seed=7, faults=faults, fault_round=2) for _ in range(2))
    assert one == other
    assert [r.done for r in one] == [r.done for r in other] and one[0].events > 1000
    assert simulate(network(), 2 * MIB, seed=8)[0].done != one[0].done


# --- every policy


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_brings_every_chunk_everywhere(policy: str) -> None:
    first, second = simulate(network(), 3 * MIB + 12_345, chunk_bytes=CHUNK, policy=policy, rounds=2)
    for result in (first, second):
        assert set(result.done) == {f"n-{i + 1}" for i in range(NODES)}
        assert result.t_max == max(result.done.values()) >= result.t_median >= 0.99 * result.t_star
        assert result.ratio == result.t_max / result.t_star
        sent_at_least = {"star": NODES, "tree": 2}.get(policy, 1)
        assert result.source_bytes >= sent_at_least * (3 * MIB + 12_345)
    if policy != "shoal":
        assert first.duplicate_bytes == second.duplicate_bytes == 0


@pytest.mark.parametrize("mtu", [1500, 9000])
def test_a_star_takes_the_sources_uplink_times_the_nodes(mtu: int) -> None:
    _, warm = simulate(network(mtu=mtu), 8 * MIB, chunk_bytes=CHUNK, policy="star", rounds=2)
    assert warm.source_bytes == NODES * 8 * MIB
    assert warm.t_max == pytest.approx(NODES * wire_seconds(8 * MIB, 40, mtu), rel=0.03)


def test_a_chain_takes_its_slowest_uplink_and_a_chunk_for_each_peer() -> None:
    """M/u at the bottleneck, then one chunk and one delay a hop (Biersack, Rodriguez, Felber 2004, linear chain)."""
    _, warm = simulate(network(), 8 * MIB, chunk_bytes=CHUNK, policy="chain", rounds=2)
    hop = wire_seconds(CHUNK, 20) + 0.02
    assert warm.source_bytes == 8 * MIB
    assert warm.t_max == pytest.approx(wire_seconds(8 * MIB, 20) + NODES * hop, rel=0.05)


def test_a_tree_takes_twice_the_payload_at_an_inner_uplink() -> None:
    _, warm = simulate(network(nodes=6), 8 * MIB, chunk_bytes=CHUNK, policy="tree", rounds=2)
    assert warm.source_bytes == 2 * 8 * MIB
    assert warm.t_max == pytest.approx(wire_seconds(2 * 8 * MIB, 20), rel=0.05)


def test_the_default_comes_near_the_bound_and_leaves_the_source_one_copy() -> None:
    """Uplinks of the nodes suffice: the bound is M/u_s, with one copy from the source."""
    *_, warm = simulate(network(up=20, node_up=40), 8 * MIB, chunk_bytes=CHUNK, rounds=3)
    assert warm.t_star == pytest.approx(8 * 8 * MIB / 20e6)
    assert warm.source_bytes <= 1.1 * 8 * MIB
    assert warm.ratio < 1.15


def test_the_default_uses_all_uplinks() -> None:
    *_, warm = simulate(network(), 8 * MIB, chunk_bytes=CHUNK, rounds=3)
    assert warm.t_star == pytest.approx(5 * 8 * 8 * MIB / 140e6)
    assert warm.ratio < 1.1
    assert warm.duplicate_bytes <= 0.05 * 8 * MIB


def test_hosts_of_one_site_use_their_lan() -> None:
    group = {"count": 3, "up_mbit": 5.0, "down_mbit": 100.0, "delay_ms": 10.0, "site": "room"}
    learner = {"up_mbit": 20.0, "down_mbit": 20.0, "delay_ms": 10.0}
    profile = build_profile({"sites": {"room": {"preset": "lan"}}, "learner": learner, "nodes": [group]}, "test")
    assert broadcast(profile, 2 * MIB).t_max < 1.5 * 8 * 2 * MIB / 20e6  # over 5 Mbit/s uplinks alone it takes longer


# --- faults


def test_a_killed_relay_does_not_end_a_round() -> None:
    result = broadcast(network(), 4 * MIB, faults=[Kill(at=0.5, host="n-2")])
    assert set(result.done) == {"n-1", "n-3", "n-4", "n-5"}
    assert result.t_max < 4 * result.t_star


def test_a_relay_that_is_gone_without_a_word() -> None:
    silent = broadcast(network(), 4 * MIB, faults=[Kill(at=0.5, host="n-2")], unnoticed_s=20.0)
    assert set(silent.done) == {"n-1", "n-3", "n-4", "n-5"}
    assert silent.t_max < 20.0  # nobody waited for the connection to end


def test_a_withholding_relay_only_costs_time() -> None:
    honest = broadcast(network(), 4 * MIB)
    withheld = broadcast(network(), 4 * MIB, faults=[Withhold(at=0.0, host="n-2")])
    assert set(withheld.done) == set(honest.done)
    assert honest.t_max < withheld.t_max < 6 * honest.t_max
    assert withheld.source_bytes > honest.source_bytes


def test_a_late_joiner_gets_everything_and_takes_part_in_the_next_round() -> None:
    first, second = simulate(network(), 4 * MIB, chunk_bytes=CHUNK, rounds=2, faults=[Join(at=1.0, host="n-5")])
    assert set(first.done) == set(second.done) == {f"n-{i + 1}" for i in range(NODES)}
    assert 1.0 + wire_seconds(4 * MIB, 100) < first.done["n-5"] < 4 * first.t_star
    after_all = broadcast(network(), 4 * MIB, faults=[Join(at=10.0, host="n-5")])
    assert 10.0 + wire_seconds(4 * MIB, 100) < after_all.done["n-5"] < 20.0
    assert after_all.source_bytes < 3 * 4 * MIB  # it is fed by its neighbours


def test_rates_that_fall_are_paid_for() -> None:
    faults = [SetRates(at=0.2, host=f"n-{i + 1}", up=2e6, down=100e6) for i in range(NODES)]
    assert broadcast(network(), 4 * MIB, faults=faults).t_max > 1.5 * broadcast(network(), 4 * MIB).t_max


def test_a_round_that_cannot_end_is_given_up() -> None:
    with pytest.raises(ShoalError, match="no chunk has moved for 120 s; lacking at n-1"):
        broadcast(network(nodes=1), MIB, faults=[SetRates(at=0.1, host="n-1", up=1e6, down=0.0)])


# --- what is refused


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"policy": "flood"}, "no policy 'flood'"),
        ({"faults": [Kill(at=1.0, host="nobody")]}, "the host must be one of the profile's"),
        ({"faults": [Kill(at=1.0, host="learner")]}, "and not the source"),
        ({"faults": [Corrupt(at=1.0, host="n-1")]}, "the simulator knows no Corrupt"),
        ({"fault_round": 2}, "faults in round 2: there are 1 rounds"),
        ({"chunk_bytes": 0}, "chunks of 0"),
    ],
)
def test_arguments_that_make_no_broadcast(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        broadcast(network(), MIB, **options)


def test_a_mesh_of_many_is_refused() -> None:
    with pytest.raises(UsageError, match="33 hosts cannot all know each other"):
        broadcast(network(nodes=32), MIB, policy="star")
    assert len(broadcast(network(nodes=31), 64 * KIB, policy="star").done) == 31


# --- groups


def test_groups_of_many_nodes_cost_little_against_a_mesh_of_few() -> None:
    """T / T* of 48 equal nodes in groups, linked to a third of the others, against that of 12 in a full mesh."""
    few, many = (simulate(network(nodes=n), 8 * MIB, chunk_bytes=CHUNK, rounds=2)[-1] for n in (12, 48))
    assert len(many.done) == 48
    assert many.ratio < 1.15 * few.ratio
    assert many.source_bytes < 4 * 8 * MIB
    assert many.duplicate_bytes < 0.01 * 48 * 8 * MIB


@pytest.mark.parametrize(
    ("faults", "unnoticed_s"),
    [
        ([Kill(at=0.4, host=f"n-{i}") for i in (1, 9, 17)], 0.0),
        ([Kill(at=0.4, host="n-5")], 20.0),
        ([Withhold(at=0.0, host="n-3"), Withhold(at=0.0, host="n-11")], 0.0),
        ([Join(at=0.8, host="n-7")], 0.0),
    ],
    ids=["killed", "silent", "withholding", "late"],
)
def test_groups_get_over_what_single_nodes_do(faults: list[SimFault], unnoticed_s: float) -> None:
    result = broadcast(network(nodes=20), 2 * MIB, faults=faults, unnoticed_s=unnoticed_s, mesh=8)
    killed = {f.host for f in faults if isinstance(f, Kill)}
    assert set(result.done) == {f"n-{i + 1}" for i in range(20)} - killed
    assert result.t_max < 12.0


def test_a_version_crosses_into_each_site_about_once() -> None:
    """The uplinks of the nodes carry what leaves a site: with one copy into each of three, two thirds of a version each."""
    sites = {name: {"preset": "lan"} for name in ("east", "west", "north")}
    nodes = [
        {"name": site, "count": 6, "up_mbit": 10.0, "down_mbit": 100.0, "delay_ms": 10.0, "queue_ms": 200.0, "site": site}
        for site in sites
    ]
    learner = {"up_mbit": 40.0, "down_mbit": 100.0, "delay_ms": 10.0, "queue_ms": 200.0}
    profile = build_profile({"mtu": 9000, "sites": sites, "learner": learner, "nodes": nodes}, "test")
    crossing = {site: 0 for site in sites}
    site_of = {host.name: host.site for host in profile.hosts}
    send = FlowNetwork.send

    def counted(self: FlowNetwork, now: float, source: str, target: str, size: int, tag: object = None) -> bool:
        if site_of[source] != site_of[target] and site_of[target]:
            crossing[site_of[target]] += size
        return send(self, now, source, target, size, tag)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlowNetwork, "send", counted)
        first, result = simulate(profile, 8 * MIB, chunk_bytes=CHUNK, rounds=2)
    assert len(result.done) == 18
    for size in crossing.values():
        assert 2 * 8 * MIB <= size <= 1.05 * 2 * 8 * MIB, "two versions, each of them once"
    assert first.t_max < 1.4 * wire_seconds(8 * MIB, 40) and result.t_max < 1.2 * wire_seconds(8 * MIB, 40)


def test_each_peer_has_a_core_unless_the_machine_says_otherwise() -> None:
    alone, shared = Cores(Machine(chunk_s=0.5)), Cores(Machine(cores=2, chunk_s=0.5))
    assert [alone.done(1.0, peer) for peer in "abac"] == [1.5, 1.5, 2.0, 1.5]
    # Two cores for three peers: the third waits, and one peer does one thing at a time even with a core free.
    assert [shared.done(1.0, peer) for peer in "abc"] == [1.5, 1.5, 2.0]
    assert [shared.done(5.0, peer) for peer in "aab"] == [5.5, 6.0, 5.5]


def test_a_short_broadcast_waits_for_cores_and_not_for_links() -> None:
    machines = [Machine(cores, 0.004) for cores in (None, 64, 2)]
    ratios = [simulate(network(), MIB, chunk_bytes=16 * KIB, rounds=2, machine=machine)[-1].ratio for machine in machines]
    assert ratios[0] == ratios[1]
    # 64 chunks for 5 nodes, 4 ms each, on two cores.
    assert ratios[2] > 0.64 / simulate(network(), MIB)[0].t_star > ratios[0]


def test_the_simulator_is_told_what_the_emulation_cost() -> None:
    small = find_scenario("small")
    free, dear = (foretell(small, "shoal", 2, cpu_s, duplicate_bytes=0) for cpu_s in (0.1, 4.0))
    assert free["cores"] == os.cpu_count() and dear["chunk_ms"] == pytest.approx(40 * free["chunk_ms"])
    assert free["links_ratio"] == dear["links_ratio"]
    assert free["ratio"] == pytest.approx(free["links_ratio"], rel=0.03)
    assert dear["ratio"] > 4.0 / os.cpu_count() / small.t_star  # type: ignore[operator]
