"""Which nodes give way to quicker ones, and how much they may hold meanwhile. Pure; told the time.

What may be in flight is bounded by staleness. Where the quick nodes alone would make all of it before a slow one had made one
sequence, whatever the slow one holds is only waited for: the threshold of a slow server (Lin and Kumar, Optimal control of a
queueing system with two heterogeneous servers, IEEE Transactions on Automatic Control 29(8), 1984). How quick a node is follows
from what came from it and for how long it held what it was given, not from what it says: who is late, pauses, withholds, trickles
or gives back is slow for as long as it does so. Must not know whose fault that is, or what is in flight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from learner.dispatch.node_table import NodeView, oversubscribed
from p2p.forgetting import forget_oldest

SLOWER = 4.0
"""So many times less a slow node makes of a place than the quickest does. Less than that the batch and chance account for."""

SILENT_S = 2.0
"""While nobody is proven, who has been silent for less is not slow: a stranger that sends rubbish is quicker than anybody."""

BEST_S = 60.0
"""While nobody is proven, the quickest counts e times less with each so many seconds: those that were quick may all turn."""

REMEMBERED = 2.0
"""Sequences by which a node is judged at the least; else as many as it holds. Few, since a node may turn at any time."""

SLOWEST = 16.0
"""So many times slower than the quickest a node counts at the most: after a few quick sequences it is quick again."""

LENGTHS = 64.0
"""Ended sequences over which the usual length is taken."""

TRY_S = 10.0
"""Seconds between two sequences for nodes that give way and have none: in turn, so that each can show that it is quick again."""

STANDSTILL_S = 5.0
"""Seconds after which nobody gives way to quick nodes that have nothing to do: they cannot take what waits."""


class Speeds(NamedTuple):
    """What was seen of the nodes at the last look, by peer."""

    slow: frozenset[str] = frozenset()
    untried: frozenset[str] = frozenset()
    """were given nothing yet"""


NOTHING_SEEN = Speeds()
"""Before the first look."""


@dataclass(slots=True)
class _Places:
    """What came of the places that a node had in use."""

    at: float
    """the time of the last count"""
    held: int
    """sequences that it has had since then"""
    total: int
    """tokens that had come from it by then, in all"""
    last_end: int
    """tokens that had come when the last one ended"""
    tokens: float = 0.0
    """that are remembered"""
    seconds: float = 0.0
    """for which it held sequences, summed over them, until tokens came last"""
    since: float = 0.0
    """the same since then"""
    silent_s: float = 0.0
    """for which it held anything since then"""
    tried: float = -math.inf
    """when it was last given something although it gives way"""

    def count(self, held: int, total: int, now: float, usual: float, best: float) -> None:
        self.since += (now - self.at) * (self.held + held) / 2
        self.silent_s += now - self.at if self.held or held else 0.0
        if total > self.total:
            self.tokens, self.seconds = self.tokens + total - self.total, self.seconds + self.since
            self.since = self.silent_s = 0.0
            if best:
                self.seconds = min(self.seconds, SLOWEST * self.tokens / best)
        remembered = usual * max(REMEMBERED, held)
        if self.tokens > remembered > 0:
            self.seconds *= remembered / self.tokens
            self.tokens = remembered
        # Counted anew: another engine under its name.
        self.last_end = min(self.last_end, total)
        self.at, self.held, self.total = now, held, total

    def rate(self, usual: float, best: float = math.inf) -> float:
        """Tokens a second of a place. What has come counts until it is longer ago than what it holds should take; of the first
        sequence that it has yet to make, what it lacks as if it made that as quickly as the best."""
        lacks = max(0.0, usual - self.tokens)
        spent = max(self.seconds, self.since) + lacks / best
        return (self.tokens + lacks) / spent if spent else best


class GivingWay:
    """`count` is told of every node before each `look`, `gave` what follows from it, `ended` what ended."""

    def __init__(self) -> None:
        self.speeds = NOTHING_SEEN
        self._of: dict[str, _Places] = {}
        self._usual = 0.0
        """tokens of a sequence that ended; 0 until one has"""
        self._best = 0.0
        """tokens a second of a place at the quickest node, at the last look"""
        self._next = ""
        """who is to be tried"""
        self._looked = self._tried = self._worked = -math.inf
        """when it was looked; when one that gives way was last tried; when a quick node had something to do"""

    def count(self, node: str, held: int, total: int, now: float) -> None:
        """It holds so many sequences, and so many tokens have come from it in all."""
        of = self._of.get(node)
        if of is None:
            of = self._of[node] = _Places(now, held, total, total)
            forget_oldest(self._of)
        of.count(held, total, now, self._usual, self._best)

    def ended(self, node: str, total: int) -> None:
        """A sequence ended there, after so many tokens in all."""
        of = self._of.get(node)
        if of is not None and total > of.last_end:
            self._usual += (total - of.last_end - self._usual) / (LENGTHS if self._usual else 1.0)
            of.last_end = total

    def gave(self, node: str, now: float) -> None:
        """It was given one sequence more."""
        if (of := self._of.get(node)) is not None:
            of.held += 1
            if node == self._next:
                of.tried = self._tried = now

    def look(self, nodes: Sequence[NodeView], outstanding: int, now: float, *, proven: bool = True) -> list[NodeView]:
        """The same nodes, those that give way with fewer places. `outstanding`: sequences that may be in flight together now;
        `proven`: whether there are nodes whose word counts because they are proven. Then only those count as quick."""
        able = [n for n in nodes if n.live and not n.draining and n.capacity > 0 and n.peer in self._of]
        shown = [n for n in able if n.credible] if proven else able
        best = max(map(self._shown, shown), default=0.0)
        if not proven:
            best = max(best, self._best * math.exp((self._looked - now) / BEST_S))
        self._best, self._looked = best, now
        rates = {n.peer: self._of[n.peer].rate(self._usual, best) for n in able} if best else {}
        slow = {p for p, rate in rates.items() if rate * SLOWER < best and (proven or self._of[p].silent_s > SILENT_S)}
        untried = (n.peer for n in able if not n.load and not self._of[n.peer].seconds and not self._of[n.peer].since)
        quick = [n for n in shown if n.peer not in slow]
        if any(n.load for n in quick):
            self._worked = now
        if now - self._worked > STANDSTILL_S:
            slow.clear()
        self.speeds = Speeds(frozenset(slow), frozenset(untried))
        if not slow:
            return list(nodes)
        makes = sum(oversubscribed(n) * rates[n.peer] for n in quick)
        gives: dict[str, NodeView] = {}
        for n in sorted((n for n in able if n.peer in slow), key=lambda n: -rates[n.peer]):
            left = int(outstanding - makes / rates[n.peer])
            gives[n.peer] = replace(n, limit=min(oversubscribed(n), max(n.load, left)), gives_way=True)
            makes += oversubscribed(n) * rates[n.peer]
        self._try_one(gives, now)
        return [gives.get(n.peer, n) for n in nodes]

    # ---- inside

    def _try_one(self, gives: dict[str, NodeView], now: float) -> None:
        self._next = ""
        idle = [n for n in gives.values() if not n.load and not n.limit]
        if idle and now - self._tried >= TRY_S:
            longest = min(idle, key=lambda n: self._of[n.peer].tried)
            gives[longest.peer] = replace(longest, limit=1, tries=True)
            self._next = longest.peer

    def _shown(self, node: NodeView) -> float:
        """What it has shown that it can do; 0 while it has not."""
        of = self._of[node.peer]
        return of.rate(self._usual) if of.seconds and of.tokens >= self._usual > 0 else 0.0
