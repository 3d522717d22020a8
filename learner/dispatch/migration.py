"""Which running sequences to move to another node. Pure.

A move costs one prefill of prompt and tokens so far at the node that takes it, and no token (token-level migration, RLBoost,
arXiv 2510.19225). RLBoost moves what waits from the longest queue, and what runs from the most loaded node to one that runs
nothing. Both are special cases here: a sequence moves when it would be so much faster elsewhere that the prefill pays, the most
pressed first. As fast nodes run out of short sequences, the long ones of slow nodes follow. Must not know how a move is carried
out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from learner.dispatch.node_table import NodeTable, NodeView
from p2p.version import Version

MIN_SPEEDUP = 1.25
"""A sequence moves only to a node where it is at least so many times as fast."""

PREFILL_STEPS = 1 / 20
"""Time to prefill a token, in decoding steps of a sequence alone: operations bound prefill, memory bandwidth bounds decoding."""

LOOKS_A_MOVE = 6
"""Sequences that are looked at closely for each move that may be made. The most urgent come first: where none of them gains, none
will."""

MIN_RETURN = 2.0
"""A move must save at least so many times the seconds that its prefill takes."""

MIN_SAVED_S = 1.0
"""Seconds that a move must save beyond that: it takes a round trip or two."""


@dataclass(frozen=True, slots=True)
class Running:
    """One sequence that a node holds."""

    request_id: str
    peer: str
    min_version: Version
    context: float
    """tokens that it holds, prompt included"""
    expected_tokens: float
    """tokens that it will probably still make"""
    need: float = 0.0
    """as `WaitingSequence.need`"""
    waiting: bool = False
    """it waits for a place in its node's memory, and makes nothing"""


@dataclass(frozen=True, slots=True)
class Move:
    """A running sequence goes from `source` to `target`."""

    request_id: str
    source: str
    target: str
    reason: Literal["waits", "slow"]


def migrate(nodes: Iterable[NodeView], running: Sequence[Running], most: int) -> list[Move]:
    """At most `most` moves, the most urgent first. `running`: what nodes hold, as of the last look."""
    usable = [n for n in nodes if n.live and n.capacity > 0]
    table = NodeTable(usable)
    index = {n.peer: i for i, n in enumerate(usable)}
    takes = np.array([not n.draining for n in usable], bool)
    those = [replace(r, need=min(r.need, table.fastest)) for r in running if r.peer in index]
    needs: dict[int, list[float]] = {}
    for r in those:
        needs.setdefault(index[r.peer], []).append(r.need)
    moves: list[Move] = []
    pace, best = table.pace(0), np.max(np.where(takes, table.pace(1), 0.0), initial=0.0)
    looked = 0
    for r in sorted(those, key=lambda r: (not r.waiting, -r.need, -r.expected_tokens, r.request_id)):
        if len(moves) >= most or looked >= LOOKS_A_MOVE * most:
            break
        i = index[r.peer]
        have = 0.0 if r.waiting else pace[i]
        if best < MIN_SPEEDUP * have:  # at once: of most nodes nothing is to be moved
            continue
        looked += 1
        after = np.where(_takes(table, r, takes), table.pace(1, r.context), 0.0)
        after[i] = 0.0
        t = int(np.argmax(after))
        if after[t] < max(MIN_SPEEDUP * have, 1e-9) or not _pays(table, r, have, after[t], t):
            continue
        needs[i].remove(r.need)
        needs.setdefault(t, []).append(r.need)
        table.put(i, -r.context, -r.expected_tokens, 0.0, -1)
        table.need[i] = max(needs[i], default=0.0)
        table.put(t, r.context, r.expected_tokens, r.need)
        pace, best = table.pace(0), np.max(np.where(takes, table.pace(1), 0.0))
        moves.append(Move(r.request_id, r.peer, usable[t].peer, "waits" if r.waiting else "slow"))
    return moves


def _takes(table: NodeTable, r: Running, takes: np.ndarray) -> np.ndarray:
    """bool: where it could go without slowing what is more pressed there."""
    free = table.able(r.min_version) & table.free(r.context, r.expected_tokens)
    return takes & free & table.harmless(r.context, r.expected_tokens, r.need)


def _pays(table: NodeTable, r: Running, have: float, after: float, target: int) -> bool:
    if have <= 0:
        return True
    saved = r.expected_tokens / have - r.expected_tokens / after
    return bool(saved >= MIN_SAVED_S + MIN_RETURN * PREFILL_STEPS * r.context / table.alone(r.context)[target])
