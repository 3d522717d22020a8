"""Which nodes give way to quicker ones, and how much they may hold meanwhile. Pure; told the time.

What may be in flight is bounded by staleness. Where the quick nodes alone would make all of it before a slow one had made one
sequence, whatever the slow one holds is only waited for: the threshold of a slow server (Lin and Kumar, Optimal control of a
queueing system with two heterogeneous servers, IEEE Transactions on Automatic Control 29(8), 1984). How quick a node is follows
from what came from it and for how long it held what it was given, not from what it says: who is late, pauses, withholds, trickles
or gives back is slow for as long as it does so. Must not know whose fault that is, or what is in flight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from learner.dispatch.node_table import NodeView, oversubscribed
from learner.dispatch.often_late import Making, OftenLate
from p2p.forgetting import forget_oldest

SLOWER = 3.0
"""So many times less a slow node makes of a place than the quickest does. Less than that the batch and chance account for, and
where two are quick and six are not, all of them are needed."""

SILENT_S = 2.0
"""While nobody is proven, who has been silent for less is not slow: a stranger that sends rubbish is quicker than anybody."""

BEST_S = 60.0
"""While nobody is proven, the quickest counts e times less with each so many seconds: those that were quick may all turn."""

REMEMBERED = 2.0
"""Sequences by which a node is judged at the least; else as many as it holds. Few, since a node may turn at any time."""

SLOWEST = 8.0
"""So many times slower than the quickest a node counts at the most: after a few quick sequences it is quick again."""

LENGTHS = 64.0
"""Ended sequences over which the usual length is taken."""

TRY_S = 15.0
"""Seconds between two sequences for nodes that give way and have none: in turn, so that they can show that they are quick again.
Each may hold up a step by some two seconds."""

LAG_S = 1.5
"""Seconds after which no node is waited for to have the newest version. Who took longer the last time is not waited for."""

LONGEST = 4.0
"""Usual lengths that a sequence counts at the most for what is usual."""

LEAST_BEST = 1e-9
"""Tokens a second below which nobody is quick."""

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
    ends: float = 0.0
    """sequences that ended, of those that they are of"""
    seconds: float = 0.0
    """for which it held the sequences that they are of, summed over them; and others that were taken from it"""
    since: float = 0.0
    """the same of those that it holds"""
    silent_s: float = 0.0
    """for which it held anything since tokens came last"""
    behind_since: float | None = None
    """when it began to lack the newest version"""
    lag_s: float = 0.0
    """how long it lacked it the last time"""
    came_at: float = -math.inf
    """when tokens came last"""
    tried: float = -math.inf
    """when it was last given something although it gives way"""

    def count(self, held: int, total: int, now: float, usual: float, best: float) -> None:
        # What ended did so just now: whoever counts is called for it.
        self.since += (now - self.at) * self.held
        self.silent_s += now - self.at if self.held else 0.0
        came = max(0, total - self.total)
        if self.held and self.since:
            # Of what it held the part is over that left, or of which as many tokens came as it usually has. Were it all, a node
            # would look slow whenever the first of those comes that it was given together.
            over = max(self.held - held, came / usual if usual else 0.0) * self.since / self.held
            self.seconds, self.since = self.seconds + min(over, self.since), max(0.0, self.since - over)
        if came:
            self.tokens, self.silent_s, self.came_at = self.tokens + came, 0.0, now
        made = max(self.tokens, self.ends * usual)
        if best and made:
            self.seconds = min(self.seconds, SLOWEST * made / best)
        remembered = usual * max(REMEMBERED, held)
        if made > remembered > 0:
            share = remembered / made
            self.seconds, self.ends, self.tokens = share * self.seconds, share * self.ends, share * self.tokens
        # Counted anew: another engine under its name.
        self.last_end = min(self.last_end, total)
        self.at, self.held, self.total = now, held, total

    def has_soon(self, has: bool, now: float) -> bool:
        """Whether it has the newest version (`has`), or will at once, as the last time."""
        if has:
            if self.behind_since is not None:
                self.lag_s, self.behind_since = now - self.behind_since, None
            return True
        self.behind_since = now if self.behind_since is None else self.behind_since
        return max(self.lag_s, now - self.behind_since) <= LAG_S

    def most(self, usual: float, best: float) -> float:
        """Tokens a second of a place, or as many as it ends usual sequences, whichever is more. Each of what it made counts as
        having taken what those that it holds have taken so far, if that is more; of the first sequence that it has yet to make,
        what it lacks as if it made that as quickly as the best."""
        made = max(self.tokens, self.ends * usual)
        lacks = max(0.0, usual - made)
        so_far = self.since / self.held * max(1.0, made / usual if usual else 0.0) if self.held else 0.0
        spent = max(self.seconds, so_far) + lacks / best
        return (made + lacks) / spent if spent else best

    def least(self, usual: float, best: float = math.inf) -> float:
        """The same, whichever is less, and without what it holds: long completions make nobody quick."""
        made = min(self.tokens, self.ends * usual)
        lacks = max(0.0, usual - made)
        spent = self.seconds + lacks / best
        return (made + lacks) / spent if spent else best

    def was_quick(self, seconds: float) -> bool:
        """Whether something came within so many seconds from when it was tried."""
        return self.tried <= self.came_at <= self.tried + seconds


class GivingWay:
    """`count` is told of every node before each `look`, `gave` what follows from it, `ended` what ended."""

    def __init__(self) -> None:
        self.speeds = NOTHING_SEEN
        self._of: dict[str, _Places] = {}
        self._often_late = OftenLate()
        self._late, self._late_at = frozenset[str](), -math.inf
        """who was in the way, and when"""
        self._usual = 0.0
        """tokens of a sequence that ended; 0 until one has"""
        self._best = 0.0
        """tokens a second of a place at the quickest node, at the last look"""
        self._next = self._trying = ""
        """who is to be tried, and who was last"""
        self._looked = self._tried = self._worked = -math.inf
        """when it was looked; when one that gives way was last tried; when a quick node had something to do"""

    def count(self, node: str, held: int, total: int, now: float) -> None:
        """It holds so many sequences, and so many tokens have come from it in all."""
        of = self._of.get(node)
        if of is None:
            of = self._of[node] = _Places(now, held, total, total)
            forget_oldest(self._of)
        of.count(held, total, now, self._usual, self._best)

    def late(self, node: str, lost_s: float, now: float) -> None:
        """A sequence was moved from it early, that came so many seconds later than is usual."""
        self._often_late.late(node, lost_s, now)

    def ended(self, node: str, total: int, now: float) -> None:
        """A sequence ended there, after so many tokens in all."""
        self._often_late.ended(node, now)
        of = self._of.get(node)
        if of is not None and total > of.last_end:
            tokens = total - of.last_end
            self._usual += (min(tokens, LONGEST * self._usual) - self._usual) / LENGTHS if self._usual else tokens
            of.last_end, of.ends = total, of.ends + 1.0

    def gave(self, node: str, now: float) -> None:
        """It was given one sequence more."""
        if (of := self._of.get(node)) is not None:
            of.held += 1
            if node == self._next:
                of.tried = self._tried = now
                self._trying = node

    def look(
        self, nodes: Sequence[NodeView], outstanding: int, now: float, *, proven: bool = True, step: int = 0
    ) -> list[NodeView]:
        """The same nodes, those that give way with fewer places. `outstanding`: sequences that may be in flight together now;
        `proven`: whether there are nodes whose word counts because they are proven. Then only those count as quick. `step`:
        sequences that the trainer takes together, 0 for not known."""
        able = [n for n in nodes if n.live and not n.draining and n.capacity > 0 and n.peer in self._of]
        # Who lacks the newest version cannot take what waits for it, however quick it is.
        newest = max((n.version for n in able), default=None)
        soon = [n for n in able if self._of[n.peer].has_soon(n.version == newest, now)]
        best = max((self._shown(n) for n in soon if n.credible or not proven), default=0.0)
        if not proven:
            best = max(best, self._best * math.exp((self._looked - now) / BEST_S))
        best = best if best > LEAST_BEST else 0.0
        self._best, self._looked = best, now
        rates = {n.peer: self._of[n.peer].most(self._usual, best) for n in able} if best else {}
        slow = {p for p, rate in rates.items() if rate * SLOWER < best and (proven or self._of[p].silent_s > SILENT_S)}
        counts = [n for n in soon if n.peer not in slow and (n.credible or not proven)]
        late = self._in_the_way(counts, rates, min(step, outstanding), now)
        slow |= late
        idle = (n for n in able if n.version == newest and not n.load and oversubscribed(n) > 0)
        untried = (n.peer for n in idle if not self._of[n.peer].seconds and not self._of[n.peer].since)
        quick = [n for n in soon if n.peer not in slow]
        if any(n.load for n in quick):
            self._worked = now
        if now - self._worked > STANDSTILL_S:
            slow.clear()
        self.speeds = Speeds(frozenset(slow), frozenset(untried))
        if not slow:
            return list(nodes)
        # A stranger may be as quick as the best, and no quicker.
        makes = sum(oversubscribed(n) * min(best, self._of[n.peer].least(self._usual, best)) for n in quick)
        gives: dict[str, NodeView] = {}
        slow_nodes = sorted((n for n in able if n.peer in slow), key=lambda n: -rates[n.peer])
        for n in slow_nodes:
            left = 0 if n.peer in late else int(outstanding - makes / rates[n.peer])
            gives[n.peer] = replace(n, limit=min(oversubscribed(n), max(n.load, left)), gives_way=True)
            makes += 0.0 if n.peer in late else oversubscribed(n) * rates[n.peer]
        able_to_try = {n.peer for n in slow_nodes if n.version == newest and (oversubscribed(n) > 0 or not proven)}
        self._try_one(gives, able_to_try, now)
        return [gives.get(n.peer, n) for n in nodes]

    # ---- inside

    def _in_the_way(self, quick: list[NodeView], rates: Mapping[str, float], step: int, now: float) -> frozenset[str]:
        """Those of the quick nodes that are late so often that a step is made sooner without them; and for LAG_S those that were,
        while there are others: they are without the newest version for a moment each time that there is one."""
        if rates and self._usual and step > 0:
            makes = {
                n.peer: Making(places, self._usual / rates[n.peer])
                for n in quick if (places := min(n.capacity, oversubscribed(n))) > 0
            }  # fmt: skip
            if late := self._often_late.in_the_way(makes, step, now):
                self._late, self._late_at = late, now
        stays = now - self._late_at <= LAG_S and len(rates.keys() - self._late) > 1
        return frozenset(node for node in self._late if node in rates) if stays else frozenset()

    def _try_one(self, gives: dict[str, NodeView], those: set[str], now: float) -> None:
        self._next = ""
        idle = [n for n in gives.values() if n.peer in those and not n.load and not n.limit]
        again = [n for n in idle if n.peer == self._trying and self._of[n.peer].was_quick(SLOWER * self._usual / self._best)]
        if idle and (again or now - self._tried >= TRY_S):
            longest = min(again or idle, key=lambda n: self._of[n.peer].tried)
            gives[longest.peer] = replace(longest, limit=1, tries=True)
            self._next = longest.peer

    def _shown(self, node: NodeView) -> float:
        """What it has shown that it can do, and does; 0 while it has not."""
        of = self._of[node.peer]
        if not of.seconds or not 0 < self._usual <= of.tokens or of.ends < 1:
            return 0.0
        return min(of.least(self._usual), of.most(self._usual, math.inf))
