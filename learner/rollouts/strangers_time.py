"""How long a node whose word does not count keeps what the trainer waits for. Pure; told the time.

Were it taken at once each time, an honest newcomer would never end a sequence where the trainer always waits, and so never prove
itself. Were each of them waited for, whoever brings identities would stop the run. So strangers have as long as sequences usually
take, while the trainer has not waited for them for more than a share of its time. Must not know how a sequence is taken, or what
follows for the node.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Container, Sequence
from statistics import median

from learner.rollouts.hedging import Hedge
from p2p.forgetting import forget_oldest

LEAST_S = 0.25
"""Seconds that each sequence may stay, whoever has it. With 0.1, eight strangers who were there first and trickle left 1.0 steps
a second in place of 1.5."""

USUALS = 2.0
"""So many times as long as a sequence usually stays at others it may, while there is time for strangers."""

RECENT = 64
"""Sequences that ended at those whose word counts, of which half stayed for as long as is usual or less."""

SHARE = 0.05
"""Of the time that the trainer waits, what it may wait for strangers for that; the seconds in which who was asked for a
sequence answers are part of it. With a tenth, sixty who leave a wrong token behind and are somebody else each time left 0.63 to
0.70 of the pace in place of 0.81."""

MOST_PAUSE_S = 1.0
"""Seconds between two looks that count at the most."""


class StrangersTime:
    """While the trainer waits, `look` is called each time that it is looked at what for; else `rests`. `ended` hears of what ends
    as asked."""

    def __init__(self) -> None:
        self._stays: deque[float] = deque(maxlen=RECENT)
        self._usual_s: float | None = 0.0
        """half of them stayed for so long at the most; None while that must be found anew"""
        self._left_s = 0.0
        """seconds that the trainer may wait for strangers"""
        self._looked = 0.0
        self._stay: set[tuple[str, str]] = set()
        """(node, request id) that were let stay at the last look, for longer than LEAST_S"""
        self._waits = False
        """whether the trainer has waited for strangers since the last look, where it need not"""
        self._in_vain: Counter[str] = Counter()
        """node -> sequences that it did not end in the time that it had; an end halves it"""
        self._turns = 0
        """how often strangers' time began"""

    def ended(self, node: str, request_id: str, lasted_s: float, *, counts: bool) -> None:
        """It ended there as asked, after so many seconds. `counts`: whether the node's word does."""
        self._stay.discard((node, request_id))
        if node in self._in_vain:
            self._in_vain[node] //= 2
        if counts:
            self._stays.append(lasted_s)
            self._usual_s = None

    def rests(self, now: float) -> None:
        """The trainer waits for nobody."""
        self._looked, self._waits = now, False
        self._stay.clear()

    def look(
        self, hedges: Sequence[Hedge], now: float, *, places: bool, asked: Container[tuple[str, str]],
        doubted: Callable[[str], bool], holds: Callable[[str, str], bool],
    ) -> list[Hedge]:  # fmt: skip
        """Which of `hedges` are to go elsewhere now. Without `places` elsewhere none is kept back, and nobody is waited for who
        need not be. `asked`: (node, request id) whose node was asked for it; `holds`: whether the node has it still. Who is
        `doubted` has no time, and of the others every other time those come first who had theirs in vain least often."""
        passed_s, self._looked = min(now - self._looked, MOST_PAUSE_S), now
        if self._usual_s is None:
            self._usual_s = median(self._stays)
        time_s = max(LEAST_S, USUALS * self._usual_s)
        # No deeper in debt than one turn: those who are asked, again and again, would leave newcomers nothing for hours.
        self._left_s = max(-time_s, min(time_s, self._left_s + SHARE * passed_s - (passed_s if self._waits else 0.0)))
        theirs = [h for h in hedges if places and not h.behind_s and not h.early]
        before, fresh = self._stay, {_pair(h) for h in theirs if now - h.since < LEAST_S}
        may = [h for h in theirs if LEAST_S <= now - h.since < time_s and not doubted(h.node)]
        begin = self._begin(may) if self._left_s >= time_s - LEAST_S else set()
        self._stay = {_pair(h) for h in may} & (before | begin)
        self._turns += not self._stay <= before
        self._waits = bool(self._stay) or any(_pair(h) in asked for h in theirs)
        taken = {_pair(h) for h in theirs} - self._stay
        for node, request_id in before - self._stay:
            if (node, request_id) in taken or not holds(node, request_id):
                self._in_vain[node] += 1
        forget_oldest(self._in_vain)
        return [h for h in hedges if _pair(h) not in self._stay and _pair(h) not in fresh]

    def _begin(self, may: Sequence[Hedge]) -> set[tuple[str, str]]:
        """Whose time begins now."""
        fewest = min((self._in_vain[h.node] for h in may), default=0)
        return {_pair(h) for h in may if self._turns % 2 or self._in_vain[h.node] == fewest}


def _pair(hedge: Hedge) -> tuple[str, str]:
    return hedge.node, hedge.request_id
