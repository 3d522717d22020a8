"""Who is doubted for what it gave up, and how often."""

from __future__ import annotations

import pytest

from learner.rollouts.given_up import ONE_EVENT_S, GivenUp
from learner.standing.standing import Standing

OTHERS = "others"


def doubts(standing: Standing, given_up: GivenUp, request_id: str, now: float) -> None:
    """Another node makes it, which `node` gave up."""
    for node in given_up.made(request_id, OTHERS, ("node",), standing.delivered):
        standing.doubt(node, "gave up", now)


@pytest.mark.parametrize("interval_s", [0.1, 1.0, 5.0, 11.0, 60.0])
def test_an_engine_that_dies_is_one_doubt_however_long_others_take_to_make_what_it_held(interval_s: float) -> None:
    standing, given_up = Standing(), GivenUp()
    standing.ended("node", 5000)
    for i in range(32):
        given_up.gave_up("node", f"{i}.0.0", 100.0 + i / 100)
    for i in range(32):
        doubts(standing, given_up, f"{i}.0.1", 101.0 + interval_s * i)
    assert standing.of("node").doubted == 1 and standing.of("node").expelled == 0


def test_who_goes_on_giving_up_is_doubted_once_in_ten_seconds_whenever_others_are_done() -> None:
    standing, given_up = Standing(), GivenUp()
    standing.ended("node", 5000)
    for i in range(70):
        given_up.gave_up("node", f"{i}.0.0", float(i))
    for i in reversed(range(70)):  # the last one first
        doubts(standing, given_up, f"{i}.0.1", 200.0)
    assert standing.of("node").doubted == 70 / ONE_EVENT_S
    given_up.gave_up("node", "70.0.0", 70.0)
    doubts(standing, given_up, "70.0.1", 201.0)
    assert standing.of("node").expelled == 1, "eight doubts with nothing ended between them"


def test_a_stranger_has_few_chances_and_each_thing_that_it_gives_up_is_one() -> None:
    standing, given_up = Standing(), GivenUp()
    for i in range(3):
        given_up.gave_up("node", f"{i}.0.0", 0.0)
        doubts(standing, given_up, f"{i}.0.1", 1.0)
    assert standing.of("node").expelled == 1


def test_one_is_blamed_once_for_a_sequence_and_never_for_what_it_made_itself() -> None:
    given_up = GivenUp()
    given_up.gave_up("node", "7.0.0", 0.0)
    assert given_up.made("7.0.1", "node", ("node",), lambda peer: False) == []
    given_up.gave_up("node", "8.0.0", 0.0)
    assert given_up.made("8.0.1", OTHERS, ("node",), lambda peer: False) == ["node"]
    assert given_up.made("8.0.1", OTHERS, ("node",), lambda peer: False) == [], "the next turn of the same"
    given_up.gave_up("node", "8.0.2", 60.0)
    assert given_up.made("8.0.3", OTHERS, ("node",), lambda peer: True) == ["node"], "it gave up that turn too"
