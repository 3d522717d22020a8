"""How many runs of a message may bring nothing: twice what a node held, at any time while its link was up."""

from __future__ import annotations

from learner.rollouts.idle_runs import SLACK, IdleRuns


def test_what_was_held_counts_until_the_link_is_down() -> None:
    idle = IdleRuns()
    assert idle.allowed("a", 0) == SLACK
    assert idle.allowed("a", 1000) == 2000 + SLACK == idle.allowed("a", 0)  # all of it was cancelled a moment ago
    assert idle.allowed("b", 0) == SLACK
    idle.forget("a")
    assert idle.allowed("a", 3) == 6 + SLACK
