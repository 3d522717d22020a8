"""Which sequences make no progress where they are. Pure: snapshots and times in, verdicts out.

A link can live, and a node report itself ready, while nothing comes: a hung engine, a lost request, a node that
withholds. A reservation that waits there would hold up its buffer, and with it training, for ever. Must not know nodes'
other virtues, the network or what happens to the sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ONE_FACTOR = 10.0
"""One sequence may go without a token so many times longer than a whole node: it can be queued behind others there."""


@dataclass(frozen=True, slots=True)
class Stall:
    node: str
    request_ids: tuple[str, ...]
    reason: str


class StallWatch:
    """`look` is called every few seconds with what every node holds; `stall_s` is how long a node that has work may
    make no token at all."""

    def __init__(self, stall_s: float) -> None:
        self.stall_s = stall_s
        self._moved: dict[str, tuple[int, float]] = {}
        """request id -> (its tokens, when they last changed)"""
        self._node_moved: dict[str, float] = {}
        """node -> when any of its sequences last gained a token, or when it was given work after having none"""
        self._ends: dict[str, int] = {}
        """node -> how many had ended at the last look; of nodes that hold something"""

    def look(self, held: Mapping[str, Mapping[str, int]], now: float, ended: Mapping[str, int] | None = None) -> list[Stall]:
        """`held`: node -> request id -> completion tokens so far; `ended`: node -> how many ended in all, which may have come and
        gone between two looks. What to take away, by node."""
        moved: dict[str, tuple[int, float]] = {}
        node_moved: dict[str, float] = {}
        stalls: list[Stall] = []
        for node, requests in held.items():
            if not requests:
                continue
            latest, ends = self._node_moved.get(node, now), (ended or {}).get(node, 0)
            if ends != self._ends.get(node, ends):
                latest = now
            self._ends[node] = ends
            for request_id, tokens in requests.items():
                before = self._moved.get(request_id)
                moved[request_id] = before if before is not None and before[0] == tokens else (tokens, now)
                if before is not None and before[0] != tokens:
                    latest = now
            node_moved[node] = latest
            if now - latest > self.stall_s:
                stalls.append(Stall(node, tuple(requests), f"no token from this node for {now - latest:.0f} s"))
                continue
            limit = ONE_FACTOR * self.stall_s
            slow = tuple(r for r in requests if now - moved[r][1] > limit)
            if slow:
                stalls.append(Stall(node, slow, f"no token of {slow[0]} for {limit:.0f} s"))
        self._moved, self._node_moved = moved, node_moved
        self._ends = {node: ends for node, ends in self._ends.items() if node in node_moved}
        return stalls
