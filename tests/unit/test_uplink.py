"""How fast a peer lets chunks leave, over a simulated link: one queue of a fixed rate, looked at 20 times a second."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from p2p.broadcast.uplink import MIN_RATE, Uplink
from p2p.limits import KIB

TICK_S = 0.05
QUEUE_S = 0.06
"""What the bounds on queueing are counted in, whatever the uplink aims for."""
MBIT = 125_000.0


@dataclass
class Link:
    """A queue in front of `rate` bytes/s. What arrives is acknowledged `rtt` later; a full queue drops nothing here, it
    holds the sender up, as the kernel's send buffer does (`buffer` bytes ahead of the queue)."""

    rate: float
    rtt: float = 0.04
    buffer: float = 512.0 * KIB
    limit: float = float("inf")
    """bytes in the queue above which packets are lost: sent again, which takes the link's time once more"""
    resent: int = 0
    queued: float = 0.0
    delivered: float = 0.0
    acked: deque[tuple[float, float]] = field(default_factory=lambda: deque([(-1.0, 0.0)]))

    def move(self, now: float, seconds: float) -> None:
        moved = min(self.queued, self.rate * seconds)
        self.queued -= moved
        self.delivered += moved
        self.acked.append((now + self.rtt, self.delivered))

    def acknowledged(self, now: float) -> int:
        while len(self.acked) > 1 and self.acked[1][0] <= now:
            self.acked.popleft()
        return int(self.acked[0][1])

    def queueing(self, stuck_s: float = 1.0) -> float:
        return self.queued / self.rate if self.rate > 0 else stuck_s


@dataclass
class Run:
    """Sends chunks over the link as the pump does, in steps of a few ms. Keeps what it saw at each tick."""

    uplink: Uplink
    link: Link
    chunk: int = 32 * KIB
    jitter_s: float = 0.0
    seed: int = 0
    now: float = 0.0
    seen: list[tuple[float, float, float, float]] = field(default_factory=list)
    """(time, delivered, queueing, pace)"""

    def go(self, seconds: float, *, demand: float = float("inf")) -> None:
        """`demand`: bytes/s that there are to send."""
        rng, step = random.Random(self.seed), 0.002
        wanted, next_tick, end = 0.0, self.now, self.now + seconds
        while self.now < end:
            self.link.move(self.now, step)
            self.now += step
            wanted = min(wanted + demand * step, 1e12) if demand < float("inf") else 1e12
            while self.link.queued < self.link.buffer and self.uplink.wait(self.now) <= 0.001:
                if wanted < self.chunk:
                    self.uplink.idle(self.now)
                    break
                self.uplink.spent(self.now, self.chunk)
                if self.link.queued > self.link.limit:
                    self.link.resent += self.chunk
                self.link.queued += self.chunk
                wanted -= self.chunk
            if self.now >= next_tick:
                next_tick += TICK_S
                waits = self.link.queueing()
                self.seen.append((self.now, self.link.delivered, waits, self.uplink.pace))
                signal = max(0.0, waits + rng.uniform(0, self.jitter_s)) if self.link.queued or self.jitter_s else None
                self.uplink.observe(self.now, self.link.acknowledged(self.now), signal, self.link.resent)

    def carried(self, since: float) -> float:
        """Bytes/s that arrived from then on."""
        then = next(s for s in self.seen if s[0] >= since)
        return (self.seen[-1][1] - then[1]) / (self.seen[-1][0] - then[0])

    def waits(self, since: float) -> list[float]:
        return [s[2] for s in self.seen if s[0] >= since]


def chunk_for(rate: float) -> int:
    """As a version's chunks are: a slow link is not given large ones."""
    return 8 * KIB if rate < 2 * MBIT else 64 * KIB


