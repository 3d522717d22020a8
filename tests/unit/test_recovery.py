"""What survives a crash, several crashes in a row, and a version that one epoch lost and the next one reached again."""

from __future__ import annotations

import pytest

from learner.journal.records import Piece, ReservedGroup, UnfinishedGroup
from learner.rollouts.ledger import Ledger
from learner.rollouts.recovery import plan_resume, survives
from learner.trajectory import Group, Trajectory
from p2p.protocol.rollout import Span
from p2p.version import Version


def group(group_id: int, *versions: tuple[int, int]) -> Group:
    spans = tuple(Span(Version(*v), i, i + 1) for i, v in enumerate(versions))
    n = len(versions)
    whole = Trajectory(
        prompt_ids=(1,), completion_ids=(2,) * n, logprobs=(-0.5,) * n, spans=spans,
        reward=0.0, finish="stop", node="node", seed=7,
    )
    return Group(group_id, group_id, (whole,))


def unfinished(group_id: int, reserved: tuple[int, int], *members: list[tuple[int, int]]) -> UnfinishedGroup:
    """Each member a list of versions, a piece of two tokens each."""
    pieces = tuple(
        tuple(Piece(group_id, m, 2 * i, Version(*v), bytes(8), bytes(8), "node") for i, v in enumerate(versions))
        for m, versions in enumerate(members)
    )
    return UnfinishedGroup(ReservedGroup(group_id, group_id, Version(*reserved), len(members)), pieces)


# Epoch 1 reached 9 and had committed 7; 2 went from 7 to a commit of 9; 3 started at 9 and died at once; 4 starts.
EPOCHS = {1: 0, 2: 7, 3: 9}


@pytest.mark.parametrize(
    ("version", "alive"),
    [
        ((1, 0), True),
        ((1, 7), True),
        ((1, 8), False),
        ((1, 9), False),
        ((2, 6), False),  # epoch 2 never stood there
        ((2, 7), True),
        ((2, 9), True),
        ((2, 10), False),
        ((3, 9), True),
        ((3, 10), False),
        ((4, 9), False),  # no such epoch yet
    ],
)
@pytest.mark.parametrize("epochs", [EPOCHS, EPOCHS | {4: 9}], ids=["before new_epoch", "after"])
def test_survivors(epochs: dict[int, int], version: tuple[int, int], alive: bool) -> None:
    if version == (4, 9) and 4 in epochs:
        alive = True
    assert survives(Version(*version), epochs, 9) == alive


def test_plan_sorts_by_reason() -> None:
    groups = [
        group(1, (1, 7), (2, 8)),  # across two epochs, both alive
        group(2, (2, 9), (2, 10)),  # ran into a version that was never committed
        group(3, (1, 8)),  # lost in the first crash, although 8 was reached again
        group(4, (1, 6), (2, 9)),  # too old
        group(5, (2, 9)),
    ]
    left = [
        unfinished(6, (2, 8), [(2, 8), (3, 9)], []),
        unfinished(7, (2, 9), [(2, 9), (2, 10)], [(2, 10)], [(2, 9), (2, 9), (2, 10)]),  # some of it under weights that were lost
        unfinished(8, (1, 8), []),
        unfinished(9, (1, 6), [(1, 6), (1, 7)]),
        unfinished(10, (2, 10), [(2, 10)]),
    ]
    plan = plan_resume(EPOCHS, 9, groups, left, max_staleness=2)
    assert [g.group_id for g in plan.keep] == [1, 5]
    assert plan.abort == {"orphaned": (2, 3, 8, 10), "stale": (4, 9)}
    assert [g.group_id for g in plan.go_on] == [6, 7]
    assert plan.go_on[0] == left[0] and plan.go_on[0].tokens == 4
    assert plan.cut == ((7, 0, 2), (7, 1, 0), (7, 2, 4))
    assert [[p.version for p in member] for member in plan.go_on[1].members] == [[Version(2, 9)], [], [Version(2, 9)] * 2]
    finished = [(g.group_id, g.oldest.step) for g in plan.keep]
    reserved = [(g.group_id, g.group.version.step) for g in plan.go_on]
    ledger, misfits = Ledger.restore(2, 2, 9, finished, reserved)
    assert misfits == () and ledger.occupied(9) == [1, 5]
    ledger.abort([6, 7])  # refused for any that holds no reservation


def test_tokens_after_lost_ones_are_lost_too() -> None:
    """Versions only go forward, so none should follow; if one did, it was drawn after tokens that are not there any more."""
    plan = plan_resume(EPOCHS, 9, [], [unfinished(1, (2, 9), [(2, 9), (2, 10), (3, 9)])], 2)
    assert [len(m) for m in plan.go_on[0].members] == [1] and plan.cut == ((1, 0, 2),)


def test_nothing_to_sort() -> None:
    assert plan_resume({}, 0, [], [], 1).abort == {}


def test_a_run_without_a_commit_restarts_at_zero() -> None:
    plan = plan_resume({1: 0}, 0, [group(1, (1, 0)), group(2, (1, 1))], [], 3)
    assert [g.group_id for g in plan.keep] == [1] and plan.abort == {"orphaned": (2,)}
