"""What a learner that starts again may still train on, and which of it has a place. Pure; must not know SQLite or checkpoints.

A version (e, s) is a **survivor** when the weights it names are on the path that led to the last commit: s is at most
the step from which epoch e + 1 started (for the newest epoch: the last commit's step), and at least the step from which
e started. Start steps never fall, so surviving the end of its own epoch is surviving all that followed.
Example: epoch 1 reaches step 9 with its last commit at 7; epoch 2 starts at 7 and commits 9. (1, 7) and
(2, 8) survive; (1, 8) and (1, 9) name other weights than (2, 8) and (2, 9), and stay orphaned.

Along that path steps order versions across epochs, so the ledger's plain steps are right for everything kept. A group that
goes on asks for a node at or past its last token's version (e, s): s is at most the new epoch's first step, so every node of
the new epoch is past it, whether versions are compared by step or as (epoch, step).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from learner.journal.journal import SURPLUS
from learner.journal.records import ReservedGroup, UnfinishedGroup
from learner.rollouts.group_spec import RolloutSettings
from learner.rollouts.ledger import Ledger
from learner.trajectory import Group
from p2p.version import Version


@dataclass(frozen=True, slots=True)
class ResumePlan:
    keep: tuple[Group, ...]
    """finished, in their old order; `Ledger.restore` places them"""
    go_on: tuple[UnfinishedGroup, ...]
    """unfinished, in their old order, with the tokens that count: each member's up to the first of lost weights, so without what
    an environment answered to those"""
    cut: tuple[tuple[int, int, int], ...]
    """(group id, member, position): what the journal holds of these members from there on is of lost weights"""
    abort: dict[str, tuple[int, ...]]
    """reason -> group ids: "orphaned" (weights lost), "stale" """


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
    unfinished: Sequence[UnfinishedGroup],
    max_staleness: int,
) -> ResumePlan:
    """Sort what a crash left behind. `unconsumed` are finished groups that no commit consumed, `unfinished` those still
    generating, with their tokens; `last_commit_step` is 0 before the first commit."""

    def fate(versions: Sequence[Version]) -> str:
        if not all(survives(version, epochs, last_commit_step) for version in versions):
            return "orphaned"
        return "stale" if last_commit_step - min(version.step for version in versions) > max_staleness else ""

    keep: list[Group] = []
    go_on: list[UnfinishedGroup] = []
    cut: list[tuple[int, int, int]] = []
    abort: dict[str, list[int]] = {"orphaned": [], "stale": []}
    for group in unconsumed:
        reason = fate([span.version for trajectory in group.trajectories for span in trajectory.spans])
        if reason:
            abort[reason].append(group.group_id)
        else:
            keep.append(group)
    for left in unfinished:
        # Its tokens are at or past the version of its reservation, which alone bounds their age.
        reason = fate([left.group.version])
        if reason:
            abort[reason].append(left.group_id)
            continue
        members = []
        for number, pieces in enumerate(left.members):
            lost = next((p for p in pieces if p.version is not None and not survives(p.version, epochs, last_commit_step)), None)
            if lost is not None:
                cut.append((left.group_id, number, lost.start))
                pieces = tuple(p for p in pieces if p.start < lost.start)
            members.append(pieces)
        go_on.append(replace(left, members=tuple(members)))
    return ResumePlan(tuple(keep), tuple(go_on), tuple(cut), {reason: tuple(ids) for reason, ids in abort.items() if ids})


@dataclass(frozen=True, slots=True)
class LeftOver:
    """What a crash left that has a place in this epoch's buffers, and what has none."""

    ledger: Ledger
    finished: dict[int, Group]
    """group id -> rewarded group"""
    go_on: list[UnfinishedGroup]
    surplus: list[UnfinishedGroup]
    """the crash came between a full buffer and their abort"""
    abort: dict[str, list[int]]
    """reason -> group ids, the surplus among them"""


def place(plan: ResumePlan, step: int, same_spec: Callable[[ReservedGroup], bool], settings: RolloutSettings) -> LeftOver:
    """The ledger at `step` with what `plan` keeps. A group goes on only where `same_spec` says that this epoch would make the
    same of it: its prompt, seeds and sampling."""
    go_on = [g for g in plan.go_on if same_spec(g.group)]
    ledger, misfits = Ledger.restore(
        settings.max_staleness, settings.groups_per_step, step,
        finished=[(g.group_id, g.oldest.step) for g in plan.keep],
        reserved=[(g.group_id, g.group.version.step) for g in go_on],
        extra_groups=settings.extra_groups,
    )  # fmt: skip
    surplus = [g for g in go_on if g.group_id in misfits] if settings.extra_groups else []
    abort = {reason: list(ids) for reason, ids in plan.abort.items()}
    abort["restart"] = [g.group_id for g in plan.go_on if not same_spec(g.group)]
    abort[SURPLUS] = [g.group_id for g in surplus]
    abort.setdefault("stale", []).extend(group_id for group_id in misfits if group_id not in abort[SURPLUS])
    finished = {g.group_id: g for g in plan.keep if g.group_id not in misfits}
    return LeftOver(ledger, finished, [g for g in go_on if g.group_id not in misfits], surplus, abort)
