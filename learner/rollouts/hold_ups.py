"""Who holds the trainer up a little, again and again: gives work back undone, or is silent until it is moved and another makes it
at once. Pure: times in.

None of that is a fault by itself: a node that updates sends back what crossed its word on the way, an engine pauses, a line
stutters. What happens again and again is one. Must not know what a doubt does to a node's standing, or who may have what.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from learner.dispatch.often_late import KNOWN, SELDOM, WORSE
from p2p.forgetting import forget_oldest

CROSSED_S = 0.5
"""Seconds in which a node gives back what crossed its word on the way. Who has it for longer, and makes nothing of it, waits."""

ONE_S = 1.0
"""What happens within so many seconds happened once: an engine that pauses holds up all that it has."""

TIMES, LATELY_S = 2.5, 120.0
"""More hold-ups than this are a doubt. What happened counts for e times less with each so many seconds."""

TRIES, TRIES_S, WORTH, FEW = 16, 30.0, 0.25, 3
"""Of the last sequences that were moved early, in so many seconds, this share must have ended at once elsewhere, or it is the
sequences that take long; with fewer than FEW that is not known."""

SURE, SURE_OF = 0.75, 8
"""Where this share of so many tries or more ended at once elsewhere, it is the nodes and not the sequences, whatever their group:
then all members of a group are moved at once, and sooner."""

MOST_MOVES = 4
"""Times that a sequence is moved early at the most that comes slowly: it goes on elsewhere, and loses nothing but a prefill."""

SURE_MOVES = 2
"""The same of one that is silent where it is SURE to be the nodes: who has it next may be one of them."""

RECENT_S = 30.0
"""Seconds after a hold-up for which what was moved goes to those who deliver."""


class GivenBack(NamedTuple):
    """A sequence that a node gave back."""

    held_s: float
    step: int
    """that the trainer waits for or does"""
    asked: bool
    """it was asked for it"""
    touched: bool
    """it made tokens of it, at a pace that counts"""
    waits: bool
    """the trainer waits"""
    credible: bool
    """the node's word counts; of a stranger once is too often"""
    leaves: bool = False
    """the node has said that it leaves, and is given nothing any more"""


class HoldUpVerdict(Enum):
    """What follows for a node that gave something back."""

    NOTHING = auto()
    RESTS = auto()
    """it is given nothing for a moment, and this one goes elsewhere"""
    DOUBTED = auto()
    """the same, and it is to blame"""


@dataclass(slots=True)
class _Record:
    """Of one node, of late."""

    at: float
    """the time for which the numbers are true; they fade"""
    times: float = 0.0
    """that it held something up"""
    since: float = 0.0
    """the same since it was last to blame for it"""
    ended: float = 0.0
    held_at: float = float("-inf")
    """when it held something up last"""

    def fade(self, now: float) -> None:
        share = math.exp(min(0.0, self.at - now) / LATELY_S)
        self.at = max(self.at, now)
        self.times, self.since, self.ended = self.times * share, self.since * share, self.ended * share

    @property
    def rate(self) -> float:
        """Of what it was given, what it held up."""
        return self.times / max(1.0, self.times + self.ended)

    @property
    def at_least(self) -> float:
        """The same, where what it was given may be few by chance."""
        return (self.times + 1.0) / (self.times + self.ended + 1.0)


class _Tried(Enum):
    """What came of the first member of a group that was moved early."""

    UNDER_WAY = auto()
    AT_ONCE = auto()
    LATE = auto()


class _Moved(NamedTuple):
    """What was moved early."""

    node: str
    """from which; "" where nobody is to blame"""
    at: float
    shows: bool
    """what becomes of it shows whose fault it was"""
    times: int
    """that it was"""


class _Crossed(NamedTuple):
    step: int
    at: float


