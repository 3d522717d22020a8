"""When an uplink is said to have become faster: what is known of it grows, and nothing waits or is lost."""

from __future__ import annotations

from p2p.broadcast.rise import BEGINS_S, CLEAR_S, GOES_ON_S, Rise

LOOK_S = 0.05


def looks(rise: Rise, rates: list[float], *, since: float = 0.0, queueing: float | None = 0.0) -> list[bool]:
    """What it says, one look after another."""
    return [rise.see(since + at * LOOK_S, rate, queueing, lossy=False) for at, rate in enumerate(rates)]


def test_it_begins_when_the_rate_grew_by_a_twentieth_within_a_second() -> None:
    assert not any(looks(Rise(), [100.0 + 0.2 * n for n in range(60)])), "four in a second are noise"
    said = looks(Rise(), [100.0 + 0.6 * n for n in range(20)])
    assert said.index(True) == 9  # 5.4 more, 0.45 s after the first look


def test_it_ends_once_the_rate_stands_and_what_it_rose_by_counts_once() -> None:
    rise = Rise()
    assert looks(rise, [100.0, 106.0])[-1]
    said = looks(rise, [106.0] * 40, since=0.1)
    stands = said.index(False)
    assert stands * LOOK_S <= GOES_ON_S + LOOK_S
    assert not any(said[stands:]), "though the rate of a second ago was lower"


def test_it_goes_on_while_the_rate_grows() -> None:
    assert all(looks(Rise(), [100.0 * 1.02**n for n in range(60)])[5:])


def test_a_packet_that_waits_or_is_lost_ends_it_and_what_was_before_is_forgotten() -> None:
    for queueing, lossy in ((CLEAR_S, False), (None, True), (0.0, True)):
        rise = Rise()
        assert looks(rise, [100.0, 110.0])[-1]
        assert not rise.see(0.1, 120.0, queueing, lossy=lossy) and not rise.on
        assert not rise.see(0.15, 121.0, 0.0, lossy=False), "the 100 of before does not count"
        assert rise.see(0.2, 128.0, 0.0, lossy=False)


def test_where_nothing_is_under_way_nothing_waits() -> None:
    assert looks(Rise(), [100.0, 106.0], queueing=None)[-1]


def test_what_was_longer_ago_than_a_second_is_no_rise() -> None:
    rise = Rise()
    rise.see(0.0, 100.0, 0.0, lossy=False)
    assert not rise.see(BEGINS_S + 0.1, 200.0, 0.0, lossy=False)
