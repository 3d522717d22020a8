"""What survives a crash, several crashes in a row, and a version that one epoch lost and the next one reached again."""

from __future__ import annotations

import pytest

from learner.ledger import Ledger
from learner.recovery import plan_resume, survives
from learner.trajectory import Group, Trajectory
from p2p.protocol.rollout import Span
from p2p.version import Version


def group(group_id: int, *versions: tuple[int, int]) -> Group:
    spans = tuple(Span(Version(*v), i, i + 1) for i, v in enumerate(versions))
    n = len(versions)
    whole = Trajectory((1,), (2,) * n, (-0.5,) * n, spans, 0.0, "stop", "node", 7)
    return Group(group_id, group_id, (whole,))


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
    plan = plan_resume(EPOCHS, 9, groups, [6, 7], max_staleness=2)
    assert [g.group_id for g in plan.keep] == [1, 5]
    assert plan.abort == {"orphaned": (2, 3), "stale": (4,), "restart": (6, 7)}
    ledger, misfits = Ledger.restore(2, 1, 9, [(g.group_id, g.oldest.step) for g in plan.keep])
    assert misfits == () and ledger.occupied(9) == [1] and ledger.occupied(10) == [5]


def test_nothing_to_sort() -> None:
    assert plan_resume({}, 0, [], [], 1).abort == {}


def test_a_run_without_a_commit_restarts_at_zero() -> None:
    plan = plan_resume({1: 0}, 0, [group(1, (1, 0)), group(2, (1, 1))], [], 3)
    assert [g.group_id for g in plan.keep] == [1] and plan.abort == {"orphaned": (2,)}
