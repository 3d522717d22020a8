"""learner/head/step_tally: what is told of a step's rewards and episodes, whatever a user's code calls them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from learner.head.step_tally import MOST_NAME, MOST_PARTS, StepTally, part_name
from learner.tasks.port import EpisodeEnd
from learner.trajectory import Gap, Group, Trajectory, pack_groups, unpack_groups
from p2p.protocol.rollout import Span
from p2p.version import Version

ONE = Trajectory(
    prompt_ids=(1,), completion_ids=(2, 3, 4, 5), logprobs=(0.0,) * 4, spans=(Span(Version(1, 0), 0, 4),), finish="stop",
    node="a", seed=0, reward=1.0,
)  # fmt: skip


def tally(*trajectories: Trajectory) -> dict[str, float]:
    found = StepTally()
    found.add([Group(1, 0, trajectories[:1])])
    found.add([Group(2, 0, trajectories[1:])])
    return found.metrics()


def test_a_completion_of_one_turn_and_one_reward_adds_nothing() -> None:
    assert tally(ONE, ONE) == {}


def test_parts_are_means_over_those_that_have_them() -> None:
    a, b = replace(ONE, parts={"form": 1.0, "right": 0.0}), replace(ONE, parts={"form": 0.5})
    assert tally(a, b, ONE) == {"reward/form": 0.75, "reward/right": 0.0}


def test_names_of_parts_are_a_users_and_bounded() -> None:
    evil = {f"{i} " + "x" * 1000: 1.0 for i in range(1000)}
    found = tally(replace(ONE, parts={"mean": 1.0, "": 2.0, "a\x1b[2J\nb": 3.0, "bad": float("nan"), **evil}))
    assert len(found) == MOST_PARTS and max(map(len, found)) <= len("reward/") + MOST_NAME
    assert found["reward/mean (part)"] == 1.0 and found["reward/unnamed (part)"] == 2.0 and found["reward/a?[2J b"] == 3.0
    assert "reward/bad" not in found and part_name("std") == "std (part)"


def test_episodes_are_counted_by_turns_and_by_what_ended_them() -> None:
    gaps = (Gap(1, 2), Gap(3, 4))
    three = replace(ONE, completion_ids=(2, 3, 4, 5, 6), logprobs=(0.0,) * 5, given=gaps, end=EpisodeEnd("", 3, 1))
    two = replace(ONE, given=(Gap(1, 2),), end=EpisodeEnd("turns", 1, 1))
    odd = replace(ONE, end=EpisodeEnd("a user's own word"))
    cut = replace(ONE, given=(Gap(2, 4),), end=EpisodeEnd("time"))  # its last answer was given and nothing sampled after it
    assert tally(two, cut)["episodes/turns_mean"] == 1.5
    assert tally(three, two, odd, cut) == {
        "episodes/turns_mean": pytest.approx(7 / 4), "episodes/turns_max": 3.0, "episodes/over_done": 0.5,
        "episodes/over_length": 0.0, "episodes/over_turns": 0.25, "episodes/over_time": 0.25, "episodes/tool_calls": 1.0,
        "episodes/tool_errors": 0.5,
    }  # fmt: skip
    group = Group(1, 0, (three, ONE))
    assert unpack_groups(pack_groups((group,))) == (group,), "the journal keeps how it ended"
