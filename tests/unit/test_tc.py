"""A profile as commands: what is shaped how, who reaches whom, rates over time, and what the kernel counts."""

from __future__ import annotations

import json

import pytest

from netem.emulation.fabric import RateOverTime
from netem.emulation.tc import NetworkPlan, dropped_and_lost, netem_words, rate_commands, stats_commands, up_commands
from netem.networks.profile import PRESETS, Access, build_profile

PROFILE = {
    "mtu": 9000,
    "sites": {"lab": {"up_mbit": 1000, "down_mbit": 1000, "delay_ms": 0.1, "queue_ms": 10}},
    "learner": {"up_mbit": 40, "down_mbit": 50, "delay_ms": 12.5, "queue_ms": 100},
    "nodes": [
        {"name": "a", "up_mbit": 20, "down_mbit": 50, "delay_ms": 12.5, "jitter_ms": 2, "loss": 0.001, "site": "lab"},
        {"name": "b", "up_mbit": 20, "down_mbit": 50, "site": "lab"},
    ],
}
PLAN = NetworkPlan(build_profile(PROFILE, "test"), "shoal-7")


def lines(plan: NetworkPlan = PLAN) -> list[str]:
    return [" ".join(words) for words in up_commands(plan)]


def test_names() -> None:
    assert PLAN.namespaces == [
        "shoal-7--core", "shoal-7-learner", "shoal-7-a", "shoal-7-b", "shoal-7--gw-learner", "shoal-7--gw-a", "shoal-7--gw-b"
    ]
    assert len(set(PLAN.namespaces)) == 7
    # A host may be called as a gateway or the core is.
    hosts = [{"name": name, "up_mbit": 1, "down_mbit": 1} for name in ("a", "gw-a", "core")]
    odd = NetworkPlan(build_profile({"learner": {"up_mbit": 1, "down_mbit": 1}, "nodes": hosts}, "test"), "p")
    assert len(set(odd.namespaces)) == len(odd.namespaces) == 9
    assert [PLAN.address(h) for h in ("learner", "a", "b")] == ["10.77.0.1", "10.77.0.2", "10.77.0.3"]
    assert PLAN.neighbours("a") == ["10.77.0.3"] and PLAN.neighbours("learner") == []


def test_a_link_is_shaped_both_ways() -> None:
    """40 Mbit/s: 5000 bytes a millisecond, less than a frame of 9014; 100 ms of it are 500,000 bytes, and a packet."""
    up, down = "tc -n shoal-7--gw-learner {} dev wan {}", "tc -n shoal-7--core {} dev host0 {}"
    got = [line for line in lines() if line.startswith("tc") and ("gw-learner" in line or "dev host0" in line)]
    assert got == [
        up.format("qdisc add", "root handle 1: stab overhead -14 htb default 10"),
        up.format("class add", "parent 1: classid 1:10 htb rate 40000000bit burst 9014 cburst 9014 quantum 9014"),
        up.format("qdisc add", "parent 1:10 handle 101: netem limit 50000 delay 12.500000ms"),
        up.format("qdisc add", "parent 101:1 handle 102: bfifo limit 509000"),
        down.format("qdisc add", "root handle 1: stab overhead -14 htb default 10"),
        down.format("class add", "parent 1: classid 1:10 htb rate 50000000bit burst 9014 cburst 9014 quantum 9014"),
        down.format("qdisc add", "parent 1:10 handle 101: netem limit 50000 delay 12.500000ms"),
        down.format("qdisc add", "parent 101:1 handle 102: bfifo limit 634000"),
    ]


def test_a_site_has_a_lan_past_the_links() -> None:
    """Told apart by the other end's address: where to on the way up, where from on the way down. Without delay, jitter and loss
    there is no netem."""
    up, down = "tc -n shoal-7--gw-b {} dev wan {}", "tc -n shoal-7--core {} dev host2 {}"
    got = [line for line in lines() if line.startswith("tc -n shoal-7--gw-b")]
    assert got == [
        up.format("qdisc add", "root handle 1: stab overhead -14 htb default 10"),
        up.format("class add", "parent 1: classid 1:10 htb rate 20000000bit burst 9014 cburst 9014 quantum 9014"),
        up.format("qdisc add", "parent 1:10 handle 102: bfifo limit 259000"),
        up.format("class add", "parent 1: classid 1:20 htb rate 1000000000bit burst 125000 cburst 125000 quantum 9014"),
        up.format("qdisc add", "parent 1:20 handle 201: netem limit 50000 delay 0.100000ms"),
        up.format("qdisc add", "parent 201:1 handle 202: bfifo limit 1259000"),
        up.format("filter add", "parent 1: protocol ip prio 1 u32 match ip dst 10.77.0.2/32 flowid 1:20"),
    ]
    assert down.format("filter add", "parent 1: protocol ip prio 1 u32 match ip src 10.77.0.2/32 flowid 1:20") in lines()
    assert not any("u32" in line and "learner" in line for line in lines())


