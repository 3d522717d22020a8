"""What an owner allows: how it is written, the hours, the bucket, the day's bytes, giving way, and the shares of a downlink."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p.allowance.bucket import BURST_S, DEBT_S, TokenBucket
from p2p.allowance.giving_way import DEVICE_SHARE, ENTER_S, LEAVE_S, UP_LEAST, GivesWay, OthersUse
from p2p.allowance.hours import DAY_MINUTES, Hours, LocalTime
from p2p.allowance.limits import GB, MBIT, NO_LIMITS, HostLimits, read_limits, written_limits
from p2p.allowance.permission import permit
from p2p.allowance.quota import SAVES_FROM, DayCount
from p2p.allowance.shares import TAKES, DownShares, divided
from p2p.errors import UsageError

# --- how it is written -----------------------------------------------------------------------------------------------


def test_flags_become_one_value_and_back() -> None:
    said = {
        "max_up_mbit": 5, "max_down_mbit": "20", "max_disk": 30, "quota_gb_per_day": 1.5, "between": "22:00-07:00", "yield": True,
    }  # fmt: skip
    limits = NO_LIMITS.changed(said)
    assert limits == HostLimits(5 * MBIT, 20 * MBIT, 30 * GB, 3 * GB // 2, Hours(22 * 60, 7 * 60), gives_way=True)
    assert str(limits) == "up 5 Mbit/s, down 20 Mbit/s, disk 30 GB, 1.5 GB a day, 22:00-07:00, gives way"
    assert read_limits(written_limits(limits)) == limits and str(NO_LIMITS) == ""
    only = limits.changed({"max_up_mbit": 0, "between": "always", "yield": None})
    assert only == HostLimits(0, 20 * MBIT, 30 * GB, 3 * GB // 2, None, gives_way=True), "None changes nothing"


@pytest.mark.parametrize(("name", "value", "says"), [
    ("between", "25:00-7", "is not HH:MM-HH:MM"), ("between", "25:00-07:00", "25:00 is no time of day"),
    ("between", "07:60-08:00", "no time of day"), ("between", "07:00-07:00", "begins when it ends"),
    ("max_up_mbit", -1, "not a number from 0"), ("max_up_mbit", float("nan"), "not a number from 0"),
    ("max_down_mbit", "fast", "--max-down-mbit: 'fast' is not a number"), ("max_up_mbit", 0.01, "no link stays up"),
    ("quota_gb_per_day", -5, "--quota-gb-per-day"), ("max_disk", "inf", "--max-disk"), ("max_disk", True, "--max-disk"),
    ("yield", "yes", "neither true nor false"), ("max_sideways", 1, "is no limit"),
])  # fmt: skip
def test_what_cannot_be_is_told_in_one_line(name, value, says) -> None:
    with pytest.raises(UsageError) as refused:
        NO_LIMITS.changed({name: value})
    assert says in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"max_up_mbit": "x"}'])
def test_a_damaged_file_of_limits_is_refused(text) -> None:
    with pytest.raises(UsageError):
        read_limits(text)


# --- hours -----------------------------------------------------------------------------------------------------------


@given(st.integers(0, DAY_MINUTES - 1), st.integers(0, DAY_MINUTES - 1))
def test_hours_and_their_opposite_are_the_whole_day(start, stop) -> None:
    if start == stop:
        return
    hours, others = Hours(start, stop), Hours(stop, start)
    assert all(hours.holds(m) != others.holds(m) for m in range(DAY_MINUTES))
    assert sum(map(hours.holds, range(DAY_MINUTES))) == (stop - start) % DAY_MINUTES
    assert Hours.parse(str(hours)) == hours


def test_hours_over_midnight_begin_and_end_when_the_clock_shows_it() -> None:
    """A change of the clock in between (summer time) makes the night shorter or longer, and moves neither end."""
    night = Hours.parse("22:00-07:00")
    assert [night.holds(60 * h + m) for h, m in ((21, 59), (22, 0), (0, 0), (6, 59), (7, 0))] == [False, True, True, True, False]


# --- the bucket ------------------------------------------------------------------------------------------------------


def worst_of_ten_seconds(events: list[tuple[float, float]]) -> float:
    """The most bytes in any ten seconds."""
    worst = total = 0.0
    first = 0
    for at, nbytes in events:
        total += nbytes
        while at - events[first][0] >= 10.0:
            total -= events[first][1]
            first += 1
        worst = max(worst, total)
    return worst


@given(st.integers(0, 10**6), st.floats(0.1, 1000.0), st.floats(0.0, 0.5))
def test_a_rate_is_kept_within_five_percent_over_every_ten_seconds(seed, mbit, urgent_share) -> None:
    """Chunks of any size in pieces, control messages in between that do not wait, and pauses with nothing to send."""
    rng, rate = random.Random(seed), mbit * MBIT
    bucket, now, events = TokenBucket(), 0.0, []
    bucket.set_rate(now, rate)
    least = 1400
    while now < 40.0 and len(events) < 4000:
        if rng.random() < 0.02:
            now += rng.uniform(0, 3)
        chunk = rng.randint(1, 256 * 1024)
        while chunk > 0 and now < 40.0 and len(events) < 4000:
            if rng.random() < urgent_share:
                size = rng.randint(1, max(2, int(rate * 0.02)))
                now += bucket.wait_urgent(now)
            else:
                size = min(chunk, bucket.piece(65507))
                now += bucket.wait(now, size)
                chunk -= size
            bucket.charge(now, size)
            events.append((now, float(size)))
    assert worst_of_ten_seconds(events) <= 1.05 * 10 * rate + least
    assert BURST_S + DEBT_S <= 0.5


def test_what_always_has_something_to_send_gets_the_whole_rate() -> None:
    bucket, now, sent = TokenBucket(), 0.0, 0
    bucket.set_rate(now, MBIT)
    while now < 20.0:
        size = bucket.piece(65507)
        now += bucket.wait(now, size)
        bucket.charge(now, size)
        sent += size
    assert 0.99 * 20 * MBIT <= sent <= 20 * MBIT * 1.01


def test_a_rate_that_is_changed_holds_at_once_and_none_lets_all_through() -> None:
    bucket = TokenBucket(MBIT)
    bucket.charge(0.0, MBIT)
    assert bucket.wait(0.0, 1000) > 0.5
    bucket.set_rate(0.0, 100 * MBIT)
    assert bucket.wait(0.0, 1000) < 0.02
    bucket.set_rate(0.0, 0.0)
    assert bucket.wait(0.0, 10**9) == 0 and bucket.piece(65507) == 65507


# --- a day's bytes ---------------------------------------------------------------------------------------------------


def test_a_day_is_counted_across_restarts_and_the_next_begins_anew() -> None:
    count = DayCount()
    count.add("2026-03-28", 700)
    count = DayCount.read(count.written())
    count.add("2026-03-28", 250)
    assert (count.used, count.saves(1000), count.spent(1000)) == (950, True, False)
    count.add("2026-03-28", 50)
    assert count.spent(1000) and not count.spent(0) and not count.saves(0)
    count.add("2026-03-29", 1)
    assert count.used == 1 and SAVES_FROM < 1
    assert DayCount.read("nonsense") == DayCount.read('{"day": 3}') == DayCount()


# --- giving way ------------------------------------------------------------------------------------------------------


def test_it_gives_way_after_some_seconds_and_comes_back_late() -> None:
    ways, now = GivesWay(), 0.0

    def for_seconds(seconds: float, **seen: float) -> None:
        nonlocal now
        for _ in range(round(seconds)):
            now += 1.0
            ways.look(now, OthersUse(**seen))

    for_seconds(2, up=10 * UP_LEAST)
    assert not ways.uplink, "a page was opened"
    for_seconds(1, up=0.0)
    for_seconds(ENTER_S + 1, up=2 * UP_LEAST, gpu=0.1)
    assert ways.uplink and not ways.device
    for _ in range(3):
        for_seconds(LEAVE_S - 2, up=0.0)
        for_seconds(1, up=0.8 * UP_LEAST)
    assert ways.uplink, "between the thresholds nothing changes"
    for_seconds(LEAVE_S + 1, up=0.0)
    assert not ways.uplink
    for_seconds(ENTER_S + 1, gpu=2 * DEVICE_SHARE)
    assert ways.device == "GPU"
    for_seconds(LEAVE_S + 1, cpu=2 * DEVICE_SHARE)
    assert ways.device == "processor"


def test_a_fast_uplink_is_not_taken_for_used_by_a_call() -> None:
    ways = GivesWay()
    for second in range(10):
        ways.look(float(second), OthersUse(up=4 * UP_LEAST), uplink_rate=100 * UP_LEAST)
    assert not ways.uplink


# --- all of it together ----------------------------------------------------------------------------------------------


def test_what_holds_now_and_why() -> None:
    limits = NO_LIMITS.changed({"max_up_mbit": 8, "quota_gb_per_day": 1, "between": "22:00-07:00", "yield": True})
    night, count = LocalTime("2026-11-25", 23 * 60), DayCount("2026-11-25", 0)
    assert permit(limits, night, count).relays == 8 * MBIT
    rests = permit(limits, LocalTime("2026-11-25", 8 * 60), count)
    assert (rests.rests, rests.relays) == ("out of hours until 22:00 (its clock)", 0)
    count.used = 950_000_000
    saving = permit(limits, night, count)
    assert (saving.rests, saving.idles, saving.relays) == ("", "", 0) and "quota" in saving.keeps
    count.used = GB
    assert permit(limits, night, count).rests == "quota used until midnight (its clock)"
    busy = GivesWay()
    for second in range(10):
        busy.look(float(second), OthersUse(up=1e9, gpu=1.0))
    count.used = 0
    giving = permit(limits, night, count, busy)
    assert (giving.rests, giving.idles, giving.keeps, giving.relays) == (
        "", "gives way: others use the GPU", "gives way: others use the uplink", 0,
    )  # fmt: skip
    assert permit(limits.changed({"yield": False}), night, count, busy).relays == 8 * MBIT


# --- shares of a downlink --------------------------------------------------------------------------------------------


SENT = st.dictionaries(st.text("abcdefgh", min_size=1, max_size=2), st.floats(0, 1e9), min_size=1, max_size=12)


@given(SENT, st.floats(1e3, 1e9))
def test_shares_sum_up_to_the_rate_and_leave_everybody_some(sent, rate) -> None:
    shares = divided(rate, sent)
    assert sum(shares.values()) == pytest.approx(rate) and shares.keys() == sent.keys()
    assert min(shares.values()) >= 0.09 * rate / len(sent)
    hungry = {n for n in sent if 1.5 * sent[n] > rate}
    assert len({round(shares[n] / rate, 6) for n in hungry}) <= 1, "who wants more than there is gets as much as its like"


def test_one_sender_can_have_nearly_all_of_a_downlink() -> None:
    shares, total, now = DownShares(), {"a": 0, "b": 0, "c": 0}, 0.0
    told = shares.divide(now, 1e6, total)
    assert told == dict.fromkeys("abc", pytest.approx(TAKES * 1e6 / 3))
    for _ in range(20):
        now += 1.0
        total["a"] += int(shares.told["a"])
        shares.divide(now, 1e6, total)
    assert shares.told["a"] > 0.75e6 and sum(shares.told.values()) <= 1.1 * TAKES * 1e6
    assert shares.divide(now + 0.5, 1e6, total) == {} and shares.divide(now + 2, 0.0, total) == {}
