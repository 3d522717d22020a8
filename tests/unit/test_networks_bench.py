"""Drawn networks: the same from a seed everywhere, of the stratum that they say; bounds over changing rates; what counts."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from netem.bench.networks.bench import bench_networks, meets, within
from netem.bench.networks.draw import BOUNDS, LONGEST_S, bound_of, draw_by_name, draw_network
from netem.bench.networks.measure import measure_network
from netem.bench.networks.table import print_networks, scenario_text
from netem.contest.scenario import load_scenario
from netem.networks.bound import profile_bound, traced_bound
from netem.networks.profile import Profile, build_profile
from netem.simulator.flows import FlowNetwork
from netem.simulator.simulate import simulate
from p2p.broadcast.policies.seeding import LATE, LATE_S
from p2p.broadcast.session import Session
from p2p.errors import UsageError
from p2p.limits import MIB


def two(**node: object) -> Profile:
    """A learner of 10 Mbit/s and one node of 8, 20 down."""
    group = {"name": "n", "up_mbit": 8.0, "down_mbit": 20.0, "delay_ms": 5.0, **node}
    return build_profile({"learner": {"up_mbit": 10.0, "down_mbit": 10.0, "delay_ms": 5.0}, "nodes": [group]}, "test")


def test_a_seed_and_a_number_say_what_is_drawn() -> None:
    """Figures as they were drawn on the first machine: another must draw the same."""
    assert draw_network(1, 8) == draw_by_name("net-1-8") != draw_network(2, 8)
    network = draw_network(1, 8)
    assert (network.bound, network.kind, network.payload, len(network.profile.hosts)) == ("sum", "steady", 41_600_000, 5)
    assert network.profile.learner.access.up == 28_000_000.0


def test_networks_are_of_their_stratum() -> None:
    for index in range(60):
        network = draw_network(7, index)
        assert network.bound == BOUNDS[index % 3] == bound_of(network.profile)
        assert profile_bound(network.profile, network.payload) <= LONGEST_S
        assert (network.kind == "steady") == (not any(host.trace for host in network.profile.hosts))


def test_no_such_network() -> None:
    with pytest.raises(UsageError, match="net-SEED-INDEX"):
        draw_by_name("net-1")
    with pytest.raises(UsageError, match="networks"):
        bench_networks([], count=0, seed=1, jobs=1, say=lambda line: None)


def test_a_bound_over_changing_rates_is_what_passes_each_cut() -> None:
    assert traced_bound(two(), 10**6, 3.0) == pytest.approx(profile_bound(two(), 10**6))
    profile = two(trace=[[2, 8, 1], [4, 8, 20]])
    assert traced_bound(profile, 2_500_000, 0.0) == pytest.approx(2.0)  # 20 Mbit before the node's downlink falls
    # From 2 s on: 2 Mbit in two seconds, and the other 18 at 20 Mbit/s.
    assert traced_bound(profile, 2_500_000, 2.0) == pytest.approx(2.9)


def test_lost_packets_take_a_share_of_the_link_and_keep_their_order() -> None:
    profile = two(loss=0.1, jitter_ms=5.0)
    network, other = FlowNetwork(profile, Random(1)), FlowNetwork(profile)
    for link in (network, other):
        for number in range(20):
            link.send(0.0, "learner", "n-1", 12_500, number)
    came, smooth = network.advance(10.0), other.advance(10.0)
    assert [arrival.tag for arrival in came] == [arrival.tag for arrival in smooth] == list(range(20))
    assert smooth[-1].at == pytest.approx(0.2 + 0.01) and 0.2 / 0.9 + 0.01 < came[-1].at < 0.2 / 0.9 + 0.08


def test_a_fast_long_way_to_one_node_is_filled() -> None:
    """Chunks under way are bounded in bytes: 32 small ones would be a third of this way's rate."""
    link = {"delay_ms": 50.0, "queue_ms": 60.0, "down_mbit": 88.0}
    profile = build_profile({"learner": {**link, "up_mbit": 125.0}, "nodes": [{**link, "up_mbit": 9.0}]}, "test")
    *_, warm = simulate(profile, 16 * MIB, rounds=2)
    assert (warm.t_max - 3 * 0.1) / warm.t_star < 1.1


def test_where_the_learners_uplink_is_the_bound_strong_nodes_leave_it_one_copy() -> None:
    """The network on which versions took up to 1.5 T* and as many copies (see bench/networks.md)."""
    rates = {"down_mbit": 150.0, "delay_ms": 7.5}
    nodes = [{"name": f"n{up}", "up_mbit": float(up), **rates} for up in (3, 8, 15, 30, 60, 100)]
    results = simulate(build_profile({"learner": {"up_mbit": 30.0, **rates}, "nodes": nodes}, "test"), 16 * MIB, rounds=3)
    for warm in results[1:]:
        assert warm.source_bytes <= 1.05 * 16 * MIB and warm.ratio < 1.12


def test_the_source_does_not_send_what_a_distributor_is_bringing() -> None:
    session = Session(me="s", source=None, now=0.0)
    for peer in ("a", "b"):
        session.join(peer, (), 0.0)
    session.hold(0, None, duty=0, now=0.0)
    session.peer_wants("a", [0], 0.0)
    assert (pushed := session.next(["a"], 0.0)) is not None and pushed.duty  # by push: the want was for what was still to go out
    session.peer_wants("b", [0], 1.0)
    assert session.next(["b"], 1.0) is None
    late = LATE_S + LATE * 1.2
    session.peer_wants("b", [0], late)
    assert session.next(["b"], late) == ("b", 0, 0)


def test_percentiles_and_targets() -> None:
    assert [within([1.0, 2.0, 3.0, 4.0], share) for share in (0.5, 0.9, 0.99)] == [2.0, 4.0, 4.0]
    assert meets({"large": {"p50": 1.05, "p99": 1.15, "most": 1.3}, "first": {}, "small": {}, "copies": {}})
    assert not meets({"large": {"p50": 1.06}, "first": {}, "small": {}, "copies": {}})


def test_a_network_is_measured_said_and_written(tmp_path, capsys) -> None:
    measured = measure_network(draw_by_name("net-1-42"))
    assert [v.number for v in measured.versions] == [1, 2, 3, 4] and all(v.copies >= 1 for v in measured.versions)
    result = bench_networks(["net-1-42"], count=1, seed=1, jobs=1, say=lambda line: None)
    print_networks(result, each=True)
    assert "version 4" in capsys.readouterr().out
    (tmp_path / "one.toml").write_text(scenario_text(measured.network))
    scenario = load_scenario(tmp_path / "one.toml")
    assert scenario.payload_bytes == measured.network.payload and scenario.t_star == pytest.approx(measured.versions[0].t_star)


def test_a_slow_downlink_is_sent_little_twice_and_what_became_faster_is_followed() -> None:
    """One of eight nodes has 1.45 Mbit/s down: it was sent half of each version by its distributors and by the source, r 1.24 to
    1.41. And a learner of 10 to 28 Mbit/s: 1.21 and 1.49."""
    slow = measure_network(replace(draw_by_name("net-21-34"), versions=3)).versions
    assert max(v.r for v in slow) < 1.15 and max(v.duplicates for v in slow) < 0.3 and slow[-1].r < 1.08
    rising = measure_network(draw_by_name("net-2-32")).versions
    assert max(v.r for v in rising[1:]) < 1.3
