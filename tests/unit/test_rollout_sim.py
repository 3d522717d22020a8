"""The simulator against arithmetic, and the policies on a small fleet."""

from __future__ import annotations

from dataclasses import replace

import pytest

from netem.bench.rollouts import POLICIES
from netem.rollout_sim.engine import Sequence, SimEngine
from netem.rollout_sim.fleet import KINDS, QWEN3_8B, fleet, preemptible
from netem.rollout_sim.ours import Shoal
from netem.rollout_sim.sim import Outcome, RolloutPolicy, RolloutSimulation, SimSettings
from netem.rollout_sim.workload import SKEWED

SMALL = replace(SKEWED, groups=4, samples=4, train_s=120.0)
FLEET = fleet({"H100-SXM": 1, "L40S": 1})
SHORT = SimSettings(staleness=2, steps=7, warm=2)


def step_by_step(engine: SimEngine, lengths: list[int], prompt: int) -> list[float]:
    """When each ends, one decoding step after another."""
    now, made, ends = engine.prefill_s * prompt * len(lengths), [0] * len(lengths), [0.0] * len(lengths)
    left = set(range(len(lengths)))
    while left:
        now += engine.model.step_s(len(left), sum(prompt + made[i] for i in left))
        for i in list(left):
            made[i] += 1
            if made[i] == lengths[i]:
                ends[i] = now
                left.remove(i)
    return ends


def test_an_engine_against_one_that_counts_every_step() -> None:
    kind, lengths = KINDS["L40S"], [40, 700, 701, 2500]
    engine = SimEngine("x", kind.throughput(QWEN3_8B), kind.prefill_s(QWEN3_8B), kind.context(QWEN3_8B), 8)
    expected = step_by_step(engine, lengths, 300)
    for i, n in enumerate(lengths):
        engine.add(Sequence(i, 0, 300, n))
    ends: dict[int, float] = {}
    while engine.running:
        engine.advance(engine.next_at())
        for sequence in engine.settle():
            ends[sequence.group] = engine.at
    assert [ends[i] for i in range(4)] == pytest.approx(expected, rel=2e-3)
    assert engine.total == pytest.approx(sum(lengths)) and engine.context == pytest.approx(0, abs=1e-6)


def test_a_full_engine_makes_room_and_loses_nothing() -> None:
    kind = KINDS["RTX4090"]
    engine = SimEngine("x", kind.throughput(QWEN3_8B), kind.prefill_s(QWEN3_8B), 6000, 8)
    for i in range(6):
        engine.add(Sequence(i, 0, 300, 1900))
    ended = []
    while engine.running or engine.waiting:
        engine.advance(engine.next_at())
        ended += engine.settle()
        assert engine.context <= 6000 + 1
    assert len(ended) == 6 and engine.preempted > 0 and engine.total == pytest.approx(6 * 1900)


def run(policy: RolloutPolicy, **more: object) -> Outcome:
    return RolloutSimulation(FLEET, SMALL, policy, replace(SHORT, **more)).run()  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_policies_train_on_whole_batches(name: str) -> None:
    outcome = run(POLICIES[name]())
    assert 0 < outcome.learner_bound <= 1.001 and 0 <= outcome.idle < 1
    assert outcome.idle == pytest.approx(1 - outcome.learner_bound, abs=1e-6)
    if name in ("staleflow", "shoal", "roll-buffer"):
        assert outcome.staleness_max <= 2
    if name == "synchronous":
        assert outcome.staleness_max == 0
    if name == "one-step-off":
        assert outcome.staleness_max <= 1
    if name in ("synchronous", "areal-quota", "staleflow", "shoal"):  # they throw nothing away: all the same prompts
        assert outcome.made < 1.6


def test_the_same_seed_is_the_same_run() -> None:
    assert run(Shoal()) == run(Shoal())
    assert run(Shoal()) != run(Shoal(), seed=1)


def test_a_lost_node_keeps_its_tokens_only_with_migration() -> None:
    seats = preemptible(FLEET, mean_up_s=120.0, mean_down_s=40.0, horizon_s=36_000.0, seed=3, steady=["H100-SXM"])
    kept = RolloutSimulation(seats, SMALL, Shoal(), SHORT).run()
    lost = RolloutSimulation(seats, SMALL, Shoal(migration=False), SHORT).run()
    assert kept.held > 0 and lost.held > 0
    assert lost.lost == lost.held and kept.lost < 0.05 * kept.held
    assert kept.staleness_max <= 2 and lost.staleness_max <= 2


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_nobody_is_stuck_when_nodes_come_and_go(name: str) -> None:
    # Some stay for less than joining takes.
    seats = preemptible(fleet({"L40S": 4}), mean_up_s=300.0, mean_down_s=60.0, horizon_s=360_000.0, seed=5)
    outcome = RolloutSimulation(seats, SMALL, POLICIES[name](), replace(SHORT, steps=5)).run()
    assert outcome.held > 0 and outcome.learner_bound > 0


def test_the_fleet_of_a_trace_is_there_as_often_as_it_says() -> None:
    seats = preemptible(fleet({"L40S": 200}), mean_up_s=900.0, mean_down_s=300.0, horizon_s=36_000.0, seed=0)
    share = sum(min(b, 36_000.0) - a for s in seats for a, b in s.there) / (200 * 36_000.0)
    assert abs(share - 0.75) < 0.03
