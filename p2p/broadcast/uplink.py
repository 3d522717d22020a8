"""How fast this peer may send: learns its own uplink and paces what leaves, so that its flows do not drown each other.

Pure: no clock or socket; times in seconds, sizes in bytes. Must not know peers or chunks. One for all channels of a peer,
kept from version to version, so that a small version starts at the right pace.

Many unpaced TCP flows over one uplink overrun its queue: each keeps its own window full. So the sum is paced here, at the
level of whole chunks, by what BBR does for one flow (Cardwell et al. 2016): the uplink's rate is the most that was lately
delivered while there was always something to send; now and then a little more is tried. Three differences: the queueing delay
of the best flow pulls the pace up or down a little, a pace is never taken from a time when there was too little to send, and a
link that shows that it became faster is tried with half as much again at once (`rise`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf, sqrt

from p2p.broadcast.rise import Rise
from p2p.limits import KIB

SAMPLE_S = 1.0
"""Seconds over which delivery is measured. Acknowledgements that waited come in bursts, and the most of several short
measurements is far more than the rate (at 0.5 s by 10 to 40 %)."""

START_SAMPLE_S = 0.2
"""The same while the rate is still searched for: shorter, so that the search is over soon."""

FORGET_S = 10.0
"""Seconds of busy time for which the most that was delivered counts. Then a link that became slower is believed."""

LEAST_QUEUE_S, MOST_QUEUE_S = 0.04, 0.08
"""Seconds of queueing that are aimed for: enough that the uplink never runs dry, too little to drop packets or delay control
messages. Between the two nothing is corrected. Acknowledgements wait in front of the other side's uplink too, which aims for the
same: who corrects for that queue as well as its own ends up with none of its own, and less than its rate."""

CORRECT_S = 0.2
"""Seconds in which a queue that is off its target is brought there."""

MIN_FACTOR, MAX_FACTOR = 0.6, 1.1
"""The pace as a part of the known rate, at the least and at the most, while a queue is corrected."""

PROBE_EVERY_S, PROBE_S, PROBE_FACTOR = 2.5, 0.3, 1.15
"""How often more than the known rate is tried, for how long, and how much more."""

PROBE_ANEW_S = 1.0
"""Seconds of work after which it is tried again, where there was a pause: the link may have become faster meanwhile."""

RISE_FACTOR = 1.5
"""The pace as a part of the known rate while the link shows that it became faster."""

START_RATE = 1.25e6
"""Bytes/s that an uplink of which nothing is known is taken for."""
START_FACTOR = 2.0
"""The search tries this many times START_RATE, then this many times what was delivered."""

GROWTH, ROUNDS = 1.2, 3
"""The search ends when delivery has not grown by the factor GROWTH for ROUNDS samples, or when packets queue."""

FULL_QUEUE_S = 0.08
"""Seconds of queueing that end the search at once."""

LOST, LOST_BYTES = 0.1, 64 * KIB
"""So much sent again in START_SAMPLE_S, of what was delivered and at the least: queues overflow. That ends the search also of
who has little to send, a relay of short versions, who would drown its own packets with every one of them otherwise."""

DOUBT_S = 0.1
"""Seconds between two doubts of a rate that the search has found and that no longer measurement has confirmed. Where LOST says
that queues overflow, it becomes the geometric mean of itself and what was steadily delivered. The search takes what came in
START_SAMPLE_S, up to 40 % too much where acknowledgements came in a burst just then, and versions that are over in less than
SAMPLE_S would lose packets for as long as several of them take."""

DRY_S = 0.02
"""Seconds. Having nothing to send for less is no idleness: packets still wait in front of the uplink."""

LAG_S = 0.1
"""Seconds from the end of an idle time until acknowledgements come as fast as packets leave."""

STEADY_S = 0.5
"""Seconds. What the search has found is the most that was delivered in this time; in START_SAMPLE_S one burst counts for half."""

PAUSE_S, RESUME_FACTOR = 0.5, 1.25
"""A search that is not over when there has been nothing to send for so long, between short versions, goes on from what was
steadily delivered, with so much more: twice what a burst was would drown the next version's packets. Where the last
version was over before STEADY_S, and no packet of it waited, it goes on in full: nothing else would find more."""

BURST_LEAST_S = 0.09
"""Seconds of acknowledgements, from the first of a version's on, that say how fast a version was carried that was over before
STEADY_S. Two looks at the channels; what came with the first of them left before."""

CARRIED = 0.8
"""After a pause the search goes on in full when this part of the pace was delivered for START_SAMPLE_S, and no packet waited: an
uplink that carries no more than before the pause has a queue by then."""

ENOUGH_BYTES = START_RATE * STEADY_S
"""Bytes. Before so many were delivered a pause says nothing: the model's description comes before the first version, some 70 KB
to each node where its tokenizer is small."""

COLLAPSE = 0.7
"""Delivery below this part of the known rate, while a queue builds up, is a link that became slower. It is believed at once."""

MIN_RATE = 8_000.0
"""Bytes/s that are always tried: a link that is out for a while must be found again."""

BURST_S = 0.03
"""Seconds of pace that may leave at once after a pause of the process: a timer that fires late must not cost rate."""


@dataclass(frozen=True, slots=True)
class _Delivery:
    since: float
    rate: float
    lossy: bool


def _overflows(again: float, delivered: float) -> bool:
    return again >= max(LOST * delivered, LOST_BYTES)


class Uplink:
    """`wait` says how long to wait before sending, `spent` what was sent, `observe` what arrived."""

    def __init__(self, rate: float = 0.0, *, remembered: float = 0.0) -> None:
        """`rate`: bytes/s that the uplink is told to carry; nothing is searched for then. `remembered`: what it carried when this
        host last ran; the search goes on from there, as after a pause."""
        self.rate = rate or remembered or START_RATE
        """bytes/s the uplink is known to deliver"""
        self.cap = inf
        """bytes/s that may leave at most, whatever the uplink delivers"""
        self._searching = rate == 0.0
        self._begun = False  # something was sent
        self._paused = self._searching and remembered > 0  # the search has seen a pause
        self._factor = (RESUME_FACTOR if self._paused else START_FACTOR) if self._searching else 1.0
        self._debt = 0.0  # bytes that left ahead of the pace
        self._debt_at = 0.0
        self._samples: deque[tuple[float, int, int]] = deque()  # (when, delivered, resent)
        self._last = 0.0
        self._dry_at: float | None = None  # since when there has been nothing to send
        self._idle_at = float("-inf")  # when there last was nothing to send, for long enough to matter
        self._worked: deque[tuple[float, int]] = deque()  # (busy time, delivered in it by then), idle times left out
        self._busy_s, self._gained = 0.0, 0
        self._best: deque[tuple[float, float]] = deque()  # (busy time, delivery), falling deliveries
        self._probe_at = PROBE_EVERY_S
        self._judged_at = float("-inf")
        self._doubted: tuple[float, int, int] | None = None  # a sample: when the rate was last doubted, or the search over
        self._rise = Rise()
        self._flat = 0
        self._burst: tuple[float, int] | None = None  # (when, delivered by then), where acknowledgements came again after a pause
        self._burst_end = (0.0, 0)  # the same, where the last of them came
        self._clear = False  # the last burst was over before STEADY_S, and no packet waited
        self._remembered = remembered
        self._least = min(START_RATE, remembered or START_RATE)
        self._top = self._steady = remembered  # the most that was delivered during the search, in START_SAMPLE_S and in STEADY_S

    @property
    def pace(self) -> float:
        """Bytes/s that leave at most now."""
        return min(max(self.rate * self._factor, MIN_RATE), self.cap)

    @property
    def proven(self) -> float:
        """Bytes/s that the uplink was told or seen to carry, and may; 0 while that is not known."""
        return min(self._top if self._searching else self.rate, self.cap)

    @property
    def found(self) -> float:
        """Bytes/s that the uplink was seen to carry, and that are worth remembering: 0 while little was delivered, and where its
        owner bounds it, since then it says nothing about the uplink."""
        enough = self._samples and self._samples[-1][1] >= ENOUGH_BYTES and self.cap == inf
        if not enough:
            return 0.0
        return self._top if self._searching else self._best[0][1] if self._best else 0.0

    def wait(self, now: float) -> float:
        """Seconds until the next piece may leave."""
        self._settle(now)
        return max(0.0, self._debt / self.pace)

    def spent(self, now: float, nbytes: int) -> None:
        """`nbytes` left just now: they count against the pace."""
        self._settle(now)
        self._debt += nbytes
        self._begun = True
        if self._dry_at is not None:
            if now - self._dry_at >= DRY_S:
                self._idle_at = now
            if now - self._dry_at >= PAUSE_S and self._busy_s >= self._probe_at - PROBE_EVERY_S + PROBE_ANEW_S:
                self._probe_at = self._busy_s
            self._dry_at = None

    def _settle(self, now: float) -> None:
        pace = self.pace
        self._debt = max(self._debt - (now - self._debt_at) * pace, -BURST_S * pace)
        self._debt_at = now

    def idle(self, now: float) -> None:
        """There is nothing to send although the pace allows it: what is delivered until `spent` says little about the uplink."""
        if self._dry_at is None:
            self._dry_at = now

    def observe(self, now: float, delivered: int, queueing: float | None, resent: int = 0) -> None:
        """`delivered`: bytes that all peers have acknowledged so far, a sum that only grows. `queueing`: seconds that
        packets wait on the way beyond the shortest time ever seen, of the flow where that is least; None when nothing is
        under way. `resent`: bytes that were sent again so far. To be called some 20 times a second."""
        last, self._last = self._last, now
        if self._dry_at is not None and now - self._dry_at >= DRY_S:
            self._idle_at = now
        samples = self._samples
        samples.append((now, delivered, resent))
        while len(samples) > 2 and now - samples[1][0] >= SAMPLE_S:
            samples.popleft()
        busy = len(samples) > 1 and self._idle_at < last - LAG_S
        carried = self._work(now - last, delivered - samples[-2][1]) if busy else None
        if self._searching and carried is not None and self._top <= self._remembered and carried < COLLAPSE * self._top:
            # In a second of work it carries far less than is remembered: another link, perhaps. What is found now counts.
            self._searching = False
            self._learn(carried, queueing)
        if self._searching:
            self._follow_burst(queueing)
            self._search(now, queueing)
            return
        found = self._over(SAMPLE_S)
        if found is not None and found.rate > self.rate:  # whatever there was to send: the uplink did carry it
            self._learn(found.rate, queueing)
        if carried is not None:
            self._learn(carried, queueing)
        elif self._steady and not self._best:
            self._doubt()
        _, before, lost = self._last_but_one
        self._rise.see(now, self.rate, queueing, lossy=_overflows(resent - lost, delivered - before))
        self._steer(queueing)

    def _work(self, seconds: float, gained: int) -> float | None:
        """`gained` bytes were delivered in so many seconds, all the while there was something to send. Bytes/s over the last
        SAMPLE_S of such times together; None while there was less."""
        work = self._worked
        work.append((self._busy_s, self._gained))
        self._busy_s += seconds
        self._gained += gained
        while len(work) > 1 and self._busy_s - work[1][0] >= SAMPLE_S:
            work.popleft()
        since, before = work[0]
        if self._busy_s - since < 0.9 * SAMPLE_S:
            return None
        return (self._gained - before) / (self._busy_s - since)

    def _over(self, span: float) -> _Delivery | None:
        """What was delivered in the last `span` seconds, a little less or more; None when that is not known."""
        now, delivered, resent = self._samples[-1]
        since, before, lost = next((s for s in reversed(self._samples) if now - s[0] >= span), self._samples[0])
        if now - since < span * 0.9:
            return None
        lossy = _overflows(resent - lost, delivered - before)
        return _Delivery(since, (delivered - before) / (now - since), lossy)

    @property
    def _last_but_one(self) -> tuple[float, int, int]:
        """The sample before the last one; that itself where it is the first."""
        return self._samples[-2] if len(self._samples) > 1 else self._samples[-1]

    def _follow_burst(self, queueing: float | None) -> None:
        """How fast a version was carried that was over before STEADY_S, from first to last acknowledgement. A lower bound, as
        there may have been little to send."""
        now, delivered, resent = self._samples[-1]
        _, before, lost = self._last_but_one
        if self._burst is not None and now - self._burst_end[0] > LAG_S:
            (since, first), (until, last) = self._burst, self._burst_end
            self._burst = None
            if BURST_LEAST_S <= until - since < STEADY_S:
                carried = (last - first) / (until - since)
                self._top, self._steady = max(self._top, carried), max(self._steady, carried)
        if delivered > before:
            self._burst_end = now, delivered
            if self._burst is None:
                self._burst, self._clear = self._burst_end, True
        long = self._burst is not None and self._burst_end[0] - self._burst[0] >= STEADY_S
        if long or (queueing is not None and queueing >= LEAST_QUEUE_S) or resent - lost >= LOST_BYTES:
            self._clear = False

    def _search(self, now: float, queueing: float | None) -> None:
        found, steady = self._over(START_SAMPLE_S), self._over(STEADY_S)
        if found is None:
            return
        grown = found.rate > self._top * GROWTH
        self._top = max(self._top, found.rate)
        self._steady = max(self._steady, steady.rate if steady is not None else 0.0)
        sent_some = self._begun and self._samples[-1][1] >= ENOUGH_BYTES
        if sent_some and self._steady and self._dry_at is not None and now - self._dry_at >= PAUSE_S:
            self._paused = True
        self.rate = max(self._steady if self._paused else self._top, self._least)
        full = queueing is not None and queueing > FULL_QUEUE_S
        self._factor = RESUME_FACTOR if self._paused and not self._clear else START_FACTOR
        if full:  # whoever's queue it is: acknowledgements wait in it too, and would slow down everybody
            self._steer(queueing)
        limited_by_us = self._idle_at >= found.since
        short = queueing is None or queueing < LEAST_QUEUE_S
        if self._paused and short and not (limited_by_us or found.lossy) and found.rate >= CARRIED * self.pace:
            # It carries that: the pause is made up for, and the search goes on as before it.
            self._paused, self._flat, self._top = False, 0, found.rate
            return
        if limited_by_us and not (found.lossy and self._steady):
            return
        if now - self._judged_at >= START_SAMPLE_S:
            self._judged_at = now
            self._flat = 0 if grown else self._flat + 1
        if full or limited_by_us or self._flat >= ROUNDS:
            self._searching = False
            # What was tried at first may be far above it. The first measurement that is long enough replaces this; who is
            # short of things to send may have none for long, and so must not start from what a burst was.
            self.rate = max(self._steady, self._least / 2) if limited_by_us or self._paused else max(self._top, MIN_RATE)
            self._samples.clear()
            self._worked.clear()  # what a search delivers while it grows is no rate
            self._probe_at = self._busy_s + PROBE_EVERY_S
            self._steer(queueing)

    def _doubt(self) -> None:
        now, delivered, resent = self._samples[-1]
        since, before, lost = self._doubted or self._samples[-1]
        if now - since >= DOUBT_S and _overflows(resent - lost, delivered - before):
            self.rate = max(min(self.rate, sqrt(self.rate * self._steady)), MIN_RATE)
        elif self._doubted is not None and now - since < START_SAMPLE_S:
            return
        self._doubted = self._samples[-1]

    def _learn(self, rate: float, queueing: float | None) -> None:
        if rate < COLLAPSE * self.rate and queueing is not None and queueing > MOST_QUEUE_S:
            self._best.clear()
        while self._best and (self._best[-1][1] <= rate or self._busy_s - self._best[0][0] > FORGET_S):
            if self._best[-1][1] <= rate:
                self._best.pop()
            else:
                self._best.popleft()
        self._best.append((self._busy_s, rate))
        self.rate = max(self._best[0][1], MIN_RATE)

    def _steer(self, queueing: float | None) -> None:
        short, over = 0.0, 0.0
        if queueing is not None:
            short, over = max(LEAST_QUEUE_S - queueing, 0.0), max(queueing - MOST_QUEUE_S, 0.0)
        factor = min(max(1.0 + (short - over) / CORRECT_S, MIN_FACTOR), MAX_FACTOR)
        if self._busy_s >= self._probe_at and (queueing is None or queueing < MOST_QUEUE_S):
            factor = PROBE_FACTOR
            if self._busy_s >= self._probe_at + PROBE_S:
                self._probe_at = self._busy_s + PROBE_EVERY_S
        self._factor = RISE_FACTOR if self._rise.on else factor
