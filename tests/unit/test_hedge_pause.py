"""How often it is looked at what the trainer waits for."""

from __future__ import annotations

import pytest

from learner.rollouts.rescue import HEDGE_LEAST_S, HEDGE_S, hedge_pause_s


@pytest.mark.parametrize("took_s", [0.0, 0.001, 0.005, 0.01, 0.0125, 0.07, 3.0])
def test_looks_take_a_twentieth_of_the_time_and_are_never_rarer_than_strangers_must_be_looked_at(took_s: float) -> None:
    pause = hedge_pause_s(took_s)
    assert HEDGE_LEAST_S <= pause <= HEDGE_S
    assert took_s <= 0.05 * pause or pause == HEDGE_S