def test_what_netem_is_told() -> None:
    assert " ".join(netem_words(Access(1e6, 1e6, 0.0125, 0.002, 0.001))) == (
        "limit 50000 delay 12.500000ms 2.000000ms distribution normal rate 100gbit loss random 0.100000%"
    )
    assert netem_words(PRESETS["lan"]) == ["limit", "50000", "delay", "0.100000ms"]
    assert netem_words(PRESETS["starlink"])[-1] == "0.500000%" and netem_words(PRESETS["us-wan"])[-1] == "0.001000%"
    assert "delay" in netem_words(Access(1e6, 1e6, 0.0, loss=0.5)) and "distribution" not in netem_words(Access(1, 1, 1.0))


def test_who_reaches_whom() -> None:
    """Host and core know each other by the gateway between them, and nobody asks who has an address on a shaped link."""
    said = lines()
    for number, host in enumerate(("learner", "a", "b")):
        address, gateway, far = PLAN.address(host), f"shoal-7--gw-{host}", f"host{number}"
        for wanted in (
            f"ip netns add {gateway}",
            f"ip -n shoal-7-{host} link add shoal0 mtu 9000 type veth peer name lan mtu 9000 netns {gateway}",
            f"ip -n shoal-7-{host} addr add {address}/32 dev shoal0",
            f"ip -n shoal-7-{host} route add default via 169.254.1.1 dev shoal0 onlink src {address}",
            f"ip -n {gateway} route add {address}/32 dev lan",
            f"ip -n {gateway} route add default via 169.254.2.2 dev wan onlink",
            f"ip -n {gateway} neigh add 169.254.2.2 lladdr 02:53:48:02:00:0{number} dev wan nud permanent",
            f"ip -n shoal-7--core neigh add 169.254.2.1 lladdr 02:53:48:01:00:0{number} dev {far} nud permanent",
            f"ip -n shoal-7--core route add {address}/32 via 169.254.2.1 dev {far} onlink",
            f"ip netns exec {gateway} sh -c echo 1 > /proc/sys/net/ipv4/ip_forward",
        ):
            assert said.count(wanted) == 1, wanted
    devices = [words[words.index("dev") + 1] for words in up_commands(PLAN) if "dev" in words]
    assert set(devices) == {"shoal0", "lan", "wan", "host0", "host1", "host2"}


def test_rates_of_a_network_that_is_up() -> None:
    got = [" ".join(words) for words in rate_commands(PLAN, "b", 2e6, 0.0)]
    assert got == [
        "tc -n shoal-7--gw-b class change dev wan parent 1: classid 1:10 htb rate 2000000bit burst 9014 cburst 9014 quantum 9014",
        "tc -n shoal-7--gw-b qdisc change dev wan parent 1:10 handle 102: bfifo limit 34000",
        "tc -n shoal-7--core qdisc change dev host2 parent 1:10 handle 102: bfifo limit 1",
    ]
    assert "parent 101:1 handle 102:" in " ".join(rate_commands(PLAN, "a", 2e6, 1e6)[1])
    with pytest.raises(KeyError):
        rate_commands(PLAN, "nobody", 1.0, 1.0)


def test_rates_over_time() -> None:
    rate = RateOverTime(20.0, [(10.0, 2.0), (20.0, 4.0)])
    assert [rate.at(t) for t in (0.0, 9.9, 10.0, 25.0)] == [20.0, 20.0, 2.0, 4.0]
    rate.set(5.0, 0.0, until=12.0)  # an outage over the first step: what would be is what comes after
    assert [rate.at(t) for t in (4.0, 5.0, 11.0, 12.0, 20.0)] == [20.0, 0.0, 0.0, 2.0, 4.0]
    rate.set(13.0, 1.0)  # for good
    assert [rate.at(t) for t in (13.0, 30.0)] == [1.0, 1.0]


def test_what_the_kernel_counts() -> None:
    def said(*drops: tuple[str, str, int]) -> str:
        return json.dumps([{"kind": kind, "parent": parent, "drops": n} for kind, parent, n in drops])

    # What the queue under it drops netem counts as well.
    assert dropped_and_lost([said(("htb", "", 9), ("netem", "1:10", 7), ("bfifo", "101:1", 4)), "[]", ""]) == (4, 3)
    assert dropped_and_lost([said(("htb", "", 3), ("bfifo", "1:10", 3)), said(("netem", "1:20", 1))]) == (3, 1)
    assert [words[2] for words in stats_commands(PLAN)] == ["shoal-7--core", *(f"shoal-7--gw-{h}" for h in ("learner", "a", "b"))]
