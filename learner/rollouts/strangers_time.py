"""How long a node whose word does not count keeps what the trainer waits for. Pure; told the time.

Were it taken at once each time, an honest newcomer would never end a sequence where the trainer always waits, and so never prove
itself. Were each of them waited for, whoever brings identities would stop the run. So strangers have as long as sequences usually
take, while the trainer has not waited for them for more than a share of its time. Must not know how a sequence is taken, or what
follows for the node.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from statistics import median

from learner.rollouts.hedging import HedgeMove, Way
from p2p.forgetting import forget_oldest

LEAST_S = 0.1
"""Seconds that each sequence may stay, whoever has it: between two looks."""

USUALS = 2.0
"""So many times as long as a sequence usually stays at others it may, while there is time for strangers."""

RECENT = 64
"""Sequences that ended at those whose word counts, of which half stayed for as long as is usual or less."""

SHARE = 0.05
"""Of the time that the trainer waits, what it may wait for strangers for that. With a tenth of it, sixty who leave as somebody else
with a wrong token each time left 0.63 to 0.70 of the pace in place of 0.81."""

MOST_PAUSE_S = 1.0
"""Seconds between two looks that count at the most."""


class StrangersTime:
    """`look` is called with what is to be taken, each time that it is looked at what the trainer waits for; `stayed` with the
    seconds that a sequence was at its node when it ended, where the node's word counts."""

    def __init__(self) -> None:
        self._stays: deque[float] = deque(maxlen=RECENT)
        self._usual_s: float | None = 0.0
        """half of them stayed for so long at the most; None while that must be found anew"""
        self._left_s = 0.0
        """seconds that the trainer may wait for strangers"""
        self._looked = 0.0
        self._stay: set[tuple[str, str]] = set()
        """(node, request id) that were let stay at the last look, for longer than LEAST_S"""
        self._in_vain: Counter[str] = Counter()
        """node -> sequences that it did not end in the time that it had"""

    def stayed(self, seconds: float) -> None:
        """One ended at a node whose word counts, after so long there."""
        self._stays.append(seconds)
        self._usual_s = None

    def look(self, moves: Iterable[HedgeMove], now: float, doubted: Callable[[str], bool]) -> list[HedgeMove]:
        """Which of `moves` are made now. Who is `doubted` has no time, and of the others those come first who had theirs in vain
        seldom."""
        passed_s, self._looked = min(now - self._looked, MOST_PAUSE_S), now
        if self._usual_s is None:
            self._usual_s = median(self._stays)
        time_s = max(LEAST_S, USUALS * self._usual_s)
        self._left_s = min(time_s, self._left_s + SHARE * passed_s - (passed_s if self._stay else 0.0))
        made = list[HedgeMove]()
        wait = list[HedgeMove]()
        for move in moves:
            held_s = now - move.hedge.since
            if move.hedge.behind_s or move.hedge.early or move.way not in (Way.ASK, Way.TAKE):
                made.append(move)
            elif held_s >= LEAST_S:
                (wait if held_s < time_s and not doubted(move.hedge.node) else made).append(move)
        fewest = min((self._in_vain[move.hedge.node] for move in wait), default=0)
        before, self._stay = self._stay, set()
        for move in wait:
            pair = (move.hedge.node, move.hedge.request_id)
            begins = self._left_s >= time_s - LEAST_S and self._in_vain[move.hedge.node] == fewest
            if pair in before or begins:
                self._stay.add(pair)
            else:
                made.append(move)
        for move in made:
            if (move.hedge.node, move.hedge.request_id) in before:
                self._in_vain[move.hedge.node] += 1
                forget_oldest(self._in_vain)
        return made
