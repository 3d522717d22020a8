"""How long sequences go without progress at their nodes, and which of them longer than usual. Pure: counts and times in.

A node that has proven itself may begin to withhold. What the trainer waits for is then taken from it as well, once it has been
silent for longer than sequences are that end: engines pause for an update, and what is sent to a full node waits there for a
slot. Must not know whose word counts, what the trainer waits for, or what follows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from p2p.forgetting import forget_oldest, renewed

RECENT, LEAST_ENDED = 256, 16
"""Ended sequences whose silences are remembered, and below how many of them nothing is called unusual."""

USUAL = 0.75
"""Share of the ended sequences that were silent for no longer than what counts as usual: who makes less than a quarter of what
ends cannot move it."""

HELD_UP_S, BEGIN_S, USUALS = 3.0, 9.0, 2.0
"""A sequence is behind after so many seconds without progress, the second where it has made none yet at its node: its prompt may
be long; and so many times what is usual."""

NEARLY_ALL, LONGER = 0.95, 6.0
"""Where hardly any of the ended sequences was silent for long, and now MANY nodes have not begun with sequences of MANY groups,
that is no long prompt: such a sequence is behind after so many times what this share of the ended were silent for, and at
HELD_UP_S and BEGIN_S at least and at the most. One long prompt keeps the members of one group waiting, at several nodes."""

EARLY_S, EARLY_USUALS = 0.7, 4.0
"""A sequence is early behind after so many seconds without progress, and so many times what is usual: not so long that it is
its node's fault, and long enough to have it made elsewhere."""

SLOWER, SLOW_SHARE = 3.0, 0.5
"""A sequence is early behind, too, that comes so many times slower than is usual, the share by which nodes give way, after so
much of the time: it is seen to be slow, where who is silent may begin at any moment."""

LOOKS = 150
"""Looks, some five minutes of them, of which the least counts as usual for that: most of the nodes, late all at once, would else
be what is usual after half a minute."""

MANY, MANY_S, HURRY = 3, 120.0, 1 / 3
"""So many nodes that held the trainer up by silence within so many seconds are no chance: those that are left have this share of
HELD_UP_S and BEGIN_S, and this share of that once MANY times as many did. Longer than a first doubt lasts: who comes back to it
then would find all patience again."""

LEAST_BEHIND_S = HURRY**2 * HELD_UP_S
"""Nothing is behind so soon, whatever is usual: asked first, since all that nodes hold is asked about four times a second."""


@dataclass(slots=True)
class _Seen:
    """One sequence at one node."""

    tokens: int
    at: float
    """when it had made progress, as far as was looked"""
    longest: float = 0.0
    """seconds between two times that it had"""
    begun: bool = False
    since: float = 0.0
    """when it was seen there first"""
    begun_at: float = 0.0
    """when it made progress first, as far as was looked"""
    latest: int = 0
    """tokens at the last look"""
    made: int = 0
    """tokens since it was seen first"""


class Early(NamedTuple):
    """What a sequence says that is moved early."""

    shows: bool
    """what becomes of it shows whose fault it was"""
    blames: bool
    """its node is to blame, if another one makes it at once"""
    lost_s: float
    """seconds by which it comes later than is usual"""

    @property
    def late(self) -> bool:
        """Whether it counts as late; where it was early behind, not if its device is slow in all that it makes."""
        return self.blames or not self.shows


class Usual(NamedTuple):
    """What is usual of what ends."""

    at_once_s: float = math.inf
    """seconds of silence at most of what is made at once; infinite while that is not known"""
    begins_s: float = math.inf
    """the same of what has not begun, whose prompt may be long"""
    tokens_per_s: float = 0.0
    """of a sequence; 0 while that is not known"""


