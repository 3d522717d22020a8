"""What holds the step up for which the trainer waits, and what is to be done about it. Pure.

Whatever blocks the current step is taken from a node whose word does not count as soon as one whose word counts has nothing
better to do: the sequence goes on there with all its tokens, at the price of one prefill. From a node whose word counts it is
taken once it is behind. Must not know links or versions.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from learner.dispatch.node_table import DELIVERING, NodeView
from learner.rollouts.collector import Collector
from learner.rollouts.group import member_name
from learner.rollouts.ledger import Ledger
from learner.rollouts.silences import HELD_UP_S

HEDGE_ANSWER_S = 1.0
"""Seconds in which a node that has ended a sequence before must give back what the trainer waits for. From one that never has, or
was doubted lately, it is taken at once."""

STANDSTILL_S, HEARD_S = 20.0, 3.0
"""Where all nodes whose word counts have been silent for the first time, others that made something before, have nothing to do,
and were heard within the second show that it is not the network: then it is the fault of those that are silent."""


class Hedge(NamedTuple):
    """A sequence that is to go elsewhere."""

    node: str
    request_id: str
    since: float
    """when the node was given it"""
    behind_s: float = 0.0
    """seconds without progress, where they are more than usual, of a node whose word counts"""
    early: bool = False
    """it is not behind, and would be made at once elsewhere"""


class _Asked(dict[str, bool]):
    """What was asked of each node, once: a thousand of them hold four thousand sequences, and this is asked of each."""

    def __init__(self, of: Callable[[str], bool]) -> None:
        self._of = of

    def __missing__(self, node: str) -> bool:
        answer = self[node] = self._of(node)
        return answer


def to_hedge(
    ledger: Ledger, collector: Collector, credible: Callable[[str], bool], behind: Callable[[str, str, int], float],
    early: Callable[[str, str], bool],
) -> list[Hedge]:
    """Of the groups that can fill the current step, as many as it lacks, those first of which least is to be taken: what
    strangers hold of them, and what is `behind` (node, request id, its tokens: seconds, 0 for not) or `early` at others. Then of
    the other groups what is behind: those that are needed may be given to the next node that is silent, one after the other."""
    held: dict[int, list[Hedge]] = {}
    counts = _Asked(credible)
    for group_id in ledger.blockers():
        group = collector.books.groups.get(group_id)
        members = group.members if group is not None else ()
        held[group_id] = [
            Hedge(m.node, name, m.since, late, soon)
            for i, m in enumerate(members)
            if group is not None and m.node
            for name in [group.request_name(i)]
            for late in [behind(m.node, name, len(m.completion.ids)) if counts[m.node] else 0.0]
            for soon in [not late and counts[m.node] and early(m.node, name)]
            if late or soon or not counts[m.node]
        ]
    ranked = sorted(held, key=lambda group_id: len(held[group_id]))
    needed = ledger.fillers(ranked)
    behind_elsewhere = (h for group_id in ranked if group_id not in needed for h in held[group_id] if h.behind_s)
    return [*(hedge for group_id in needed for hedge in held[group_id]), *behind_elsewhere]


class Way(Enum):
    """What is done with a sequence that is to go elsewhere."""

    ASK = auto()
    """its node is asked for it, and for what it has made: it has shown that it answers"""
    QUEUED = auto()
    """it is taken, and nobody is at fault: its node has more than it can decode at once, and this one waits there for a slot"""
    EARLY = auto()
    """it is taken, and nobody is at fault yet: whoever makes it at once will show whose fault it was"""
    PAUSED = auto()
    """it is taken, and may come back: the sequence is silent, not the node"""
    TAKE = auto()
    """it is taken"""


class HedgeMove(NamedTuple):
    """A sequence, and what is done with it."""

    hedge: Hedge
    way: Way
    doubt: str = ""
    """why its node is to blame; empty where it is not"""


@dataclass(frozen=True, slots=True)
class Fleet:
    """What is known of the nodes when it is decided."""

    nodes: Sequence[NodeView]
    credible: Callable[[str], bool]
    doubted: Callable[[str], bool]
    ended: Mapping[str, int]
    """sequences that ended as asked, by node"""
    last_came: Callable[[str], float]
    """node -> when anything came from it"""
    delivers: Callable[[str], float]
    """node -> tokens that came from it lately, where that decides; else 0"""
    begun: Callable[[str, str], bool]
    """node, request id -> whether it made progress there"""
    asked: Mapping[tuple[str, str], float]
    """(node, request id) -> when it was asked back"""
    spared: Container[tuple[str, str]]
    """(node, group.member) that was taken as PAUSED lately"""
    fault_s: float
    """seconds after which who has a sequence that the trainer waits for is at fault"""


def free_places(
    nodes: Iterable[NodeView], credible: Callable[[str], bool], last_came: Callable[[str], float], since: float | None = None
) -> dict[str, int]:
    """Free places of nodes whose word counts. With `since`: of those that have nothing to do, or from which tokens came since
    then. What keeps all nodes silent at once is the fault of none."""
    return {
        n.peer: max(0, n.capacity - n.load) for n in nodes
        if n.live and not n.draining and credible(n.peer) and (since is None or not n.load or last_came(n.peer) > since)
    }  # fmt: skip


def moves(hedges: Iterable[Hedge], fleet: Fleet, now: float) -> list[HedgeMove]:
    """What is done with each of `hedges` for which another node has a place."""
    free = free_places(fleet.nodes, fleet.credible, fleet.last_came)
    well = free_places(fleet.nodes, fleet.credible, fleet.last_came, since=now - HELD_UP_S / 2)
    witnesses = {
        n.peer: 1 for n in fleet.nodes
        if n.live and not n.draining and not n.load and fleet.ended.get(n.peer) and n.unheard_s < HEARD_S
    }  # fmt: skip
    queued = {n.peer: n.load - n.capacity for n in fleet.nodes}
    enough = DELIVERING * max((fleet.delivers(n.peer) for n in fleet.nodes), default=0.0)
    found: list[HedgeMove] = []
    placed = 0
    for hedge in hedges:
        places = well if hedge.behind_s or hedge.early else free
        if hedge.behind_s > STANDSTILL_S and not any(well.values()):
            places = witnesses
        if placed >= sum(places.values()) - places.get(hedge.node, 0):
            continue
        placed += 1
        if (hedge.behind_s or hedge.early) and queued.get(hedge.node, 0) > 0 and not fleet.begun(hedge.node, hedge.request_id):
            queued[hedge.node] -= 1
            found.append(HedgeMove(hedge, Way.QUEUED))
        elif hedge.early:
            found.append(HedgeMove(hedge, Way.EARLY))
        elif (move := _move(hedge, fleet, now, enough)) is not None:
            found.append(move)
    return found


def _move(hedge: Hedge, fleet: Fleet, now: float, enough: float) -> HedgeMove | None:
    """None while its node has time to answer. Who delivers has `enough` tokens to show, if that is above 0."""
    if fleet.ended.get(hedge.node) and not hedge.behind_s and not fleet.doubted(hedge.node):
        asked = fleet.asked.get((hedge.node, hedge.request_id))
        if asked is None or now - asked <= HEDGE_ANSWER_S:
            return HedgeMove(hedge, Way.ASK) if asked is None else None
    paused = hedge.behind_s and 0 < enough <= fleet.delivers(hedge.node)
    if paused and (hedge.node, member_name(hedge.request_id)) not in fleet.spared:
        return HedgeMove(hedge, Way.PAUSED)
    held_s = now - hedge.since
    if hedge.behind_s:
        return HedgeMove(hedge, Way.TAKE, f"{hedge.request_id} held the trainer up: no progress for {hedge.behind_s:.1f} s")
    why = f"{hedge.request_id} held the trainer up, after {held_s:.1f} s at this node"
    return HedgeMove(hedge, Way.TAKE, why if held_s > fleet.fault_s else "")
