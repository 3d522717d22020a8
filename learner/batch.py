"""Groups on their way into a step: checked, then cut into forwards. Pure; must not know torch or the network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from learner.advantages import group_advantages
from learner.trajectory import Group, Trajectory
from p2p.errors import ShoalError
from p2p.version import Version


class BadBatch(ShoalError):
    """A group that must not be trained on; the message names step, group and reason."""


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of a forward."""

    trajectory: Trajectory
    advantage: float


def check_group(group: Group, version: Version, max_staleness: int) -> None:
    """The invariant, a second time (the ledger holds it first): consume_version - oldest_span_version <= max_staleness.

    `version` is the learner's: its epoch and the steps done. BadBatch when a span is too old, newer than the learner,
    of a future epoch or does not cover its tokens, or when tokens and logprobs do not pair up.
    """

    def refuse(reason: str) -> BadBatch:
        return BadBatch(f"step {version.step}, group {group.group_id}: {reason}")

    if not group.trajectories:
        raise refuse("no trajectories")
    for number, t in enumerate(group.trajectories):
        who = f"trajectory {number} (node {t.node})"
        if not t.prompt_ids or not t.completion_ids:
            raise refuse(f"{who} has an empty prompt or completion")
        if len(t.logprobs) != len(t.completion_ids):
            raise refuse(f"{who} has {len(t.completion_ids)} tokens and {len(t.logprobs)} logprobs")
        at = 0
        for span in t.spans:
            if span.start != at or span.stop <= span.start:
                raise refuse(f"{who}: spans do not cover the completion in order")
            at = span.stop
            if span.version.epoch > version.epoch:
                raise refuse(f"{who} has version {span.version}, of a future epoch (learner is at {version})")
            if span.version.step > version.step:
                raise refuse(f"{who} has version {span.version}, newer than the learner's {version}")
            age = version.step - span.version.step
            if age > max_staleness:
                raise refuse(f"{who} has version {span.version}, {age} steps old; max_staleness is {max_staleness}")
        if at != len(t.completion_ids):
            raise refuse(f"{who}: spans cover {at} of {len(t.completion_ids)} tokens")


def rows_of(groups: Sequence[Group], scale: bool) -> list[Row]:
    """Every sequence of `groups` with its advantage, in order."""
    return [
        Row(trajectory, float(advantage))
        for group in groups
        for trajectory, advantage in zip(
            group.trajectories,
            group_advantages([t.reward for t in group.trajectories], scale=scale),
            strict=True,
        )
    ]


def cut_forwards(rows: Sequence[Row], budget: int) -> Iterator[list[Row]]:
    """Forwards of at most `budget` padded tokens each (a single longer row goes alone).

    Rows are sorted by length first, which is what keeps the padding small when lengths differ; ties keep their order,
    so the cut depends on nothing but `rows`.
    """
    pack: list[Row] = []
    for row in sorted(rows, key=_length):
        if pack and _length(row) * (len(pack) + 1) > budget:  # sorted: the newest row is the longest
            yield pack
            pack = []
        pack.append(row)
    if pack:
        yield pack


def _length(row: Row) -> int:
    return len(row.trajectory.prompt_ids) + len(row.trajectory.completion_ids)