class SilenceWatch:
    """`look` is called every few seconds with all that nodes hold, `ended` with what ends as asked, and `behind` at any time.
    `sees_slow`: whether what comes slowly counts."""

    def __init__(self, *, sees_slow: bool = True) -> None:
        self._sees_slow = sees_slow
        self._seen: dict[tuple[str, str], _Seen] = {}
        self._ended: deque[float] = deque(maxlen=RECENT)
        self._sorted: list[float] = []
        """the same by length; empty while that is not known"""
        self._rates: deque[float] = deque(maxlen=RECENT)
        """tokens a second of the ended sequences"""
        self._rate: float | None = 0.0
        """what is usual of that; None while it must be found anew"""
        self._rates_of: dict[str, deque[float]] = {}
        """the same of each node's last ones"""
        self._last: dict[str, float] = {}
        """node -> how long the last sequence that it ended was silent"""
        self._held_up: dict[str, float] = {}
        """node -> when it held the trainer up last, lately"""
        self._usuals: deque[float] = deque(maxlen=LOOKS)
        """what was usual at the last looks"""
        self._least = math.inf
        """the least of that"""
        self.alert = False
        """whether several nodes were found wrong lately: then to be silent is no chance either"""
        self._waiting = False
        """whether, at the last look, MANY nodes had not begun with sequences of MANY groups for HELD_UP_S and what is usual"""

    @property
    def usual_s(self) -> float:
        """Seconds that sequences usually are silent at most; infinite while too few have ended."""
        if len(self._ended) < LEAST_ENDED:
            return math.inf
        return self._share(USUAL)

    def look(self, held: Mapping[str, Mapping[str, int]], now: float, *, least: float) -> None:
        """`held`: node -> request id -> completion tokens so far. `least`: tokens a second below which it is no progress."""
        seen, self._seen = self._seen, {}
        for node, requests in held.items():
            for request_id, tokens in requests.items():
                self._seen[node, request_id] = _progress(seen.get((node, request_id)), tokens, now, least)
        if not math.isinf(self.usual_s):
            self._usuals.append(self.usual_s)
            self._least = min(self._usuals)
        bound = now - HELD_UP_S - USUALS * self.usual_s
        waiting = [pair for pair, seen in self._seen.items() if not seen.begun and seen.at < bound]
        groups = {request_id.partition(".")[0] for _, request_id in waiting}
        self._waiting = len({node for node, _ in waiting}) >= MANY and len(groups) >= MANY

    def made(self, node: str, tokens: int, lasted_s: float) -> None:
        """What ended as asked had so many tokens of this node's, and was there for so many seconds."""
        if tokens <= 0 or lasted_s <= 0:
            return
        self._rates.append(tokens / lasted_s)
        self._rate = None
        self._rates_of.setdefault(node, deque(maxlen=LEAST_ENDED)).append(tokens / lasted_s)
        renewed(self._rates_of, node)
        forget_oldest(self._rates_of)

    def ended(self, node: str, request_id: str, now: float) -> None:
        """It ended as asked. What came and went between two looks was not silent for long."""
        seen = self._seen.pop((node, request_id), None)
        silent = 0.0 if seen is None else max(seen.longest, now - seen.at)
        self._ended.append(silent)
        self._sorted = []
        self._last[node] = silent
        forget_oldest(self._last)

    def begun(self, node: str, request_id: str) -> bool:
        """Whether it made progress at this node since it was first seen there."""
        seen = self._seen.get((node, request_id))
        return seen is not None and seen.begun

    def held_up(self, node: str, now: float) -> None:
        """What was behind at this node was taken from it."""
        self._held_up = {n: at for n, at in self._held_up.items() if now - at < MANY_S} | {node: now}

    def many(self, now: float) -> int:
        """0; 1 where so many held the trainer up lately that it is no chance, or on alert; 2 where MANY times as many did."""
        count = sum(now - at < MANY_S for at in self._held_up.values())
        return max(self.alert, (count >= MANY) + (count >= MANY * MANY))

    def behind(self, node: str, request_id: str, tokens: int, now: float, *, least: float) -> float:
        """Seconds for which a sequence that has so many tokens made no progress, if that is longer than usual; else 0."""
        seen = self._seen[node, request_id] = _progress(self._seen.get((node, request_id)), tokens, now, least)
        silent = now - seen.at
        if silent <= LEAST_BEHIND_S:
            return 0.0
        usual = self.usual_s
        if math.isinf(usual):
            return 0.0
        begin = min(BEGIN_S, max(HELD_UP_S, LONGER * self._share(NEARLY_ALL))) if self._waiting else BEGIN_S
        allowed = HURRY ** self.many(now) * (HELD_UP_S if seen.begun else begin) + USUALS * usual
        return silent if silent > allowed else 0.0

    @property
    def at_once_s(self) -> float:
        """Seconds of silence at most of what is made at once; infinite while that is not known."""
        return EARLY_S + EARLY_USUALS * min(self.usual_s, self._least)

    def taken(self, node: str) -> None:
        """Something was taken from it: it is late until it ends something at once again."""
        self._last[node] = math.inf
        forget_oldest(self._last)

    def late(self, node: str) -> bool:
        """Whether the last sequence that it ended was silent for longer than what is made at once, or one was taken since. Who is
        new is not."""
        return self._last.get(node, 0.0) > self.at_once_s

    def early(self, node: str, request_id: str, now: float, share: float = 1.0) -> bool:
        """Whether it is early behind, as `behind` saw it last; with `share`, after this share of the time."""
        seen = self._seen.get((node, request_id))
        return seen is not None and now - seen.at > share * self.at_once_s

    @property
    def usual_rate(self) -> float:
        """Tokens a second of half of the ended sequences at the least; 0 while too few have ended."""
        if self._rate is None:
            self._rate = median(self._rates) if len(self._rates) >= LEAST_ENDED else 0.0
        return self._rate

    def slow(self, node: str, request_id: str, now: float, share: float = 1.0) -> bool:
        """Whether it has come SLOWER times slower than is usual, for as long as is early."""
        return self._slower(node, request_id, now, self.usual_rate, min(share, SLOW_SHARE))

    def moved_early(self, node: str, request_id: str, now: float) -> Early:
        """It is moved now, as early or sooner."""
        silent, seen, rate = self.early(node, request_id, now), self._seen.get((node, request_id)), self.usual_rate
        lost_s = self._lasts_s(seen, now) - (seen.made / rate if rate else 0.0) if seen is not None else 0.0
        return Early(
            silent or self.slow(node, request_id, now), silent or self.unlike_others(node, request_id, now), max(0.0, lost_s)
        )

    def unlike_others(self, node: str, request_id: str, now: float) -> bool:
        """Whether it has come so much slower than what this node makes: a slow device is nobody's fault."""
        own = self._rates_of.get(node)
        return own is not None and self._slower(node, request_id, now, median(own), SLOW_SHARE)

    def usual(self, node: str) -> Usual:
        """Of this node's: it may be slow itself."""
        own, at_once_s = self._rates_of.get(node), self.at_once_s
        rate = self.usual_rate if own is None else min(self.usual_rate, median(own))
        return Usual(at_once_s, max(at_once_s, HURRY * BEGIN_S + USUALS * self.usual_s), rate)

    def _slower(self, node: str, request_id: str, now: float, rate: float, share: float) -> bool:
        seen = self._seen.get((node, request_id))
        if seen is None or not seen.begun or not self._sees_slow:
            return False
        lasts_s = self._lasts_s(seen, now)
        return lasts_s > share * self.at_once_s and SLOWER * seen.made < lasts_s * rate

    def _lasts_s(self, seen: _Seen, now: float) -> float:
        """Seconds from its beginning. Who began at once is slow from when it was given it; else its prompt was long."""
        return now - (seen.begun_at if seen.begun and seen.begun_at - seen.since > self.at_once_s else seen.since)

    def _share(self, share: float) -> float:
        """Seconds that this share of the ended sequences were silent for at the most."""
        self._sorted = self._sorted or sorted(self._ended)
        return self._sorted[math.ceil(share * len(self._sorted)) - 1]


def _progress(seen: _Seen | None, tokens: int, now: float, least: float) -> _Seen:
    if seen is None:
        return _Seen(tokens, now, since=now, latest=tokens)
    seen.made += max(0, tokens - seen.latest)
    seen.latest = tokens
    if tokens - seen.tokens > least * (now - seen.at):
        if not seen.begun:
            seen.begun_at = now
        seen.tokens, seen.at, seen.longest, seen.begun = tokens, now, max(seen.longest, now - seen.at), True
    return seen
