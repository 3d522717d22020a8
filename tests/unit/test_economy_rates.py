"""What is believed of a node's rate: with noise, lumps, odd intervals, changes, and too little work."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.economy.rates import KNOWN_S, Estimate, NodeRate, NodeRates, prior_of


def fed(
    values: list[float], *, seconds: float = 5.0, busy: bool = True, rate: NodeRate | None = None, now: float = 0.0
) -> NodeRate:
    rate = rate or NodeRate()
    for value in values:
        now += seconds
        rate.observe(now, seconds, value * seconds, busy)
    return rate


@settings(deadline=None)
@given(st.floats(1, 1e5), st.integers(0, 10**6), st.floats(0.0, 0.3))
def test_the_mean_is_found_and_its_doubt_is_right(true: float, seed: int, noise: float) -> None:
    rng = random.Random(seed)
    rate = fed([max(0.0, rng.gauss(true, noise * true)) for _ in range(60)])
    assert rate.known
    assert abs(rate.estimate().mean - true) <= 4.5 * max(rate.estimate().sd, 0.1 * true / 60)
    assert rate.estimate().sd <= (noise + 0.05) * true / math.sqrt(60) * 2.0
    assert rate.estimate().lower(1) <= rate.estimate().mean <= rate.estimate().upper(1)


def test_lumps_are_not_odd() -> None:
    """Tokens of one group in ten: 10 intervals with nothing, then all at once. The mean is what came."""
    rate = fed(([0.0] * 9 + [1000.0]) * 30, seconds=1.0)
    assert rate.estimate().mean == pytest.approx(100.0, rel=0.1)
    rate = fed(([0.0] * 7 + [800.0]) * 30, seconds=6.0)
    assert rate.estimate().mean == pytest.approx(100.0, rel=0.1)


@given(st.floats(10, 1000), st.floats(-50, 50), st.integers(10, 40))
def test_one_odd_interval_moves_little(true: float, odd: float, after: int) -> None:
    values = [true * (1 + 0.03 * (-1) ** i) for i in range(50)]
    plain, rate = fed(values), fed([*values[:after], odd * true, *values[after:]])
    assert rate.estimate().mean == pytest.approx(plain.estimate().mean, rel=0.09)


def test_what_lasts_is_believed() -> None:
    steady = [100 * (1 + 0.03 * (-1) ** i) for i in range(200)]
    rate = fed([*steady, 50.0, 51.0, 49.0])
    assert rate.estimate().mean == pytest.approx(50.0, rel=0.05)
    assert rate.estimate().sd > 0.5
    rate = fed([*steady, 0.0, 0.0, 0.0])
    assert rate.estimate().mean == 0.0 and rate.known
    # What drifts without a jump is followed too.
    rate = fed([100 * 0.999**i for i in range(1500)])
    assert rate.estimate().mean < 50


@settings(deadline=None)
@given(st.lists(st.floats(0, 1.05), max_size=60), st.floats(1, 1000))
def test_short_of_work_never_lowers(shares: list[float], true: float) -> None:
    rate = fed([true] * 20)
    before = rate.estimate().mean
    fed([s * true for s in shares], busy=False, rate=rate, now=100.0)
    assert before * (1 - 1e-9) <= rate.estimate().mean <= before * 1.06
    # Noise about what it can do does not raise it either: it is their mean that counts, not the best of them.
    rng = random.Random(1)
    fed([rng.gauss(0.97 * true, 0.1 * true) for _ in range(200)], busy=False, rate=rate, now=1000.0)
    assert rate.estimate().mean <= 1.06 * before


def test_at_least_what_it_did_when_short_of_work() -> None:
    rate = fed([40.0] * 10, busy=False)
    assert rate.estimate().mean == pytest.approx(40.0, rel=0.1) and rate.known
    best = rate.estimate().mean
    fed([4.0] * 50, busy=False, rate=rate, now=50.0)
    assert rate.estimate().mean == best  # given less, it is not worth less
    fed([30.0] * 20, rate=rate, now=300.0)
    assert rate.estimate().mean == pytest.approx(30.0, rel=0.02)  # with all the work it could take: those were better days
    expected, prior = NodeRate(), Estimate(100.0, 30.0)
    fed([40.0] * 10, busy=False, rate=expected)
    assert expected.estimate(prior).mean == pytest.approx(100.0)  # nothing says that it could not
    fed([140.0] * 10, busy=False, rate=expected, now=50.0)
    assert 110.0 < expected.estimate(prior).mean <= 140.0


def test_taken_back() -> None:
    rate = fed([100.0, 100.0, -80.0, 100.0] * 10)
    assert rate.estimate().mean == pytest.approx(55.0, rel=0.1)
    assert fed([-10.0] * 10).estimate().mean == 0.0
    rate = fed([100.0])
    rate.observe(6.0, 0.0, 50.0, True)
    rate.observe(7.0, 1.0, math.nan, True)
    assert rate.estimate().mean == 100.0


def test_the_prior_is_outweighed() -> None:
    rate, prior = NodeRate(), Estimate(100.0, 30.0)
    assert (rate.estimate(prior).mean, rate.estimate(prior).sd, rate.known) == (100.0, 30.0, False)
    fed([200.0, 190.0], rate=rate)
    assert 150 < rate.estimate(prior).mean < 200
    fed([195.0] * 20, rate=rate, now=10.0)
    assert rate.estimate(prior).mean == pytest.approx(195.0, rel=0.02)
    assert NodeRate().estimate() == Estimate(0.0, 0.0, False)


def test_a_fleet() -> None:
    rates = NodeRates()
    assert rates.estimate("x") == Estimate()
    for i in range(4):
        for t in range(10):
            rates.observe(f"fast{i}", 5.0 * t, 5.0, 5 * (100.0 + 10 * i), True, kind="fast")
            rates.observe(f"slow{i}", 5.0 * t, 5.0, 5 * 10.0, True, kind="slow")
    assert rates.estimate("fast2").mean == pytest.approx(120.0) and rates.estimate("fast2").known
    new = rates.estimate("fast9", "fast")
    assert new.mean == pytest.approx(115.0) and not new.known and 20 < new.sd < 60
    assert rates.estimate("slow9", "slow").mean == pytest.approx(10.0)
    other = rates.estimate("odd", "odd")
    assert other.mean == pytest.approx(62.5) and other.sd > 30 and not other.known
    # It has begun: what it does counts, with what its kind does.
    rates.observe("slow9", 0.0, 5.0, 5 * 30.0, True, kind="slow")
    assert 10 < rates.estimate("slow9").mean < 30 and not rates.estimate("slow9").known
    for t in range(int(KNOWN_S / 5)):
        rates.observe("slow9", 5.0 * t, 5.0, 5 * 30.0, True)
    assert rates.estimate("slow9").mean == pytest.approx(30.0) and rates.estimate("slow9").known
    assert rates.estimate("fast2", "slow").mean == pytest.approx(120.0)


def test_one_of_a_kind_is_not_taken_for_all() -> None:
    assert prior_of([Estimate(100.0, 1.0, True)]) == Estimate(100.0, 50.0)
    assert prior_of([Estimate(100.0, 1.0, False)]) == Estimate()
    assert prior_of([Estimate(100.0, 1.0, True)] * 25).sd == pytest.approx(10.0)
