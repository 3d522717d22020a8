"""How long a group takes, without the time that it waits for its turn."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from learner.rollouts.durations import RECENT, Durations


def test_nothing_is_known_at_first() -> None:
    assert Durations().generation_s == 0.0


def test_the_longest_member_counts_from_its_own_first_token() -> None:
    d = Durations()
    d.opened(3, 100.0)
    d.began("3.0.0", 150.0)  # queued for 50 s
    d.began("3.1.0", 190.0)
    d.ended("3.0.0", 170.0)
    d.ended("3.1.0", 200.0)
    d.whole(3)
    assert d.generation_s == 20.0 + 50.0
    d.opened(4, 300.0)
    d.began("4.0.0", 300.5)
    d.ended("4.0.0", 320.5)
    d.whole(4)
    assert d.generation_s == 20.0 + 0.5  # what every group waits, and no more


def test_a_member_that_moved_began_where_it_began_first() -> None:
    d = Durations()
    d.opened(0, 0.0)
    d.began("0.0.0", 1.0)
    d.ended("0.0.0", 5.0)  # interrupted
    d.began("0.0.1", 7.0)
    d.ended("0.0.1", 11.0)
    d.whole(0)
    assert d.generation_s == 10.0 + 1.0


def test_what_is_not_known_is_passed_over() -> None:
    d = Durations()
    for request_id in ("9.0.0", "", "x", "1", "9.9.9.9"):
        d.began(request_id, 1.0)
        d.ended(request_id, 2.0)
    d.opened(5, 0.0)
    d.dropped(5)
    d.whole(5)
    d.whole(6)
    assert d.generation_s == 0.0


@given(st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 1e3)), min_size=1, max_size=2 * RECENT))
def test_waiting_for_a_turn_does_not_count(groups) -> None:
    """However long groups queue, with one that did not it is what generating takes."""
    d = Durations()
    for i, (queued, takes) in enumerate([*groups, (0.0, groups[-1][1])]):
        d.opened(i, 0.0)
        d.began(f"{i}.0.0", queued)
        d.ended(f"{i}.0.0", queued + takes)
        d.whole(i)
    times = [takes for _, takes in groups]
    assert min(times) - 1e-6 <= d.generation_s <= max(times) + 1e-6