@pytest.mark.parametrize("mbit", [1, 20, 200])
def test_from_cold_it_finds_the_rate_and_keeps_the_queue_short(mbit) -> None:
    rate = mbit * MBIT
    run = Run(Uplink(), Link(rate, buffer=max(256 * KIB, 0.5 * rate)), chunk_for(rate))
    run.go(20.0)
    assert run.carried(10.0) >= 0.95 * rate
    assert 0.95 * rate <= run.uplink.rate <= 1.05 * rate
    waits = run.waits(10.0)
    one = run.chunk / rate
    assert max(waits) <= 3 * QUEUE_S + one, f"{max(waits):.3f} s queued"
    assert sorted(waits)[len(waits) // 2] <= 2 * QUEUE_S + one


@pytest.mark.parametrize("mbit", [1, 20, 200])
def test_the_search_takes_a_few_seconds_and_overruns_the_queue_only_once(mbit) -> None:
    rate = mbit * MBIT
    run = Run(Uplink(), Link(rate, buffer=max(256 * KIB, 0.5 * rate)), chunk_for(rate))
    run.go(8.0)
    assert run.carried(5.0) >= 0.9 * rate
    assert max(run.waits(5.0)) < 0.5, "a search that overran the queue has drained it by then"


@pytest.mark.parametrize("share", [0.1, 5.0])
def test_it_follows_a_rate_that_changes(share) -> None:
    rate = 20 * MBIT
    run = Run(Uplink(), Link(rate, buffer=1.5e6), 16 * KIB)
    run.go(15.0)
    run.link.rate = rate * share
    changed = run.now
    run.go(30.0)
    assert run.carried(changed + 20) >= 0.9 * rate * share
    assert run.uplink.rate <= 1.1 * rate * share
    assert max(run.waits(changed + 20)) <= 4 * QUEUE_S + run.chunk / (rate * share)


@pytest.mark.parametrize("mbit", [10, 40])
@pytest.mark.parametrize("share", [1.5, 3.0])
def test_a_link_that_became_faster_is_used_within_two_seconds(mbit, share) -> None:
    """With a tenth more at a time one that trebled took six."""
    rate = mbit * MBIT
    run = Run(Uplink(), Link(rate, buffer=1e6), 16 * KIB)
    run.go(15.0)
    run.link.rate = rate * share
    changed = run.now
    run.go(2.5)
    assert run.carried(changed + 2.0) >= 0.9 * rate * share
    assert max(run.waits(changed)) <= 3 * QUEUE_S + run.chunk / rate, "and what was too much is found at once"


def test_a_link_that_became_faster_between_versions_is_used_within_seconds() -> None:
    """It took four."""
    rate = 10 * MBIT
    run = Run(Uplink(), Link(rate, buffer=1e6), 16 * KIB)
    run.go(15.0)
    run.go(1.0, demand=0.0)
    run.link.rate = 2 * rate
    begins = run.now
    run.go(3.0)
    assert run.carried(begins + 2.5) >= 0.9 * 2 * rate


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("bursts_s", [0.0, 0.15, 0.3])
@pytest.mark.parametrize("limit_s", [0.03, 0.1, 0.5])
def test_a_link_that_stays_as_it_is_is_never_tried_with_half_as_much_again(limit_s, bursts_s, seed) -> None:
    """`bursts_s`: acknowledgements come in bursts, so far apart; a second may have a fifth more of them than it sent then.
    `limit_s`: the queue, in seconds."""
    rate = 20 * MBIT
    run = Run(Uplink(), Link(rate, limit=limit_s * rate), 16 * KIB, jitter_s=0.01, seed=seed)
    acknowledged = run.link.acknowledged
    if bursts_s:
        run.link.acknowledged = lambda now: acknowledged(now // bursts_s * bursts_s)  # type: ignore[method-assign]
    run.go(15.0)
    for _ in range(10):
        run.go(1.0, demand=0.0)
        run.go(5.0)
    paces = [pace for at, _, _, pace in run.seen if at > 15]
    assert max(paces) <= 1.2 * 1.16 * rate


def test_a_link_that_collapsed_is_believed_within_seconds() -> None:
    rate = 20 * MBIT
    run = Run(Uplink(), Link(rate, buffer=1.5e6), 16 * KIB)
    run.go(15.0)
    run.link.rate = rate / 10
    run.go(3.0)
    assert run.uplink.rate <= 2 * rate / 10, "not only when the old rate is forgotten"


def test_times_with_little_to_send_say_nothing_about_the_uplink() -> None:
    rate = 20 * MBIT
    run = Run(Uplink(), Link(rate), 16 * KIB)
    run.go(10.0)
    known = run.uplink.rate
    run.go(60.0, demand=0.05 * rate)
    assert run.uplink.rate >= 0.95 * known
    busy = run.now
    run.go(2.0)
    assert run.carried(busy + 0.1) >= 0.9 * rate, "the next version starts at the known pace"


def test_an_uplink_that_never_had_much_to_send_goes_on_searching() -> None:
    rate = 100 * MBIT
    run = Run(Uplink(), Link(rate, buffer=4e6), 64 * KIB)
    run.go(30.0, demand=0.02 * rate)
    assert run.uplink.pace >= 0.04 * rate
    busy = run.now
    run.go(8.0)
    assert run.carried(busy + 5) >= 0.9 * rate


@pytest.mark.parametrize("stuck_s", [0.0, 1.0])
def test_it_survives_a_second_of_outage(stuck_s) -> None:
    """`stuck_s`: the queueing that is seen meanwhile; a kernel that hears nothing keeps the last value."""
    rate = 20 * MBIT
    run = Run(Uplink(), Link(rate), 16 * KIB)
    run.go(10.0)
    queueing = run.link.queueing
    run.link.rate = 0.0
    run.link.queueing = lambda _=stuck_s: stuck_s  # type: ignore[assignment, method-assign]
    run.go(1.0)
    run.link.rate, run.link.queueing = rate, queueing  # type: ignore[method-assign]
    back = run.now
    run.go(10.0)
    assert run.carried(back + 4) >= 0.9 * rate


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mbit", [1, 20])
def test_jitter_of_the_queueing_does_not_spiral_it_down(mbit, seed) -> None:
    rate = mbit * MBIT
    run = Run(Uplink(), Link(rate, buffer=max(256 * KIB, 0.5 * rate)), chunk_for(rate), jitter_s=0.02, seed=seed)
    run.go(90.0)
    assert run.carried(30.0) >= 0.93 * rate
    assert run.carried(80.0) >= 0.93 * rate, "nor later"


def test_queueing_that_is_not_ours_costs_a_share_and_not_everything() -> None:
    """Another program fills the queue: 150 ms are always there."""
    rate = 20 * MBIT
    run = Run(Uplink(), Link(rate), 16 * KIB)
    run.go(10.0)
    own = run.link.queueing
    run.link.queueing = lambda: own() + 0.15  # type: ignore[assignment, method-assign]
    since = run.now
    run.go(60.0)
    assert run.carried(since + 40) >= 0.25 * rate


def test_a_pace_is_never_below_what_finds_a_link_again() -> None:
    uplink = Uplink()
    now = 0.0
    for _ in range(2000):
        now += TICK_S
        if uplink.wait(now) <= 0.0:
            uplink.spent(now, 64 * KIB)
        uplink.observe(now, 0, 5.0)
        assert uplink.pace >= MIN_RATE and uplink.wait(now) <= 64 * KIB / MIN_RATE
    assert uplink.rate >= MIN_RATE


def test_debt_is_paid_at_the_pace_and_a_late_timer_costs_no_rate() -> None:
    uplink = Uplink(rate=1e6)
    assert uplink.wait(0.0) == 0.0
    uplink.spent(0.0, 100_000)
    assert uplink.wait(0.0) == pytest.approx(0.1, abs=0.04)
    sent, now = 0, 10.0
    while now < 20.0:  # the timer comes 10 ms late each time
        wait = uplink.wait(now)
        if wait <= 0.0:
            uplink.spent(now, 32 * KIB)
            sent += 32 * KIB
        else:
            now += wait + 0.01
    assert sent >= 0.95 * 1e7
    assert sent <= 1.05 * 1e7


def test_a_queue_that_is_the_other_sides_costs_no_rate() -> None:
    class Far(Link):
        def queueing(self, stuck_s: float = 1.0) -> float:
            return super().queueing(stuck_s) + 0.06  # acknowledgements wait there

    rate = 20 * MBIT
    run = Run(Uplink(), Far(rate, buffer=0.5 * rate), chunk_for(rate))
    run.go(40.0)
    assert run.carried(20.0) >= 0.95 * rate
    assert 0.95 * rate <= run.uplink.rate <= 1.05 * rate


def test_a_relay_of_short_versions_stops_searching_when_it_loses_packets() -> None:
    """It has nothing to send for most of the time, and would try twice a burst for ever."""
    rate = 10 * MBIT
    run = Run(Uplink(), Link(rate, limit=0.05 * rate), 16 * KIB)
    assert run.uplink.pace > 1.9 * rate
    for _ in range(20):
        run.go(0.04)
        run.go(0.06, demand=0.0)
    assert run.link.resent > 0
    assert 0.5 * rate <= run.uplink.pace <= 1.2 * rate
    lost = run.link.resent
    for _ in range(20):
        run.go(0.04)
        run.go(0.06, demand=0.0)
    assert run.link.resent == lost


@dataclass
class Told:
    """An uplink that is told what came through; there is always something to send."""

    uplink: Uplink
    now: float = 0.0
    delivered: int = 0
    resent: int = 0

    def go(self, seconds: float, rate: float, queueing: float, lost: float = 0.0) -> None:
        """`rate` bytes/s come through from now on, of which the part `lost` is sent again."""
        for _ in range(round(seconds / TICK_S)):
            came = int(rate * TICK_S)
            self.now, self.delivered, self.resent = self.now + TICK_S, self.delivered + came, self.resent + int(lost * came)
            self.uplink.spent(self.now, came)
            self.uplink.observe(self.now, self.delivered, queueing, self.resent)


def test_a_rate_that_a_burst_made_too_high_is_taken_back_as_soon_as_packets_are_lost() -> None:
    """On 40 Mbit/s with a queue of 0.1 s searches ended at 6 to 7 MB/s, and versions of 0.8 s took twice as long."""
    told = Told(uplink := Uplink())
    told.go(0.8, 4.5e6, 0.05)
    told.go(0.1, 12e6, 0.09)
    assert uplink.rate > 6e6
    told.go(0.4, 5e6, 0.1, lost=0.2)
    assert 4.5e6 <= uplink.rate < 5.5e6
    told.go(1.5, 5e6, 0.06)
    assert uplink.rate == pytest.approx(5e6, rel=0.05)


def test_a_rate_that_was_told_is_not_doubted_for_what_is_lost_at_once() -> None:
    told = Told(Uplink(5e6))
    told.go(0.6, 4e6, 0.1, lost=0.3)
    assert told.uplink.rate == 5e6



@pytest.mark.parametrize("believed", [0.6, 1.5])
def test_short_versions_teach_the_rate_together(believed) -> None:
    rate = 20 * MBIT
    run = Run(Uplink(believed * rate), Link(rate, limit=0.1 * rate, buffer=0.5 * rate), 16 * KIB)
    for _ in range(25):
        run.go(0.5)
        run.go(1.0, demand=0.0)
    assert 0.92 * rate <= run.uplink.rate <= 1.08 * rate


def test_a_few_packets_lost_before_anything_came_through_end_no_search() -> None:
    uplink, start = Uplink(), Uplink().pace
    for k in range(40):
        uplink.idle(k * TICK_S)
        uplink.observe(k * TICK_S, 0, 0.03, 0 if k < 3 else 20_000)
    assert uplink.pace == start


def test_a_search_that_a_pause_interrupts_goes_on_from_what_was_delivered() -> None:
    """Short versions: the first is over before the search is. The second must not begin at twice a burst's rate."""
    run = Run(Uplink(), Link(20 * MBIT, buffer=4e6))
    run.go(0.7, demand=18 * MBIT)
    assert run.uplink.pace > 30 * MBIT, "it still tries twice what it found"
    run.go(0.8, demand=0)
    assert 10 * MBIT <= run.uplink.pace < 1.3 * 18 * MBIT
    run.go(3.0)
    assert run.uplink.pace == pytest.approx(20 * MBIT, rel=0.25), "and it ends at the link's"


def test_who_has_sent_nothing_yet_has_not_paused() -> None:
    """A node waits for its first version for minutes; greetings are delivered meanwhile."""
    run = Run(Uplink(), Link(80 * MBIT))
    for tick in range(100):
        run.now += TICK_S
        run.uplink.idle(run.now)
        run.uplink.observe(run.now, 200 * tick, None)
    run.go(4.0)
    assert run.uplink.pace > 60 * MBIT


def test_a_pause_after_a_few_packets_stops_no_search() -> None:
    """The model's description goes to each node before there is a version: 70 KB, and then nothing for minutes."""
    run = Run(Uplink(), Link(80 * MBIT))
    run.go(0.3, demand=2 * MBIT)
    run.go(5.0, demand=0.0)
    assert run.uplink.pace == Uplink().pace
    run.go(2.0)
    assert run.uplink.pace > 60 * MBIT


def test_a_search_that_went_on_after_a_pause_is_a_search_again_once_that_much_was_carried() -> None:
    run = Run(Uplink(), Link(400 * MBIT, buffer=4e6))
    run.go(0.5)
    run.go(1.0, demand=0.0)
    before = run.uplink.pace
    assert before < 300 * MBIT
    run.go(1.2)
    assert run.uplink.pace > 350 * MBIT


@pytest.mark.parametrize("mbit", [20, 80, 300])
@pytest.mark.parametrize("seconds", [0.12, 0.2, 0.35])
def test_versions_that_are_over_at_once_find_the_rate_from_one_to_the_next(mbit, seconds) -> None:
    """Half a second with one of them in it says a fraction of the rate: it was 22 Mbit/s for ever, of a link of 87."""
    rate = mbit * MBIT
    run = Run(Uplink(), Link(rate, buffer=0.05 * rate, limit=0.2 * rate), 16 * KIB)
    for _ in range(8):
        run.go(seconds)
        run.go(1.0, demand=0.0)
    assert 0.75 * rate <= run.uplink.pace <= 2.2 * rate
    lost, before = run.link.resent, run.link.delivered
    for _ in range(8):
        run.go(seconds)
        run.go(1.0, demand=0.0)
    assert run.link.delivered - before >= 0.75 * rate * seconds * 8
    assert run.link.resent == lost


def test_a_told_rate_is_the_pace_from_the_start_and_no_more_than_that_is_tried_at_once() -> None:
    uplink = Uplink(80 * MBIT)
    assert uplink.pace == uplink.proven == 80 * MBIT
    run = Run(uplink, Link(20 * MBIT, buffer=1e6))
    run.go(6.0)
    assert run.uplink.pace == pytest.approx(20 * MBIT, rel=0.2), "told too much: found out"


@pytest.mark.parametrize("remembered", [5.0, 40.0, 75.0])
def test_a_remembered_rate_is_where_the_search_goes_on(remembered) -> None:
    uplink = Uplink(remembered=remembered * MBIT)
    assert remembered * MBIT <= uplink.pace <= 1.3 * remembered * MBIT and uplink.proven == remembered * MBIT
    run = Run(uplink, Link(40 * MBIT, buffer=1e6))
    run.go(6.0)
    assert run.uplink.pace == pytest.approx(40 * MBIT, rel=0.2)


@pytest.mark.parametrize("remembered", [2.0, 500.0])
def test_a_remembered_rate_that_is_far_off_is_found_out_by_short_versions(remembered) -> None:
    """Versions of 2 MB over 8 Mbit/s, as from another place than last time."""
    run = Run(Uplink(remembered=remembered * MBIT), Link(8 * MBIT), 16 * KIB)
    run.go(0.5, demand=0.0)
    assert run.uplink.pace <= 1.3 * remembered * MBIT, "and not START_RATE where less is remembered"
    for _ in range(3):
        run.go(2.0, demand=1e6)
        run.go(2.0, demand=0.0)
    assert run.uplink.proven < 16 * MBIT


def test_what_is_worth_remembering_was_seen_and_not_told_or_bounded() -> None:
    uplink = Uplink(80 * MBIT)
    run = Run(uplink, Link(80 * MBIT, buffer=4e6))
    assert uplink.found == 0
    run.go(4.0)
    assert uplink.found == pytest.approx(80 * MBIT, rel=0.15)
    uplink.cap = 10 * MBIT
    assert uplink.found == 0
    little = Run(Uplink(), Link(80 * MBIT))
    little.go(0.3, demand=2 * MBIT)
    assert little.uplink.proven > 0 and little.uplink.found == 0


def test_nothing_is_known_before_anything_was_delivered() -> None:
    assert Uplink().proven == 0
    run = Run(Uplink(), Link(80 * MBIT))
    run.go(3.0)
    assert run.uplink.proven == pytest.approx(80 * MBIT, rel=0.15)
    run.uplink.cap = 10 * MBIT
    assert run.uplink.proven == 10 * MBIT, "its owner allows no more"
