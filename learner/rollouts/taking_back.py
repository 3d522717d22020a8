"""What a node made that was caught cheating, as far as the trainer does not have it: it is made again. A thin shell.

What is whole, rewarded or not, is given up, and its prompt is drawn again as a new group. A completion that is under way goes on
from before the node's first token, in its own group: so the node costs no other node's work. Of episodes the whole group is given
up, for their environment has heard the tokens. Each step is one transaction of the journal, and after each of them memory and
journal are as after an abort or a cut of any other cause: a crash in between leaves the rest as if it had not been found out.
Must not know why a node was caught.
"""

from __future__ import annotations

from typing import NamedTuple

from learner.rollouts.controller import Rollouts


class TakenBack(NamedTuple):
    """What is made again."""

    groups: int = 0
    """whole ones, and those of episodes"""
    completions: int = 0
    """under way, that lost tokens"""
    tokens: int = 0
    """that these lost"""

    def __str__(self) -> str:
        return f"{self.groups} groups, and {self.tokens:,} tokens of {self.completions} completions under way, are made again"


def take_back(rollouts: Rollouts, node: str) -> TakenBack:
    """Everything of `node` that the trainer does not have. sqlite3.Error when the journal cannot be written: the run must end."""
    collector, buffers = rollouts.collector, rollouts.buffers
    rollouts.tokens.write()  # what is cut off below must be in the journal: pieces follow each other
    whole = buffers.take_back(node)
    episodes = collector.books.episodes_of(node)
    for group_id in episodes:
        buffers.give_up(group_id)
    cuts, stopped = collector.books.cut_back(node)
    rollouts.journal.cut_tokens((cut.group_id, cut.member, cut.position) for cut in cuts)
    rollouts.cancel(stopped)
    if whole or episodes:
        buffers.settle()
    if whole or episodes or cuts:
        rollouts.need_dispatch()
    return TakenBack(len(whole) + len(episodes), len(cuts), sum(cut.tokens for cut in cuts))
