"""Who holds the trainer up a little, again and again: gives work back undone, or is silent until it is moved and another makes it
at once. Pure: times in.

None of that is a fault by itself: a node that updates sends back what crossed its word on the way, an engine pauses, a line
stutters. What happens again and again is one. Must not know what a doubt does to a node's standing, or who may have what.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from p2p.forgetting import forget_oldest

CROSSED_S = 0.5
"""Seconds in which a node gives back what crossed its word on the way. Who has it for longer, and makes nothing of it, waits."""

ONE_S = 1.0
"""What happens within so many seconds happened once: an engine that pauses holds up all that it has."""

TIMES, FADES_S, ENDS = 3.0, 120.0, 64
"""So many hold-ups are a doubt. One is forgotten in so many seconds, and with so many sequences that end as asked."""

TRIES, TRIES_S, WORTH, FEW = 16, 30.0, 0.25, 8
"""Of the last sequences that were moved early, in so many seconds, this share must have ended at once elsewhere, or it is the
sequences that take long; with fewer than FEW that is not known."""

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
    """it made tokens of it"""
    waits: bool
    """the trainer waits"""
    credible: bool
    """the node's word counts; of a stranger once is too often"""


class Verdict(Enum):
    """What follows for a node that gave something back."""

    NOTHING = auto()
    RESTS = auto()
    """it is given nothing for a moment, and this one goes elsewhere"""
    DOUBTED = auto()
    """the same, and it is to blame"""


@dataclass(slots=True)
class _Held:
    times: float
    at: float


class _Crossed(NamedTuple):
    step: int
    at: float


class HoldUps:
    """By node and sequence (group.member)."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}
        self._crossed: dict[str, _Crossed] = {}
        """node -> when it last gave anything back as if it had crossed its word"""
        self._moved: dict[str, dict[str, float]] = {}
        """group.member -> node from which it was moved early -> when"""
        self._tries: deque[tuple[float, bool]] = deque(maxlen=TRIES)
        """(when, whether it ended at once elsewhere) of what was moved early"""
        self._last = float("-inf")

    # ---- what is given back

    def gave_back(self, node: str, what: GivenBack, now: float, fault_s: float) -> Verdict:
        """`fault_s`: seconds after which who has a sequence that the trainer waits for is at fault."""
        if what.asked and (what.touched or (what.credible and what.held_s <= CROSSED_S)):
            return Verdict.NOTHING
        if not what.asked and what.held_s <= CROSSED_S and self._crosses(node, what.step, now):
            return Verdict.NOTHING
        blamed = what.waits and (not what.asked or what.held_s > fault_s)
        once_too_often = blamed and (self._held_up(node, now) or not what.credible)
        return Verdict.DOUBTED if once_too_often else Verdict.RESTS

    # ---- what is moved early

    def moved(self, node: str, member: str, now: float) -> None:
        """It was moved from `node`, which was silent for longer than is usual, but not for so long that it must be its fault."""
        self._last = now
        self._moved.setdefault(member, {})[node] = now
        forget_oldest(self._moved)

    def times_moved(self, member: str) -> int:
        """From how many nodes."""
        return len(self._moved.get(member, ()))

    def ended(self, node: str, member: str, now: float, at_once_s: float, quick: bool) -> list[str]:
        """`node` ended it as asked. Whom that shows to have held it up, once too often: it took no longer than `at_once_s`, from
        the last time that it was moved. `quick`: whether what the node ended before was made at once; else its being late says
        nothing of the sequence."""
        held = self._held.get(node)
        if held is not None:
            held.times = max(0.0, held.times - 1.0 / ENDS)
        moved = self._moved.pop(member, None)
        if not moved:
            return []
        at_once = now - max(moved.values()) <= at_once_s and node not in moved
        if at_once or quick:
            self._tries.append((now, at_once))
        return [other for other, at in moved.items() if at_once and self._held_up(other, at)]

    def worth_it(self, now: float) -> bool:
        """Whether moving early makes sense: lately it was the nodes that were slow, and not the sequences."""
        tries = [at_once for at, at_once in self._tries if now - at < TRIES_S]
        return len(tries) < FEW or sum(tries) >= WORTH * len(tries)

    def lately(self, now: float) -> bool:
        """Whether anybody held anything up, or seemed to."""
        return now - self._last < RECENT_S

    # ---- inside

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
        self._last = max(self._last, at)
        held = self._held.setdefault(node, _Held(0.0, float("-inf")))
        forget_oldest(self._held)
        if at - held.at < ONE_S:
            return False
        left = max(0.0, held.times - (at - held.at) / FADES_S) if held.times else 0.0
        held.times, held.at = left + 1.0, at
        if held.times <= TIMES - 0.5:
            return False
        held.times = 0.0
        return True

