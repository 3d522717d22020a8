"""The port between the rollouts and whoever gives whole groups their rewards. Must not know torch, the network or the journal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from learner.tasks.port import Score
from p2p.errors import ShoalError


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion that is to get its reward."""

    text: str
    """special tokens stripped"""
    node: str
    """peer id of the node that made the last token: slow answers of one node may not keep those of others waiting"""
    ids: tuple[int, ...] = ()
    """its token ids, for reward functions that ask for them"""
    nodes: tuple[str, ...] = ()
    """all nodes that made tokens of it, where it was more than one"""

    @property
    def makers(self) -> frozenset[str]:
        """Whose work it is."""
        return frozenset(self.nodes or (self.node,))


@dataclass(frozen=True, slots=True)
class NoReward:
    """In place of a reward: it could not be had of this answer."""

    why: str


class GroupUnscored(ShoalError):
    """This group's reward cannot be had, and that is not its answers' fault. Another group takes its place. The text says why,
    and of which prompt."""


class GroupScorer(Protocol):
    """Gives groups their rewards. Several groups may be scored at once, each from a task of its own."""

    async def score(self, task_index: int, answers: Sequence[Answer]) -> Sequence[Score | NoReward]:
        """One score an answer, in order; `NoReward` for those that are to be left out of the group. GroupUnscored when this group
        cannot be scored; any other ShoalError when the run must stop."""
        ...
