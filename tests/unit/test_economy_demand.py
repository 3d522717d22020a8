"""The capacity model against closed forms, and against a learner and nodes that work group by group."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from learner.economy.demand import Demand, choose_kappa, period, required, slack, stall, within_reach

GROUPS = 64
"""in a step, of one token each; with 20 what is seen may be 0.042 off what is foretold, for groups are whole"""


def worked(d: Demand, supply: float, spread_s: float, *, overlap: bool, steps: int = 96) -> float:
    """Seconds a step takes, by simulation: groups are begun one after the other at the pace of `supply`, each at the version
    that is installed then, if the ledger has a step for it (v .. v+S); it is there `generation_s` later. The learner trains
    on a step when its groups are there, and publishes every kappa steps, one version after the other."""
    pace, now = d.tokens / GROUPS / supply, 0.0
    begun, ended, ready = [0] * steps, [0.0], 0.0
    """groups of each step; when the learner had made each version; when the last batch was there"""
    versions = [(0.0, 0.0, 0)]
    """(receiving from, until, version)"""
    at, trained = 0, 0
    """which of the versions is installed, how many steps are trained on, now"""
    while True:
        while at + 1 < len(versions) and versions[at + 1][1] <= now + 1e-9:
            at += 1
        while trained + 1 < len(ended) and ended[trained + 1] <= now + 1e-9:
            trained += 1
        coming = versions[at + 1][:2] if at + 1 < len(versions) else (math.inf, math.inf)
        first = max(versions[at][2], trained)
        place = next((b for b in range(first, min(versions[at][2] + d.staleness, steps - 1) + 1) if begun[b] < GROUPS), None)
        if (coming[0] <= now + 1e-9 and not overlap) or place is None:
            if coming[1] == math.inf:
                return math.inf
            now = coming[1]
            continue
        now += pace
        begun[place] += 1
        if begun[place] == GROUPS:
            ready = max(now + d.generation_s, ended[-1])
            ended.append(ready + d.train_s)
            if (len(ended) - 1) % d.kappa == 0:
                starts = max(ended[-1], versions[-1][1])
                versions.append((starts, starts + spread_s, len(ended) - 1))
        if len(ended) > steps:
            half, last = steps // 2 // d.kappa * d.kappa, steps // d.kappa * d.kappa
            return (ended[last] - ended[half]) / (last - half)


demands = st.builds(
    lambda s, k, g: Demand(1000.0, 10.0, s, min(k, s + 1), g),
    st.integers(0, 5), st.integers(1, 5), st.floats(0, 25),
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(demands, st.floats(0.3, 6.0), st.floats(0, 30), st.booleans())
@example(Demand(1000.0, 10.0, 0, 1, 3.0), 1.0, 2.0, True)
@example(Demand(1000.0, 10.0, 1, 1, 0.0), 1.0, 5.0, True)
@example(Demand(1000.0, 10.0, 3, 2, 4.0), 1.05, 6.0, False)
@example(Demand(1000.0, 10.0, 3, 1, 10.75), 0.96875, 0.5, False)
def test_the_learner_waits_as_predicted(d: Demand, share: float, spread_s: float, overlap: bool) -> None:
    supply = share * d.tokens / d.train_s
    foretold, seen = stall(d, supply, spread_s, overlap=overlap), 1 - d.train_s / worked(d, supply, spread_s, overlap=overlap)
    assert foretold - 0.04 < seen < foretold + (0.01 if overlap else 0.3), (foretold, seen)


@settings(max_examples=300, deadline=None)
@given(demands, st.floats(0, 30), st.booleans())
def test_just_above_it_does_not_wait_and_just_below_it_does(d: Demand, spread_s: float, overlap: bool) -> None:
    need = required(d, spread_s, overlap=overlap)
    assume(need < 50 * d.tokens / d.train_s)
    assert stall(d, need * 1.001, spread_s, overlap=overlap) == pytest.approx(0, abs=1e-9)
    assert stall(d, need * 0.99, spread_s, overlap=overlap) > 0
    assert 1 - d.train_s / worked(d, need * 1.05, spread_s, overlap=overlap) < 0.03


def test_where_the_ledgers_window_is_wide_it_is_echo_2() -> None:
    for s in range(2, 7):
        d = Demand(5000.0, 20.0, s, s - 1)
        for spread in (0.0, 5.0, 20.0):
            assert required(d, spread) == pytest.approx(5000 / 20)
            serial = d.kappa * d.tokens / (d.kappa * d.train_s - spread) if spread < d.kappa * d.train_s else math.inf
            assert required(d, spread, overlap=False) == pytest.approx(serial)
    assert required(Demand(5000.0, 20.0, 3, 1), 20.1) == math.inf  # overlap: spread <= kappa * train


def test_synchronous_learners_always_wait() -> None:
    d = Demand(1000.0, 10.0, 0, 1, 2.0)
    assert required(d, 1.0) == math.inf
    assert period(d, 100.0, 1.0) == pytest.approx(1 + 2 + 10 + 10)
    near = within_reach(d, 1.0)
    assert period(d, near, 1.0) == pytest.approx(1.1 * (1 + 2 + 10), rel=1e-6)


@given(demands, st.floats(0, 100), st.booleans())
def test_what_is_within_reach_is_finite(d: Demand, spread_s: float, overlap: bool) -> None:
    reach, need = within_reach(d, spread_s, overlap=overlap), required(d, spread_s, overlap=overlap)
    assert 0 < reach < math.inf and (reach == need or need == math.inf)
    assert period(d, reach, spread_s, overlap=overlap) <= 1.1001 * period(d, math.inf, spread_s, overlap=overlap)


def test_before_the_first_step_nothing_is_known() -> None:
    assert not Demand(0.0, 0.0, 2, 1).known and not Demand(10.0, 0.0, 2, 1).known and not Demand(0.0, 5.0, 2, 1).known
    assert Demand(10.0, 5.0, 2, 1).known
    assert required(Demand(0.0, 5.0, 2, 1), 1.0) == 0.0
    assert stall(Demand(10.0, 5.0, 2, 1), 0.0, 1.0) == 1.0
    assert required(Demand(10.0, 5.0, 2, 1), math.inf) == math.inf
    with pytest.raises(ValueError, match="kappa 0"):
        Demand(1.0, 1.0, 1, 0)


@given(st.integers(0, 8), st.floats(1, 50), st.floats(0, 200), st.floats(0, 200), st.booleans())
def test_kappa(s: int, train_s: float, spread_s: float, generation_s: float, overlap: bool) -> None:
    kappa = choose_kappa(s, train_s, spread_s, generation_s, overlap=overlap)
    assert 1 <= kappa <= max(1, s - 1)
    supply = (1.0 if overlap else 2.0) / train_s * 1.0001
    free = [
        k for k in range(1, max(1, s - 1) + 1)
        if required(Demand(1.0, train_s, s, k, generation_s), spread_s / 0.8, overlap=overlap) <= supply
    ]  # fmt: skip
    if free:
        assert kappa in free
        assert kappa <= free[-1]


def test_kappa_by_example() -> None:
    assert choose_kappa(3, 20.0, 1.0, 5.0) == 1
    assert choose_kappa(3, 20.0, 18.0, 0.0) == 2  # 18 s would fill nine tenths of the uplink
    assert choose_kappa(6, 20.0, 50.0, 0.0) == 3  # 4 would leave too small a window
    assert choose_kappa(0, 20.0, 50.0, 0.0) == choose_kappa(1, 20.0, 50.0, 0.0) == choose_kappa(2, 20.0, 50.0, 0.0) == 1


@settings(deadline=None)
@given(demands, st.floats(0.3, 6.0), st.floats(0, 30), st.booleans())
def test_slack_is_where_the_rule_ends(d: Demand, share: float, spread_s: float, overlap: bool) -> None:
    supply = share * d.tokens / d.train_s
    s = slack(d, supply, spread_s, overlap=overlap)
    holds = lambda demand, spread: required(demand, spread, overlap=overlap) <= supply * (1 + 1e-6)
    assert s.holds == holds(d, spread_s) or s.supply == pytest.approx(supply, rel=1e-5)
    if s.spread_s >= 0.01:
        assert holds(d, s.spread_s - 0.01) and not holds(d, s.spread_s + 0.01)
    else:
        assert not holds(d, max(0.0, s.spread_s + 0.02))
    if s.generation_s >= 0.01:
        assert holds(Demand(d.tokens, d.train_s, d.staleness, d.kappa, s.generation_s - 0.01), spread_s) or (
            not overlap and not holds(Demand(d.tokens, d.train_s, d.staleness, d.kappa, 0.0), spread_s)
        )
    if s.tokens > 1:
        assert holds(Demand(s.tokens * 0.999, d.train_s, d.staleness, d.kappa, d.generation_s), spread_s)
        assert not holds(Demand(s.tokens * 1.001, d.train_s, d.staleness, d.kappa, d.generation_s), spread_s)
    assert s.sentences


def test_slack_in_words() -> None:
    d = Demand(10_000.0, 30.0, 3, 2, 5.0)
    said = slack(d, 400.0, 12.0).sentences
    assert said[0] == "the learner does not wait: 333 tokens/s are required, there are 400"
    assert "with S=3, kappa=2 you can afford 30 s of dissemination (it takes 12 s)" in said
    said = slack(d, 200.0, 12.0).sentences
    assert said[0] == "the learner is predicted to wait 40 % of its time: 333 tokens/s are required, there are 200"
    said = slack(Demand(10_000.0, 30.0, 0, 1, 5.0), 2000.0, 12.0).sentences
    assert "no capacity suffices with S=0, kappa=1" in said[0] and "no dissemination is fast enough" in said[1]
