"""Groups for a collector, from the few values that a test is about."""

from __future__ import annotations

from collections.abc import Sequence

from learner.journal.records import Piece, ReservedGroup, UnfinishedGroup
from learner.rollouts.collector import Collector
from learner.rollouts.group_spec import GroupSpec
from learner.rollouts.outcomes import Sampling, WholeGroup
from p2p.version import Version


def open_group(
    collector: Collector, group_id: int, task_index: int, prompt_ids: Sequence[int], version: Version, seeds: Sequence[int],
    sampling: Sampling, *, extra: int = 0,
) -> tuple[str, ...]:  # fmt: skip
    """`Collector.open_group`."""
    reserved = ReservedGroup(group_id, task_index, version, len(seeds) - extra, extra=extra)
    return collector.open_group(reserved, GroupSpec(tuple(prompt_ids), list(seeds), 0), sampling)


def restore_group(
    collector: Collector, group_id: int, version: Version, seeds: Sequence[int], sampling: Sampling,
    members: Sequence[Sequence[Piece]], *, extra: int = 0,
) -> WholeGroup | None:  # fmt: skip
    """`Collector.restore_group`, of prompt 30."""
    reserved = ReservedGroup(group_id, 30, version, len(seeds) - extra, extra=extra)
    left = UnfinishedGroup(reserved, tuple(tuple(pieces) for pieces in members))
    return collector.restore_group(left, GroupSpec((1, 2), list(seeds), 0), sampling)
