"""From a whole group to its scorer and back: who wrote which answer goes along, and answers without a reward are left out. A thin
shell. Must not know how a reward is had, nodes beyond their ids, or the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from learner.rewards.port import Answer, GroupScorer
from learner.tasks.port import Score
from learner.trajectory import Group


async def scored_by(scorer: GroupScorer, group: Group, texts: Sequence[str]) -> Group:
    """The group with its rewards, given each trajectory's text: those trajectories that have one. Raises as `GroupScorer`."""
    answers = [
        Answer(text, t.node, t.completion_ids, tuple(maker.node for maker in t.makers))
        for text, t in zip(texts, group.trajectories, strict=True)
    ]
    pairs = zip(group.trajectories, await scorer.score(group.task_index, answers), strict=True)
    kept = [(t, score) for t, score in pairs if isinstance(score, Score)]
    return replace(group, trajectories=tuple(t for t, _ in kept)).scored([score for _, score in kept])
