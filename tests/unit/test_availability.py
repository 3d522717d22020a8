"""netem.networks.availability: comings and goings that alternate, in order, with the means that were asked for."""

from __future__ import annotations

from itertools import pairwise
from statistics import mean

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from netem.networks.availability import SHORTEST, balanced_stays, spot_moves, stays

TIMES = st.floats(0.5, 100.0)


@given(st.integers(1, 12), TIMES, TIMES, st.floats(1.0, 300.0), st.integers(0, 1 << 32))
def test_moves_are_in_order_and_alternate_for_each_seat(seats: int, up: float, down: float, horizon: float, seed: int) -> None:
    moves = spot_moves(seats, up, down, horizon, seed)
    assert moves == spot_moves(seats, up, down, horizon, seed)
    assert all(a.at <= b.at for a, b in pairwise(moves)) and all(0 <= m.at < horizon for m in moves)
    assert [m.seat for m in moves if m.at == 0] == list(range(seats))
    for seat in range(seats):
        own = [m for m in moves if m.seat == seat]
        assert [m.comes for m in own] == [i % 2 == 0 for i in range(len(own))]
        for a, b in pairwise(own):
            assert b.at - a.at >= SHORTEST * (up if a.comes else down) - 1e-9
        notices = [m.notice for m in own if not m.comes]
        assert notices == [(i + seat) % 2 == 0 for i in range(len(notices))]
        assert not any(m.notice for m in own if m.comes)


def test_times_there_and_away_have_the_means_that_were_asked_for() -> None:
    own = [m for m in spot_moves(1, 20.0, 5.0, 200_000.0, 3)]
    there = [b.at - a.at for a, b in pairwise(own) if a.comes]
    away = [b.at - a.at for a, b in pairwise(own) if not a.comes]
    assert abs(mean(there) / 20.0 - 1) < 0.05 and abs(mean(away) / 5.0 - 1) < 0.05


def test_another_seed_and_another_seat_are_other_draws() -> None:
    first = [m.at for m in spot_moves(2, 20.0, 5.0, 500.0, 0) if m.at]
    assert len(set(first)) == len(first) and not set(first) & {m.at for m in spot_moves(2, 20.0, 5.0, 500.0, 1)} - {0.0}


@given(TIMES, TIMES, st.integers(0, 1 << 32))
def test_balanced_stays_begin_where_a_first_look_may_find_them(up: float, down: float, seed: int) -> None:
    there = balanced_stays(up, down, 500.0, np.random.default_rng(seed))
    assert all(a <= b for a, b in there) and all(a[1] <= b[0] for a, b in pairwise(there))
    assert all(a < 500.0 for a, _ in there)


def test_of_many_the_share_there_is_the_balance_from_the_beginning() -> None:
    rng = np.random.default_rng(0)
    nodes = [balanced_stays(30.0, 10.0, 1000.0, rng) for _ in range(2000)]
    for at in (0.0, 500.0, 999.0):
        assert abs(mean(any(a <= at < b for a, b in there) for there in nodes) - 0.75) < 0.03


def test_stays_begin_where_told_and_only_before_the_horizon() -> None:
    assert stays(2.0, 1.0, 6.0, lambda mean: mean, 1.0) == [(1.0, 3.0), (4.0, 6.0)]
    assert stays(2.0, 1.0, 1.0, lambda mean: mean, 1.0) == []
