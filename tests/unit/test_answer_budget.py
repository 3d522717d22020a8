"""An answer's time, so that it and all that belongs to it end within the deadline."""

from __future__ import annotations

import random

import pytest

from learner.rewards.answer_budget import LEAST, AnswerBudget


@pytest.mark.parametrize("limit_s", [0.25, 4.0])
def test_answers_that_never_end_hold_a_scorer_for_their_deadlines_and_no_longer(limit_s: float) -> None:
    draw, budget, took = random.Random(1), AnswerBudget(limit_s), 0.0
    for _ in range(128):
        answer_s = budget.answer_s
        elapsed = answer_s + draw.uniform(0.005, 0.08)
        budget.ran_out(answer_s, elapsed)
        took += elapsed
    assert 0.8 * 128 * limit_s < took < 128 * limit_s


def test_on_a_machine_that_is_busy_beyond_measure_an_answer_still_has_half() -> None:
    budget = AnswerBudget(1.0)
    for _ in range(20):
        budget.ran_out(budget.answer_s, 30.0)
    assert budget.answer_s == LEAST


def test_what_was_a_moment_of_other_work_is_forgotten() -> None:
    budget = AnswerBudget(1.0)
    budget.ran_out(0.96, 1.2)
    early = budget.answer_s
    for _ in range(50):
        budget.ran_out(budget.answer_s, budget.answer_s + 0.01)
    assert early < 0.9 < 0.94 < budget.answer_s < 0.96
