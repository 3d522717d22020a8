"""The scenario's format, what it may not say, the bound under faults, and the verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from netem.contest.contest import RoundResult
from netem.contest.scenario import (
    build_scenario,
    builtin_scenarios,
    crossed,
    find_scenario,
    finish,
    judge,
    load_scenario,
    payload_size,
)
from netem.contest.tuning import player_options
from netem.emulation.fabric import Fabric, Pipe
from netem.networks.bound import profile_bound
from netem.networks.faults import (
    Continue,
    Corrupt,
    Join,
    Kill,
    Outage,
    SetRates,
    Stop,
    Withhold,
    bound_under,
    excused,
    joiners,
)
from netem.networks.profile import build_profile
from p2p.broadcast.peer_groups import MESH
from p2p.errors import UsageError

LINK = {"up_mbit": 20, "down_mbit": 50, "delay_ms": 12.5}
PROFILE = {"learner": {**LINK, "up_mbit": 40}, "nodes": [{"count": 4, **LINK}]}
MIB = 1 << 20


def values(**more: Any) -> dict[str, Any]:
    return {"profile": PROFILE, "payload": "8 MiB", **more}


# --- the file ------------------------------------------------------------------------------------------------------------


def test_the_builtin_ones_are_sound() -> None:
    names = builtin_scenarios()
    assert {"homogeneous-32", "homogeneous-64", "heterogeneous", "delays", "small", "killed-relay", "killed-three-of-ten",
            "slow-relay", "corrupt-relay", "withholding-relay", "stall-6s", "late-joiner", "equal-2", "equal-4", "equal-8",
            "equal-16", "sites", "groups", "nats", "nats-symmetric", "ipv6", "sleeper", "data-centre",
            "rising-learner"} <= set(names)  # fmt: skip
    for name in names:
        scenario = find_scenario(name)
        assert scenario.name == name and scenario.warm_up == 1 and scenario.profile.mtu == 9000
        assert scenario.profile.congestion == "cubic"
        assert {h.access.queue for h in scenario.profile.hosts} == {0.1}
        assert 0.5 < scenario.t_star_calm < 20 and (scenario.require.ratio is not None or name == "late-joiner")
    t_stars = [find_scenario(f"equal-{n}").t_star for n in (2, 4, 8, 16)]
    assert t_stars == pytest.approx([16 * MIB * 8 / 20e6] * 4)
    assert find_scenario("homogeneous-32").t_star == pytest.approx(32 * MIB * 8 / 25e6)
    assert find_scenario("sites").t_star == pytest.approx(16 * MIB * 8 / 20e6)
    groups = find_scenario("groups")
    assert groups.mesh < len(groups.profile.hosts) - 1 and find_scenario("sites").mesh == MESH


def test_a_scenario_with_everything(tmp_path: Path) -> None:
    link = "up_mbit = 20\ndown_mbit = 50\ndelay_ms = 12.5\n"
    (tmp_path / "net.toml").write_text(f"[learner]\n{link}[[nodes]]\ncount = 4\n{link}")
    file = tmp_path / "storm.toml"
    file.write_text(
        'profile = "net.toml"\npayload = "8 MiB"\npolicy = "tree"\nwarm_up = 0\nseed = 5\nfaults = [\n'
        '{ at = 3, kind = "cont", host = "node-2" },\n{ at = 1, kind = "stop", host = "node-2" },\n'
        '{ at = 2.5, kind = "rate", host = "learner", up_mbit = 10, down_mbit = 50 },\n'
        '{ at = 2, kind = "outage", seconds = 1.5 },\n{ at = 0.5, kind = "kill", host = "node-1" },\n'
        '{ at = 4, kind = "join", host = "node-4" },\n]\n[require]\nratio = 1.5\nslack_s = 2\nsource_share = 1.1\n'
    )
    scenario = load_scenario(file)
    assert (scenario.name, scenario.payload_bytes, scenario.policy, scenario.warm_up) == ("storm", 8 * MIB, "tree", 0)
    assert scenario.faults == (
        Kill(at=0.5, host="node-1"), Stop(at=1, host="node-2"), Outage(at=2, seconds=1.5),
        SetRates(at=2.5, host="learner", up=10e6, down=50e6), Continue(at=3, host="node-2"), Join(at=4, host="node-4"),
    )  # fmt: skip
    assert scenario.required == ("node-2", "node-3", "node-4")
    assert excused(scenario.faults) == {"node-1"} and joiners(scenario.faults) == {"node-4": 4}
    assert find_scenario(str(file)) == scenario
    assert scenario.with_mtu(1500).profile.mtu == 1500 and scenario.with_mtu(1500).faults == scenario.faults


def test_only_the_default_policy_is_told_of_a_smaller_mesh() -> None:
    assert player_options("shoal", NETWORK, SIZE, 6)["mesh"] == 6
    for peer in ("star", "chain", "libtorrent"):
        assert "mesh" not in player_options(peer, NETWORK, SIZE, 6)
    assert "mesh" not in player_options("shoal", NETWORK, SIZE)


@pytest.mark.parametrize(
    ("value", "size"), [(5, 5), ("5", 5), ("32 MiB", 32 * MIB), ("1.5KiB", 1536), ("2 GB", 2 * 10**9), ("7 B", 7)]
)
def test_sizes(value: int | str, size: int) -> None:
    assert payload_size(value, "x") == size


KILL = {"at": 1.0, "kind": "kill", "host": "node-1"}


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"colour": "red"}, "x: colour: unknown key"),
        ({"payload": "8 MiBs"}, "x: payload: '8 MiBs' is no size"),
        ({"payload": 0}, "x: payload: 0 bytes"),
        ({"payload": -1}, "payload: -1 is no size"),
        ({"rounds": 0}, "x: rounds: "),
        ({"rounds": "3"}, "x: rounds: "),
        ({"policy": "libtorrent"}, "x: policy: "),
        ({"name": "No Name"}, "x: name: "),
        ({"profile": {"nodes": []}}, "x: profile: learner: "),
        ({"profile": "none.toml"}, "no such profile: "),
        ({"profile": 3}, "x: profile"),
        ({"faults": [{"at": 1.0, "kind": "burn", "host": "node-1"}]}, "x: faults.0: "),
        ({"faults": [{"at": 1.0, "host": "node-1"}]}, "x: faults.0: "),
        ({"faults": [{"at": -1.0, "kind": "kill", "host": "node-1"}]}, "x: faults.0.at: "),
        ({"faults": [{**KILL, "seconds": 1.0}]}, "x: faults.0.seconds: unknown key"),
        ({"faults": [{"at": 1.0, "kind": "rate", "host": "node-1", "up_mbit": 1.0}]}, "x: faults.0.down_mbit: "),
        ({"faults": [{**KILL, "host": "node-9"}]}, "x: faults: no host 'node-9'"),
        ({"faults": [{**KILL, "host": "learner"}]}, "x: faults: the learner"),
        ({"faults": [KILL], "rounds": 2}, "x: rounds: with faults there is one"),
        ({"faults": [KILL, {**KILL, "kind": "join", "at": 2.0}]}, "x: faults: node-1 has not joined at 1 s"),
        ({"faults": [{**KILL, "kind": "join"}, {**KILL, "kind": "join"}]}, "x: faults: a host joins once"),
        ({"faults": [{**KILL, "kind": "join", "host": f"node-{i}"} for i in range(1, 5)]}, "every node joins late"),
        ({"faults": [{**KILL, "host": f"node-{i}"} for i in range(1, 5)]}, "x: require.complete: nobody"),
        ({"faults": [KILL], "require": {"complete": ["node-1"]}}, "x: require.complete: node-1 is killed"),
        ({"require": {"complete": ["learner"]}}, "x: require.complete: no node 'learner'"),
        ({"require": {"complete": []}}, "x: require.complete: nobody"),
        ({"faults": [{**KILL, "kind": "corrupt"}], "require": {"complete": ["node-1"]}}, "require.complete: node-1 is killed,"),
        ({"faults": [{**KILL, "kind": "corrupt", "host": "learner"}]}, "x: faults: the learner"),
        ({"faults": [{**KILL, "kind": "withhold", "seconds": 1.0}]}, "x: faults.0.seconds: unknown key"),
        ({"faults": [{**KILL, "kind": "withhold"}], "require": {"named": ["node-1"]}}, "x: require.named: node-1 corrupts"),
        ({"require": {"named": ["node-2"]}}, "x: require.named: node-2 corrupts nothing"),
        ({"require": {"ratio": 0.5}}, "x: require.ratio: "),
        ({"require": {"joiner_share": 2.0}}, "x: require.joiner_share: "),
        ({"require": {"site_share": 0.9}}, "x: require.site_share: "),
        ({"require": {"site_share": 1.2}}, "x: require.site_share: no host is at a site"),
        ({"mesh": 1}, "x: mesh: "),
        ({"mesh": MESH + 1}, "x: mesh: "),
    ],
)  # fmt: skip
def test_what_a_scenario_may_not_say(more: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError) as caught:
        build_scenario(values(**more), "x")
    assert why in str(caught.value) and "\n" not in str(caught.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    with pytest.raises(UsageError, match="no such scenario"):
        load_scenario(file)
    file.write_text("payload = ")
    with pytest.raises(UsageError, match="is not TOML"):
        load_scenario(file)
    with pytest.raises(UsageError, match=r"no scenario 'blizzard': a file, or one of corrupt-relay, data-centre, delays, "):
        find_scenario("blizzard")


# --- the bound under faults ----------------------------------------------------------------------------------------------

NETWORK = build_profile(PROFILE, "test")
NODES = tuple(h.name for h in NETWORK.hosts[1:])
SIZE = 10_000_000
"""80 Mbit: 40 + 4 * 20 = 120 Mbit/s for four nodes, 30 each, 2.67 s."""


def test_the_bound_without_faults_is_the_profiles() -> None:
    assert bound_under(NETWORK, SIZE, (), NODES) == profile_bound(NETWORK, SIZE) == pytest.approx(80 / 30)


@pytest.mark.parametrize(
    ("faults", "required", "seconds"),
    [
        # three nodes are left after 30 of 80 Mbit: 100 / 3 Mbit/s
        ((Kill(at=1.0, host="node-1"),), NODES[1:], 1 + 50 / (100 / 3)),
        # as if it was gone, though what it is fed counts for nobody
        ((Corrupt(at=1.0, host="node-1"),), NODES[1:], 1 + 50 / (100 / 3)),
        ((Withhold(at=1.0, host="node-1"),), NODES[1:], 1 + 50 / (100 / 3)),
        # too late to matter
        ((Kill(at=9.0, host="node-1"),), NODES[1:], 80 / 30),
        # it lends 0.2 Mbit/s, and nobody waits for it
        ((SetRates(at=1.0, host="node-1", up=0.2e6, down=0.5e6),), NODES[1:], 1 + 50 / (100.2 / 3)),
        # everybody waits for it
        ((SetRates(at=1.0, host="node-1", up=20e6, down=5e6),), NODES, 1 + 50 / 5),
        ((Outage(at=1.0, seconds=6.0),), NODES, 6 + 80 / 30),
        ((Outage(at=1.0, seconds=6.0, host="learner"),), NODES, 6 + 80 / 30),
        ((Stop(at=1.0, host="node-1"), Continue(at=3.0, host="node-1")), NODES, 2 + 80 / 30),
        # three at 100 / 3 Mbit/s; the joiner needs 1.6 s of its downlink
        ((Join(at=0.1, host="node-4"),), NODES, 80 / (100 / 3)),
        ((Join(at=5.0, host="node-4"),), NODES, 5 + 80 / 50),
        ((SetRates(at=1.0, host="learner", up=1.0, down=1.0), Kill(at=2.0, host="node-1")), NODES[1:], 1 + 5e7),
    ],
)  # fmt: skip
def test_the_bound_of_what_is_left(faults: Any, required: Any, seconds: float) -> None:
    assert bound_under(NETWORK, SIZE, faults, required) == pytest.approx(seconds, rel=1e-3)


# --- the verdict ---------------------------------------------------------------------------------------------------------


def result(times: dict[str, float], **more: Any) -> RoundResult:
    given = {"source_bytes": 8 * MIB, "duplicate_bytes": 0, "cpu_s": 1.0, "cut_off": False, **more}
    return RoundResult(100.0, times, **given)


def everyone(seconds: float, **more: Any) -> RoundResult:
    return result(dict.fromkeys(NODES, seconds), **more)


def test_what_holds_and_what_does_not() -> None:
    scenario = build_scenario(values(rounds=3, require={"ratio": 1.1, "source_share": 1.2}), "x")
    t_star = scenario.t_star
    cold = everyone(9 * t_star)  # is not asked
    assert judge(scenario, [cold, everyone(1.05 * t_star), everyone(3 * t_star), everyone(1.09 * t_star)]) == []
    (why,) = judge(scenario, [cold, everyone(1.05 * t_star), everyone(3 * t_star), everyone(1.2 * t_star)])
    assert "1.200 times T*" in why and "at most 1.1" in why
    (why,) = judge(scenario, [cold, *[everyone(t_star)] * 2, everyone(t_star, source_bytes=10 * MIB)])
    assert why == "round 4: the source sent 1.250 of the payload, at most 1.2"
    assert judge(scenario, [cold, everyone(t_star)]) == ["1 of 3 rounds were run"]
    why, *_ = judge(scenario, [cold, result({}, failures=("node-1: no disk",))])
    assert why == "round 2: node-1: no disk"
    assert "round 1 was cut off" in judge(scenario, [result({}, cut_off=True)])


def test_faults_that_did_not_happen_do_not_count() -> None:
    scenario = build_scenario(values(faults=[KILL], require={"ratio": 2.0}), "x")
    survivors = dict.fromkeys(NODES[1:], 2.8)
    assert judge(scenario, [everyone(3.0), result(survivors, faults=scenario.faults)]) == []
    (why,) = judge(scenario, [everyone(3.0), result(survivors)])
    assert why == "round 2 was over before kill at 1 s"


def test_who_corrupts_is_named_reported_and_dropped() -> None:
    fault = {**KILL, "kind": "corrupt"}
    scenario = build_scenario(values(faults=[fault], require={"named": ["node-1"]}), "x")
    assert scenario.faults == (Corrupt(at=1.0, host="node-1"),) and scenario.required == NODES[1:]
    times, others = dict.fromkeys(NODES[1:], 2.8), NODES[1:]
    known = {"faults": scenario.faults, "named": {"node-1": others[:1]}, "reported": ("node-1",)}
    assert judge(scenario, [everyone(3.0), result(times, **known, banned={"node-1": others})]) == []
    (why,) = judge(scenario, [everyone(3.0), result(times, **known, banned={"node-1": others[1:]})])
    assert why == "round 2: node-1 was not dropped by node-2"
    whys = judge(scenario, [everyone(3.0), result(times, faults=scenario.faults)])
    assert [why.split(": ")[1].split(" by ")[0] for why in whys] == [
        "nobody named node-1", "node-1 was not reported to the source", "node-1 was not dropped"
    ]
    slander = {**known, "named": {"node-1": others, "node-3": ("node-2",)}, "banned": {"node-1": others}}
    assert judge(scenario, [everyone(3.0), result(times, **slander)]) == ["round 2: node-3 was named, and did nothing"]
    # Who withholds cannot be convicted of it: `named = []` says that nobody is.
    scenario = build_scenario(values(faults=[{**KILL, "kind": "withhold"}], require={"named": []}), "x")
    assert judge(scenario, [everyone(3.0), result(times, faults=scenario.faults)]) == []
    (why,) = judge(scenario, [everyone(3.0), result(times, faults=scenario.faults, reported=("node-1",))])
    assert why == "round 2: node-1 was named, and did nothing"


def test_a_joiner_counts_from_when_it_is_up() -> None:
    faults = [{"at": 1.0, "kind": "join", "host": "node-4"}]
    scenario = build_scenario(values(faults=faults, require={"joiner_share": 0.2}), "x")
    times = {**dict.fromkeys(NODES, 2.0), "node-4": 6.0}
    good = result(times, faults=scenario.faults, joined={"node-4": 3.5}, from_source={"node-4": MIB})
    assert finish(scenario, good) == pytest.approx(3.5)  # 2.5 s after it was up
    assert judge(scenario, [everyone(3.0), good]) == []
    greedy = result(times, faults=scenario.faults, joined={"node-4": 3.5}, from_source={"node-4": 4 * MIB})
    assert judge(scenario, [everyone(3.0), greedy]) == ["round 2: node-4 had 0.500 of it from the source, at most 0.2"]
    missing = result(dict.fromkeys(NODES[:3], 2.0), faults=scenario.faults)
    assert "round 2: incomplete at node-4" in judge(scenario, [everyone(3.0), missing])


def test_what_crosses_into_a_site() -> None:
    link = {"up_mbit": 20, "down_mbit": 50}
    sites = [{"name": site, "count": 2, "site": site, **link} for site in ("east", "west")]
    profile = {"sites": {"east": link, "west": link}, "learner": link, "nodes": [*sites, {"name": "alone", **link}]}
    scenario = build_scenario(values(profile=profile, rounds=1, require={"site_share": 1.25}), "x")
    half, names = 4 * MIB, scenario.required

    def account(**more: dict[str, int]) -> RoundResult:
        whence = {
            "east-1": {"learner": half, "east-2": half}, "east-2": {"west-1": half, "east-1": half},
            "west-1": {"learner": 2 * half}, "west-2": {"west-1": 2 * half}, "alone": {"west-1": 2 * half, "learner": half},
        }  # fmt: skip
        return result(dict.fromkeys(names, 9.0), whence=whence | more)

    assert crossed(scenario, account()) == {"east": 1.0, "west": 1.0}
    assert judge(scenario, [account(), account()]) == []
    twice = account(**{"west-2": {"east-1": half, "alone": half}})
    assert judge(scenario, [twice, account()]) == [], "a warm-up round may"
    assert judge(scenario, [account(), twice]) == ["round 2: 2.000 of it came to west over the WAN, at most 1.25"]
    silent = account()
    del silent.whence["west-1"]
    assert judge(scenario, [account(), silent]) == ["round 2: west-1 does not say whence it had what"]
    at_home = build_scenario(values(profile={**profile, "learner": {**link, "site": "west"}}), "x")
    assert crossed(at_home, account()) == {"east": 1.0}, "the learner's own site has it"


# --- rates of a running fabric -------------------------------------------------------------------------------------------


def test_a_pipe_whose_rate_changes() -> None:
    pipe = Pipe(8000.0, steps=[(10.0, 800.0)])  # 1000 bytes a second
    assert pipe.offer(0.0, 1000) == 1.0
    pipe.rate.set(0.5, 80_000.0)
    assert pipe.offer(0.6, 1000) == pytest.approx(1.1)  # what was there leaves as it would have
    assert pipe.offer(20.0, 1000) == pytest.approx(20.1)  # the step is overridden
    pipe.rate.set(21.0, 0.0)
    assert pipe.offer(22.0, 10) is None and pipe.overflowed == 1


def test_an_outage_ends_with_the_rate_that_would_be() -> None:
    pipe = Pipe(8000.0, steps=[(10.0, 800.0)], queue=2.0)
    pipe.rate.set(5.0, 0.0, until=8.0)
    assert pipe.offer(6.5, 1000) == 9.0  # waits for the end
    assert pipe.offer(6.6, 1000) is None  # the queue holds two seconds
    assert pipe.offer(9.5, 1000) == pytest.approx(15.0)  # half at the old rate, half after the step
    network = build_profile(PROFILE, "x")
    fabric = Fabric(network)
    fabric.set_rates(1.0, "node-1", 8e3, 0.0, 2.0)
    assert fabric.push(1.5, "node-1", "node-2", 1000, b"") and fabric.push(1.5, "learner", "node-1", 1000, b"")
    arrivals = {d.host: d.at for d in fabric.due(9.0)}
    assert arrivals["node-2"] > 2.5 and arrivals["node-1"] > 3.0
    with pytest.raises(KeyError):
        fabric.set_rates(1.0, "nobody", 1.0, 1.0)
