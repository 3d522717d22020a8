"""Which sequences go elsewhere while nobody's word counts: those with which a node hardly begins, or takes long, where another
has nothing to do. Pure: snapshots and times in.

Strangers who were there first hold all that is in flight, and who is honest has nothing to show what it is by. Nobody is doubted
for it: who is slow to begin, a cold engine with a long prompt, is no worse than who says nothing. Each gets its turn, and what it
made goes along. Must not know whose word counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from learner.dispatch.giving_way import NOTHING_SEEN, Speeds
from learner.dispatch.node_table import NodeView
from learner.rollouts.group import member_name
from p2p.forgetting import forget_oldest

BEGIN_S, BEGIN_TOKENS = 6.0, 3
"""A sequence that has made fewer tokens in so many seconds has hardly begun."""

LONG = 4.0
"""So many times BEGIN_S a node has that makes tokens. What is a slow pace is not known yet: who made BEGIN_TOKENS in each BEGIN_S
held all that was in flight for half an hour."""

QUICK_TRIES = 4
"""Nodes that have BEGIN_S to begin with a sequence; each one after them has twice as long as the one before. Where all nodes are
slow to begin, moves would else never end."""

MOST_TRIES = 16
"""More are not counted."""

REST_S = 30.0
"""Seconds for which a node from which one was taken is given nothing: so long others come first."""


@dataclass(slots=True)
class _Try:
    """A sequence at a node."""

    tokens: int
    """at the last look that counted"""
    at: float
    """when that was"""
    since: float


class FirstTries:
    """`look` is called every few seconds."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], _Try] = {}
        """(node, request id) -> what was seen of it there"""
        self._tries: dict[str, int] = {}
        """group.member -> how often it was taken"""

    def look(
        self, held: Mapping[str, Mapping[str, int]], nodes: Iterable[NodeView], now: float, speeds: Speeds = NOTHING_SEEN
    ) -> dict[str, tuple[str, ...]]:
        """`held`: node -> request id -> completion tokens so far. What to take, by node: no more than nodes that have nothing to
        do have places for, the longest there first."""
        before, self._seen = self._seen, {}
        idle = [n for n in nodes if n.live and not n.draining and not n.load]
        untried = any(n.peer in speeds.untried for n in idle)
        late: list[tuple[float, str, str]] = []
        for node, requests in held.items():
            for request_id, tokens in requests.items():
                seen = self._seen[node, request_id] = before.get((node, request_id)) or _Try(tokens, now, now)
                tries = self._tries.get(member_name(request_id), 0)
                patience = BEGIN_S * 2.0 ** max(0, tries + 1 - QUICK_TRIES)
                if untried:  # each is tried once, so that this ends
                    patience = 0.0 if node in speeds.slow else BEGIN_S
                made = tokens - seen.tokens
                if (now - seen.at >= patience and made < BEGIN_TOKENS) or now - seen.since >= LONG * BEGIN_S * 2.0**tries:
                    late.append((seen.at, node, request_id))
                elif now - seen.at >= patience:
                    seen.tokens, seen.at = tokens, now
        places = sum(n.capacity if n.limit is None else min(n.capacity, n.limit) for n in idle) if late else 0
        found: dict[str, tuple[str, ...]] = {}
        for _, node, request_id in sorted(late)[:places]:
            found[node] = (*found.get(node, ()), request_id)
            member = member_name(request_id)
            self._tries[member] = min(self._tries.pop(member, 0) + 1, MOST_TRIES)
        forget_oldest(self._tries)
        return found
