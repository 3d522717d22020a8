"""Whose turn it is on the learner's device."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.economy.local_rollout import LocalRollout
from learner.economy.turns import Turns


def look(turns: Turns, now: float, **facts) -> bool:
    return turns.look(now, **{"able": True, "remote": ["n"], "whole": False, "plenty": False, "waits": False, **facts})


def after_a_first_step(waited: float = 15.0, floor_s: float = 1.0, **more) -> Turns:
    turns = Turns(LocalRollout(floor_s=floor_s, **more))
    turns.begin(0.0, ["n"])
    turns.waited(waited)
    turns.stepped(holds=False)
    turns.begin(100.0, ["n"])
    return turns


def test_nobody_seeds_before_anybody_waited() -> None:
    turns = Turns(LocalRollout())
    turns.begin(0.0, ["n"])
    assert not look(turns, 0.0) and not look(turns, 1.0, waits=True)


def test_a_trainer_that_waited_gives_the_engine_the_beginning_of_the_next_step() -> None:
    turns = after_a_first_step(15.0)
    assert turns.local_rollout.turn_s == pytest.approx(5.0)  # a third of the imbalance
    assert look(turns, 100.0) and look(turns, 104.9) and "5.0 s at the beginning" in turns.why
    assert not look(turns, 105.0) and turns.generated_s == pytest.approx(5.0)
    assert not look(turns, 106.0, waits=True)  # one turn a step: others are there


def test_nodes_that_waited_shorten_it_and_prove_that_they_are_enough() -> None:
    turns = after_a_first_step(15.0)
    for tenth in range(100, 240):
        look(turns, float(tenth), idle=1.0)
    turns.stepped(holds=False)
    assert turns.local_rollout.turn_s == 0.0


def test_it_ends_when_the_learner_could_not_use_more_and_does_not_come_back() -> None:
    turns = after_a_first_step()
    assert look(turns, 100.0) and not look(turns, 101.0, plenty=True) and not look(turns, 102.0)


def test_an_engine_that_is_not_there_holds_nobody_up() -> None:
    turns = after_a_first_step()
    assert not look(turns, 100.0, able=False)


def test_alone_it_goes_on_until_the_step_is_whole() -> None:
    turns = after_a_first_step()
    assert look(turns, 100.0, remote=[]) and look(turns, 500.0, remote=[]) and turns.why == "nobody else generates"
    assert not look(turns, 501.0, remote=[], whole=True)


def test_it_comes_back_when_all_others_left_and_the_trainer_waits() -> None:
    turns = after_a_first_step()
    assert not look(turns, 110.0) and not look(turns, 111.0, remote=[])  # the trainer has work left
    assert look(turns, 112.0, remote=[], waits=True) and look(turns, 113.0, remote=[])
    assert not look(turns, 114.0)  # somebody came


def test_a_pool_that_changed_under_a_step_says_nothing_of_its_count() -> None:
    turns = after_a_first_step(15.0)
    look(turns, 100.0)
    look(turns, 103.0, remote=["m"])  # as many, but another
    turns.waited(30.0)
    turns.stepped(holds=False)
    assert turns.local_rollout.memory == {1: pytest.approx(5.0)} and turns.local_rollout.turn_s == pytest.approx(5.0)


facts = st.fixed_dictionaries({
    "able": st.booleans(), "remote": st.sets(st.sampled_from("abc")), "whole": st.booleans(), "plenty": st.booleans(),
    "waits": st.booleans(), "idle": st.floats(0, 1),
})  # fmt: skip


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0.01, 5), facts, st.booleans()), max_size=60), st.floats(0, 20))
def test_it_never_holds_a_trainer_up_longer_than_its_turn_unless_alone(looks, waited) -> None:
    turns = after_a_first_step(waited)
    now = began = 100.0
    for pause, seen, over in looks:
        now += pause
        was_alone = not seen["remote"] and not seen["whole"]
        on = turns.look(now, **seen)
        assert not on or (seen["able"] and not seen["plenty"])
        assert not on or was_alone or now < began + turns.local_rollout.turn_s
        assert 0 <= turns.generated_s <= now - began + 1e-9
        if over:
            turns.waited(waited)
            turns.stepped(holds=seen["whole"])
            turns.begin(now, seen["remote"])
            began = now
            assert turns.local_rollout.turn_s == 0 or turns.local_rollout.turn_s >= min(1.0, turns.local_rollout.most_s)