class HoldUps:
    """By node and sequence (group.member)."""

    def __init__(self) -> None:
        self._of: dict[str, _Record] = {}
        self._crossed: dict[str, _Crossed] = {}
        """node -> when it last gave anything back as if it had crossed its word"""
        self._moved: dict[str, _Moved] = {}
        """by group.member"""
        self._groups: dict[str, _Tried] = {}
        self._tries: deque[tuple[float, bool]] = deque(maxlen=TRIES)
        """(when, whether it ended at once elsewhere) of what was moved early"""
        self._last = float("-inf")

    # ---- what is given back

    def gave_back(self, node: str, what: GivenBack, now: float, fault_s: float) -> HoldUpVerdict:
        """`fault_s`: seconds after which who has a sequence that the trainer waits for is at fault."""
        if what.asked and (what.touched or (what.credible and what.held_s <= CROSSED_S)):
            return HoldUpVerdict.NOTHING
        if not what.asked and what.held_s <= CROSSED_S and self._crosses(node, what.step, now):
            return HoldUpVerdict.NOTHING
        if not what.waits or what.leaves or (what.asked and what.held_s <= fault_s):
            return HoldUpVerdict.RESTS
        once_too_often = self._held_up(node, now) if what.credible else self.held_up(node, now)
        return HoldUpVerdict.DOUBTED if once_too_often else HoldUpVerdict.RESTS

    # ---- what is moved early

    def moved(self, node: str, member: str, now: float, *, sooner: bool = False) -> None:
        """It was moved from `node`, which was silent for longer than is usual, but not for so long that it must be its fault.
        `sooner`: nor for as long as is early, so that it shows nothing of anybody."""
        self.noticed(now)
        before = self._moved.get(member)
        if before is not None and sooner:  # what is moved again shows of the first one what it showed
            self._moved[member] = before._replace(at=now, times=before.times + 1)
        else:  # node "": nobody is to blame
            self._moved[member] = _Moved("" if sooner else node, now, not sooner, before.times + 1 if before else 1)
        self._groups.setdefault(_group(member), _Tried.UNDER_WAY)
        for known in (self._moved, self._groups):
            forget_oldest(known)

    def may_move(self, member: str, *, sure: bool = False, slow: bool = False) -> bool:
        """Whether it may be moved early: each once; one member of a group first, and the others when that one ended at once,
        since all of them wait for a long prompt. Where `sure`, all at once, and SURE_MOVES times. One that has begun, and is
        `slow`, at once and MOST_MOVES times."""
        moved = self._moved.get(member)
        if moved is not None:
            return moved.times < (MOST_MOVES if slow else SURE_MOVES if sure else 1)
        return sure or slow or self._groups.get(_group(member), _Tried.AT_ONCE) is _Tried.AT_ONCE

    def ended(self, node: str, member: str, now: float, at_once_s: float, late: bool) -> str:
        """`node` ended it as asked. Whom that shows to have held it up, once too often, or "": it took no longer than `at_once_s`
        from when it was moved. `late`: whether what the node ended before was late, too; then that says nothing of the
        sequence."""
        self._record(node, now).ended += 1.0
        moved = self._moved.pop(member, None)
        if moved is None:
            return ""
        other, at, shows, _ = moved
        at_once = node != other and now - at <= at_once_s
        if shows and (at_once or not late):
            self._tries.append((now, at_once))
        self._groups[_group(member)] = _Tried.AT_ONCE if at_once else _Tried.LATE
        return other if other and at_once and self._held_up(other, at) else ""

    def worth_it(self, now: float) -> bool:
        """Whether moving early makes sense: lately it was the nodes that were slow, and not the sequences."""
        tries = self._lately(now)
        return len(tries) < FEW or sum(tries) >= WORTH * len(tries)

    def sure(self, now: float) -> bool:
        """Whether lately it was the nodes nearly always."""
        tries = self._lately(now)
        return len(tries) >= SURE_OF and sum(tries) >= SURE * len(tries)

    def noticed(self, now: float) -> None:
        """Something seems to be held up."""
        self._last = max(self._last, now)

    def lately(self, now: float) -> bool:
        """Whether anybody held anything up, or seemed to."""
        return now - self._last < RECENT_S

    def held_up(self, node: str, now: float) -> bool:
        """It held something up. Whether that is another time."""
        self.noticed(now)
        record = self._record(node, now)
        if now - record.held_at < ONE_S:
            return False
        record.held_at = now
        record.times += 1.0
        return True

    def worse(self, node: str) -> bool:
        """Whether it holds up more of what it is given than the others do."""
        best = min((r.at_least for n, r in self._of.items() if n != node and r.ended >= KNOWN), default=1.0)
        record = self._of.get(node)
        return record is not None and record.rate > WORSE * max(best, SELDOM)

    # ---- inside

    def _lately(self, now: float) -> list[bool]:
        return [at_once for at, at_once in self._tries if now - at < TRIES_S]

    def _crosses(self, node: str, step: int, now: float) -> bool:
        """Whether this may have crossed its word: a node says so once for each version, of all that it is given then."""
        before = self._crossed.get(node)
        if before is not None and before.step == step:
            return now - before.at <= ONE_S
        self._crossed[node] = _Crossed(step, now)
        forget_oldest(self._crossed)
        return True

    def _held_up(self, node: str, at: float) -> bool:
        """Whether it was once too often: it begins anew then."""
        if not self.held_up(node, at):
            return False
        record = self._of[node]
        record.since += 1.0
        if record.since <= TIMES or not self.worse(node):
            return False
        record.since = 0.0
        return True

    def _record(self, node: str, now: float) -> _Record:
        record = self._of.setdefault(node, _Record(now))
        record.fade(now)
        forget_oldest(self._of)
        return record


def _group(member: str) -> str:
    return member.partition(".")[0]
