"""What holds the step up for which the trainer waits, and is with nodes that need not be waited for. Pure.

Whatever blocks the current step is taken from a node whose word does not count as soon as one whose word counts has nothing
better to do: the sequence goes on there with all its tokens, at the price of one prefill. From a node whose word counts it is
taken once it is behind. Must not know links or versions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from learner.rollouts.collector import Collector
from learner.rollouts.ledger import Ledger


class Hedge(NamedTuple):
    """A sequence that is to go elsewhere."""

    node: str
    request_id: str
    since: float
    """when the node was given it"""
    behind_s: float = 0.0
    """seconds without progress, where they are more than usual, of a node whose word counts"""


def to_hedge(
    ledger: Ledger, collector: Collector, credible: Callable[[str], bool], behind: Callable[[str, str, int], float]
) -> list[Hedge]:
    """Of the groups that can fill the current step, as many as it lacks, those first of which least is to be taken: what
    strangers hold of them, and what is `behind` (node, request id, its tokens: seconds, 0 for not) at others. Then of the other
    groups what is behind: those that are needed may be given to the next node that is silent, one after the other."""
    held: dict[int, list[Hedge]] = {}
    for group_id in ledger.blockers():
        group = collector.books.groups.get(group_id)
        members = group.members if group is not None else ()
        held[group_id] = [
            Hedge(m.node, name, m.since, late)
            for i, m in enumerate(members)
            if group is not None and m.node
            for name in [group.request_name(i)]
            for late in [behind(m.node, name, len(m.completion.ids)) if credible(m.node) else 0.0]
            if late or not credible(m.node)
        ]
    ranked = sorted(held, key=lambda group_id: len(held[group_id]))
    needed = ledger.fillers(ranked)
    behind_elsewhere = (h for group_id in ranked if group_id not in needed for h in held[group_id] if h.behind_s)
    return [*(hedge for group_id in needed for hedge in held[group_id]), *behind_elsewhere]
