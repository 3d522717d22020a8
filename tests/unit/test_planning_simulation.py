"""The group-level simulator against closed forms and the sequence-level one; a preset; `shoal plan` against brute force."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from learner.economy.demand import Demand, choose_kappa, required
from netem.planning.autoscaler import Autoscaler
from netem.planning.by_group import GroupSimulation
from netem.planning.cost_scenario import CostScenario, build_scenario, load_preset
from netem.planning.dissemination import Dissemination
from netem.planning.plan import plan
from netem.planning.priced_fleet import nodes_of
from netem.planning.runner import run_once, run_preset, simulate
from p2p.errors import UsageError

EVEN = {"median": 1000.5, "between": 0.0, "within": 0.0, "most": 2000, "prompt": 1}
"""Every completion has 1,000 tokens: a node of n tokens per second makes n / 16,000 groups a second."""


MIXED = """
import json, sys
from pathlib import Path
from netem.planning.cost_scenario import build_scenario
from netem.planning.runner import run_once
print(json.dumps(run_once(build_scenario(json.loads(sys.argv[1]), "mixed", Path())).as_dict()))
"""


def scenario(count: int, rate: float, **more: Any) -> CostScenario:
    node = {"kind": "a", "count": count, "usd_per_hour": 0.36, "tokens_per_s": rate, "sequences": 16, "up_mbit": 1000.0}
    values: dict[str, Any] = {
        "steps": 40, "warm": 10, "detail": "groups", "lengths": EVEN, "fleet": {"nodes": [node]}, "activation": {"all": True},
        "learner": {"groups": 20, "samples": 16, "train_s": 95.0, "update_s": 5.0, "usd_per_hour": 3.6},
        "delta": {"bytes": 1e6, "install_s": 0.0, "latency_s": 0.0, "recompute": False},
    }  # fmt: skip
    return build_scenario({**values, **more}, "x.toml", Path())


@pytest.mark.parametrize(("count", "rate"), [(4, 1600.0), (10, 480.0), (20, 400.0)])
def test_a_learner_that_gets_enough_never_waits(count: int, rate: float) -> None:
    """It needs 3,200 tokens per second."""
    result = GroupSimulation(scenario(count, rate)).run()
    assert result.busy == pytest.approx(1.0, abs=0.005)
    assert result.usd_per_step == pytest.approx(100.0 * (3.6 + 0.36 * count) / 3600, rel=0.01)
    assert max(result.staleness) <= 3 and result.lost == 0


@pytest.mark.parametrize(("count", "rate"), [(4, 400.0), (8, 300.0), (20, 80.0)])
def test_a_learner_that_gets_less_is_as_busy_as_it_gets(count: int, rate: float) -> None:
    result = GroupSimulation(scenario(count, rate, steps=60)).run()
    assert result.busy == pytest.approx(count * rate / 3200.0, abs=0.02)
    assert sum(k.tokens for k in result.kinds.values()) == pytest.approx(count * rate * result.seconds, rel=0.02)


def test_without_staleness_generation_and_training_take_turns() -> None:
    """100 s of generation, then what is left of training after the last group has come, then the update and the spreading."""
    result = GroupSimulation(scenario(20, 160.0, policy={"staleness": 0})).run()
    assert result.step_s == pytest.approx(100.0 + 95.0 + 5.0, rel=0.02)  # all groups come at once
    assert set(result.staleness) == {0}


def test_nodes_that_stop_while_they_receive_are_worth_less() -> None:
    """kappa = 1: a version takes 25 s to each of them, of the 100 s; 20 * 160 tokens per second is just the need."""
    delta = {"bytes": 25.0 * 125e6, "install_s": 0.0, "latency_s": 0.0, "overhead": 1.0, "recompute": False}
    policy = {"staleness": 3, "kappa": 1}
    both = [
        GroupSimulation(scenario(20, 160.0, delta=delta, policy={**policy, "overlap": overlap}, steps=60)).run()
        for overlap in (True, False)
    ]
    assert both[0].busy == pytest.approx(1.0, abs=0.02)
    assert both[1].busy == pytest.approx(100.0 / 125.0, abs=0.03)


def test_lost_nodes_cost_their_share_of_the_time_and_with_migration_no_group() -> None:
    spot = {"kind": "a", "count": 20, "usd_per_hour": 0.36, "tokens_per_s": 140.0, "sequences": 16}
    fleet = {"nodes": [{**spot, "availability": "exponential 600 200"}]}
    small = {"parameters": 1e6}  # who joins has caught up in no time
    result = GroupSimulation(scenario(20, 140.0, fleet=fleet, steps=80, model=small)).run()
    there = result.kinds["a"].there_hours / (20 * result.seconds / 3600)
    assert there == pytest.approx(0.75, abs=0.08)
    rate = result.tokens / result.seconds
    assert 0.94 * there * 2800 <= rate <= 1.01 * there * 2800
    assert result.lost < 0.02 * result.tokens


def test_both_simulators_say_about_the_same_of_a_middling_fleet() -> None:
    fleet = {"nodes": [{"kind": "L40S", "count": 20, "usd_per_hour": 0.6, "gpu": "L40S"}]}
    learner = {"groups": 40, "samples": 8, "train_s": 120.0, "update_s": 5.0, "usd_per_hour": 5.0}
    lengths = {"median": 1500.0, "between": 0.5, "within": 0.4, "most": 8192}
    values = {"fleet": fleet, "learner": learner, "lengths": lengths, "delta": {}, "steps": 12, "warm": 4}
    groups, sequences = (run_once(scenario(1, 1.0, **values, detail=d)) for d in ("groups", "sequences"))
    assert groups.detail == "groups" and sequences.detail == "sequences"
    assert groups.busy == pytest.approx(sequences.busy, abs=0.05)


def test_the_cheapest_are_active_and_what_would_change_is_said() -> None:
    dear = {"kind": "dear", "count": 10, "usd_per_hour": 2.0, "tokens_per_s": 800.0, "sequences": 16}
    cheap = {"kind": "cheap", "count": 6, "usd_per_hour": 0.4, "tokens_per_s": 800.0, "sequences": 16}
    values: dict[str, Any] = {"fleet": {"nodes": [dear, cheap]}, "activation": {}, "steps": 20, "warm": 4}
    steps: list[int] = []
    out = simulate(scenario(1, 1.0, **values), steps.append, True, 1)
    assert out["kinds"]["cheap"]["mean_active"] > 3.9 and out["kinds"]["dear"]["mean_active"] < 0.5
    assert out["learner_busy"] > 0.97 and steps == list(range(1, 21))
    by_knob = {row["knob"]: row for row in out["would_change"]}
    assert by_knob["nodes 20 % cheaper"]["usd_per_step"] < -0.01
    assert by_knob["a learner 20 % faster"]["step_s"] < -0.1


def test_a_preset_compares_its_systems_with_what_was_published() -> None:
    small = load_preset("streamrl").changed(
        {"steps": 5, "warm": 2, "learner": {"groups": 8, "train_s": 40.0}, "lengths": {"median": 400.0, "most": 2000}}
    )
    lines: list[str] = []
    result = run_preset(small, lines.append, False, 1)
    (case,) = result["cases"]
    assert [row["role"] for row in case["systems"]] == ["baseline", "paper", "ours"]
    assert len(lines) == 3 and set(case["ours_saves"]) == {"StreamRL at one site", "StreamRL across sites"}
    (claim,) = result["published"]
    assert claim["value"] > 0 and claim["holds"] == (claim["off"] <= claim["within"])


def test_what_is_expected_of_an_unknown_node_is_what_its_kind_makes() -> None:
    rows = [
        {"kind": kind, "count": 3, "usd_per_hour": 1.0, "tokens_per_s": rate, "sequences": 16}
        for kind, rate in (("fast", 1600.0), ("slow", 100.0))
    ]
    priced = scenario(1, 1.0, fleet={"nodes": rows}, activation={"known": False})
    nodes = nodes_of(priced.rows, Path(), 1e6, 0)
    autoscaler = Autoscaler(priced, nodes, [1600.0, 100.0])
    for i in range(len(nodes)):
        autoscaler.came(i, 0.0)
    for now in range(0, 600, 20):
        autoscaler.decide(float(now), lambda i: priced.rows[nodes[i].row].tokens_per_s * now, lambda i: True)  # noqa: B023
    assert autoscaler.rates.estimate("new", "fast").mean == pytest.approx(1600.0, rel=0.05)
    assert autoscaler.rates.estimate("new", "slow").mean == pytest.approx(100.0, rel=0.05)


def test_group_level_refuses_what_it_cannot_show() -> None:
    with pytest.raises(UsageError, match="knows the policy shoal alone"):
        run_once(scenario(1, 100.0, policy={"name": "echo2"}))


def test_without_relays_the_learner_sends_to_each() -> None:
    nodes = [{"kind": "a", "count": 8, "usd_per_hour": 1.0, "tokens_per_s": 500.0, "down_mbit": 1000.0, "up_mbit": 1000.0}]
    delta = {"bytes": 1e9, "overhead": 1.0, "latency_s": 0.0, "install_s": 0.0}
    for relayed, seconds in ((True, 8.0), (False, 64.0)):
        s = scenario(1, 1.0, fleet={"nodes": nodes}, delta={**delta, "relayed": relayed}).with_value("learner.up_mbit", 1000.0)
        assert Dissemination(s).last({0: 8}) == pytest.approx(seconds)
        assert Dissemination(s).last({0: 1}) == pytest.approx(8.0) and Dissemination(s).last({}) == 0.0


def test_no_number_hangs_on_the_order_in_which_python_hashes() -> None:
    """A spot fleet of three kinds, of which several nodes are lost between two decisions."""
    nodes = [
        {"kind": kind, "count": 90, "usd_per_hour": usd, "tokens_per_s": rate, "sequences": 8, "up_mbit": up, "down_mbit": 100.7,
         "availability": "exponential 400 100"}
        for kind, usd, rate, up in (("a", 0.31, 190.0, 33.3), ("b", 0.57, 333.0, 47.1), ("c", 0.23, 121.0, 20.7))
    ]  # fmt: skip
    values = {
        "steps": 6, "warm": 2, "detail": "groups", "lengths": {"median": 300.0, "most": 900}, "fleet": {"nodes": nodes},
        "activation": {"dwell_s": 60.0, "every_s": 20.0}, "model": {"parameters": 1e6}, "delta": {"bytes": 1e6},
        "learner": {"groups": 150, "samples": 8, "train_s": 20.0, "update_s": 1.0},
    }  # fmt: skip
    command = [sys.executable, "-c", MIXED, json.dumps(values)]
    found = [
        subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True).stdout
        for seed in ("1", "2")
    ]
    assert "replaces" in found[0] and found[0] == found[1]


# ---- shoal plan

KINDS = [("a", 3, 0.9, 500.0), ("b", 4, 0.35, 220.0), ("c", 2, 1.7, 900.0)]


def fleet_of(**activation: Any) -> CostScenario:
    nodes = [{"kind": k, "count": n, "usd_per_hour": usd, "tokens_per_s": r, "sequences": 16} for k, n, usd, r in KINDS]
    return scenario(1, 1.0, fleet={"nodes": nodes}, activation={"margin": 0.0, "release": 0.0, **activation})


def test_a_plan_is_the_cheapest_set_by_brute_force() -> None:
    for step_s in (100.0, 130.0, 200.0, 400.0):
        s = fleet_of()
        found = plan(s, step_s)
        spread = Dissemination(s)
        demand = Demand(320_000.0, step_s, 3, choose_kappa(3, step_s, spread.last({0: 3, 1: 4, 2: 2}), 0.0))
        best = float("inf")
        for counts in itertools.product(*(range(n + 1) for _, n, _, _ in KINDS)):
            rate = sum(n * r for n, (_, _, _, r) in zip(counts, KINDS, strict=True))
            if rate >= required(demand, spread.last(dict(enumerate(counts)))) - 1e-6:
                best = min(best, sum(n * usd for n, (_, _, usd, _) in zip(counts, KINDS, strict=True)))
        assert found["ok"] and best <= found["usd_per_hour_nodes"] + 1e-9 <= 1.02 * best + 1e-6
        assert found["usd_per_step"] == pytest.approx(step_s * (found["usd_per_hour_nodes"] + 3.6) / 3600)


def test_a_plan_that_cannot_be_says_so() -> None:
    short = plan(fleet_of(), 60.0)
    assert not short["ok"] and "all 9 nodes make 4,180 of the 5,333 tokens/s" in short["sentences"][0]
    capped = plan(fleet_of(max_usd_per_hour=1.0), 100.0)
    assert not capped["ok"] and "max_usd_per_hour is 1" in capped["sentences"][-1]
    never = plan(fleet_of().with_value("policy.staleness", 0), 100.0)
    assert not never["ok"] and "no set of nodes" in never["sentences"][0]
    with pytest.raises(UsageError, match="--step-time"):
        plan(fleet_of(), 0.0)
