"""What a learner that starts again may still train on. Pure; must not know SQLite, checkpoints or the ledger's buffers.

A version (e, s) is a **survivor** when the weights it names are on the path that led to the last commit: s is at most
the step from which epoch e + 1 started (for the newest epoch: the last commit's step), and at least the step from which
e started. Start steps never fall, so surviving the end of its own epoch is surviving all that followed.
Example: epoch 1 reaches step 9 with its last commit at 7; epoch 2 starts at 7 and commits 9. (1, 7) and
(2, 8) survive; (1, 8) and (1, 9) name other weights than (2, 8) and (2, 9), and stay orphaned.

Along that path steps order versions across epochs, so the ledger's plain steps are right for everything kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from learner.trajectory import Group
from p2p.version import Version


@dataclass(frozen=True, slots=True)
class ResumePlan:
    keep: tuple[Group, ...]
    """in their old order; `Ledger.restore` places them"""
    abort: dict[str, tuple[int, ...]]
    """reason -> group ids: "orphaned", "stale", "restart" """


def survives(version: Version, epochs: Mapping[int, int], last_commit_step: int) -> bool:
    """Whether the weights of `version` are on the path to the last commit. `epochs` maps each to its start step; the
    epoch now starting may be in it or not."""
    start = epochs.get(version.epoch)
    if start is None:
        return False
    later = [epoch for epoch in epochs if epoch > version.epoch]
    end = epochs[min(later)] if later else last_commit_step
    return start <= version.step <= end


def plan_resume(
    epochs: Mapping[int, int],
    last_commit_step: int,
    unconsumed: Sequence[Group],
    unfinished: Sequence[int],
    max_staleness: int,
) -> ResumePlan:
    """Sort what a crash left behind. `unconsumed` are finished groups that no commit consumed, `unfinished` the ids of
    groups still generating (their tokens were only in memory), `last_commit_step` is 0 before the first commit."""
    keep: list[Group] = []
    orphaned: list[int] = []
    stale: list[int] = []
    for group in unconsumed:
        versions = [span.version for trajectory in group.trajectories for span in trajectory.spans]
        if not all(survives(version, epochs, last_commit_step) for version in versions):
            orphaned.append(group.group_id)
        elif last_commit_step - min(version.step for version in versions) > max_staleness:
            stale.append(group.group_id)
        else:
            keep.append(group)
    found = {"orphaned": tuple(orphaned), "stale": tuple(stale), "restart": tuple(unfinished)}
    return ResumePlan(tuple(keep), {reason: ids for reason, ids in found.items() if ids})
