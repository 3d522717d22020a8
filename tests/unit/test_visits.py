"""Who comes and goes without end is turned away before the handshake; others are not, and all are again in time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p.channel.visits import (
    A_SECOND,
    AT_ONCE,
    EACH_S,
    LINK_EACH_S,
    REMEMBERED,
    SHORT_LINKS,
    SHORT_S,
    SHORT_VISITS,
    ShortVisits,
    Visits,
    place_of,
)


def visit(visits: Visits, host: str, at: float, lasts: float = 0.1) -> bool:
    came = visits.may_come(host, at)
    if came:
        visits.admitted(host, at)
        visits.left(host, at, at + lasts)
    return came


def test_who_comes_and_goes_is_turned_away_and_others_are_not() -> None:
    visits = Visits()
    taken = [visit(visits, "203.0.113.1", at / 10, lasts=0.05) for at in range(10 * 300)]  # ten a second, for five minutes
    first = 10 * 15
    assert sum(taken[:first]) >= SHORT_VISITS and sum(taken[first:]) <= 285 / EACH_S + 1
    assert visits.turned_away == len(taken) - sum(taken)
    assert all(visit(visits, f"203.0.113.{i}", 300.0) for i in range(2, 30))
    assert visit(visits, "203.0.113.1", 300.0 + (SHORT_VISITS + 1) * EACH_S), "in time it may come again"


def test_links_that_last_are_never_counted() -> None:
    visits = Visits()
    for i in range(1000):
        assert visit(visits, "198.51.100.7", i * 0.1, lasts=SHORT_S + 0.01)
    assert not visits.turned_away


@pytest.mark.parametrize("lasts", [0.1, SHORT_S + 0.1, LINK_EACH_S - 0.1, LINK_EACH_S])
def test_who_stays_just_long_enough_has_no_more_links_by_it(lasts: float) -> None:
    visits, at, links = ShortVisits(SHORT_LINKS, LINK_EACH_S, LINK_EACH_S), 0.0, 0
    while at < 600:
        if visits.may_come("peer", at):
            links += 1
            at += lasts
            visits.left("peer", at - lasts, at)
        else:
            at += 0.1
    assert links <= SHORT_LINKS + 600 / LINK_EACH_S + 1


def test_all_that_come_at_once_are_bounded_wherever_they_are_from() -> None:
    visits = Visits()
    taken = sum(visits.may_come(f"10.{i >> 8 & 255}.{i & 255}.1", i / 1000) for i in range(20_000))  # a thousand a second
    assert AT_ONCE + 19 * A_SECOND <= taken <= AT_ONCE + 20 * A_SECOND + 1


def test_one_place_that_never_speaks_keeps_nobody_else_out() -> None:
    visits = Visits()
    silent = sum(visits.may_come("203.0.113.1", i / 1000) for i in range(60_000))  # a thousand a second, for a minute
    assert silent <= SHORT_VISITS + 60 / EACH_S + 1
    assert all(visits.may_come(f"198.51.100.{i}", 60 + i / 10) for i in range(100))


def test_many_places_take_little_memory() -> None:
    visits = ShortVisits(SHORT_VISITS, EACH_S)
    for i in range(2 * REMEMBERED):
        visits.left(str(i), 0.0, 1.0)
    assert len(visits) == REMEMBERED


@pytest.mark.parametrize(("one", "other", "same"), [
    ("203.0.113.1", "203.0.113.2", False), ("2001:db8::1", "2001:db8::ffff:1", True), ("2001:db8::1", "2001:db8:0:1::1", False),
    ("::ffff:203.0.113.1", "203.0.113.1", True), ("fe80::1%eth0", "fe80::2%eth1", True), ("", "", True), ("x", "y", False),
])  # fmt: skip
def test_a_place_is_what_one_customer_has(one, other, same) -> None:
    assert (place_of(one) == place_of(other)) == same


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 20), st.floats(0, 10)), max_size=200))
def test_no_place_has_more_short_visits_than_it_may(history) -> None:
    visits, now, short = Visits(), 0.0, dict[str, list[float]]()
    for host, pause, lasts in history:
        now += pause
        name = f"192.0.2.{host}"
        if visit(visits, name, now, lasts):
            now += lasts
            if lasts < SHORT_S:
                short.setdefault(name, []).append(now)
    for times in short.values():
        for i, start in enumerate(times):
            for j in range(i, len(times)):
                assert j - i + 1 <= SHORT_VISITS + (times[j] - start) / EACH_S + 2
