"""Nodes that are late much more often than the others, and whether a step is sooner without them."""

from __future__ import annotations

from learner.dispatch.often_late import LATELY_S, ONE_S, RECENT, Making, OftenLate


def of(lost_s: float = 2.0, **given: tuple[int, int]) -> OftenLate:
    """node = (late, ended as asked), in turns, in the minute until 0.0."""
    often = OftenLate()
    for node, (late, ended) in given.items():
        for i in range(late + ended):
            at = 60.0 * ((i + 1) / (late + ended) - 1)
            if late and (i + 1) * late // (late + ended) > i * late // (late + ended):
                often.late(node, lost_s, at)
            else:
                often.ended(node, at)
    return often


def in_the_way(often: OftenLate, *nodes: str, usual_s: float = 0.2, step: int = 16, now: float = 0.0) -> set[str]:
    """Of nodes of four places each."""
    return set(often.in_the_way(dict.fromkeys(nodes, Making(4, usual_s)), step, now))


def test_who_is_late_much_more_often_is_in_the_way_of_quick_ones() -> None:
    often = of(a=(0, 40), b=(0, 40), late=(10, 30), once=(1, 1))
    assert in_the_way(often, "a", "b", "late", "once", "new") == {"late"}
    assert in_the_way(often, "a", "new", "late") == {"late"}, "of who is new nothing bad is known"
    assert not in_the_way(OftenLate(), "a", "b", "late")


def test_pauses_that_all_have_put_nobody_in_the_way() -> None:
    assert not in_the_way(of(a=(4, 36), b=(5, 40), c=(8, 40)), *"abc")
    assert not in_the_way(of(a=(0, 3), c=(0, 3), b=(5, 40)), *"abc"), "whether a and c are better is not known"
    assert not in_the_way(of(a=(0, 900), c=(0, 900), b=(8, 900)), *"abc"), "that is seldom"


def test_nobody_is_in_the_way_where_the_others_take_longer_without_it() -> None:
    often = of(a=(0, 40), b=(0, 40), late=(10, 30))
    assert in_the_way(often, "a", "b", "late", usual_s=1.0)
    assert not in_the_way(often, "a", "b", "late", usual_s=3.0), "two seconds are soon made good by a third node"
    assert not in_the_way(often, "a", "b", "late", step=400)
    assert in_the_way(of(lost_s=20.0, a=(0, 40), b=(0, 40), late=(10, 30)), "a", "b", "late", usual_s=3.0)
    flaky = of(a=(1, 40), b=(2, 40), c=(4, 36), d=(4, 36), e=(8, 32), f=(12, 28), lost_s=0.5)
    assert not in_the_way(flaky, *"abcdef"), "the others are late themselves, and would have fewer places for what is moved"


def test_one_alone_is_never_left() -> None:
    often = of(a=(0, 40), b=(10, 30), c=(10, 30), lost_s=60.0)
    assert not in_the_way(often, *"abc") and in_the_way(often, *"abc", "new") == {"b", "c"}


def test_only_those_that_are_there_count() -> None:
    often = of(gone=(0, 40), also=(0, 40), a=(5, 40), b=(8, 40), c=(6, 40))
    assert not in_the_way(often, *"abc") and in_the_way(often, *"abc", "gone", "also") == {"a", "b", "c"}


def test_what_happened_is_forgotten() -> None:
    often = of(a=(0, 40), b=(0, 40), late=(2, 8))
    assert in_the_way(often, "a", "b", "late", now=60.0) and not in_the_way(often, "a", "b", "late", now=0.3 * LATELY_S)
    again = of(a=(0, 40), b=(0, 40), late=(10, 30))
    for _ in range(2 * RECENT):
        again.ended("late", 0.0)
    assert not in_the_way(again, "a", "b", "late")


def test_one_pause_of_a_node_counts_once() -> None:
    often = of(a=(0, 40), b=(0, 40), late=(0, 40))
    for _ in range(4):
        often.late("late", 2.0, 100.0)
    assert not in_the_way(often, "a", "b", "late", now=100.0)
    for i in range(1, 5):
        often.late("late", 2.0, 100.0 + i * ONE_S)
    assert in_the_way(often, "a", "b", "late", now=105.0)


def test_slow_nodes_with_many_places_put_no_quick_ones_out() -> None:
    often = of(a=(0, 60), b=(0, 60), q=(5, 55), r=(5, 55), lost_s=0.7)
    quick = dict.fromkeys("qr", Making(8, 3.0))
    assert often.in_the_way(dict.fromkeys("ab", Making(8, 3.0)) | quick, 16, 0.0) == {"q", "r"}
    assert not often.in_the_way(dict.fromkeys("ab", Making(32, 8.0)) | quick, 16, 0.0), "these alone take eight seconds"


def test_how_late_one_node_is_says_little_of_the_others() -> None:
    given = {f"q{i}": (5, 55) for i in range(8)} | {"a": (0, 60), "b": (0, 60)}
    often = of(lost_s=0.6, **given)
    nodes = dict.fromkeys("ab", Making(1, 1.0)) | {f"q{i}": Making(4, 1.0) for i in range(8)}
    assert not often.in_the_way(nodes, 16, 0.0)
    for i in range(20):
        often.late("hostile", 60.0, 2.0 * i - 40.0)
    assert not often.in_the_way(nodes | {"hostile": Making(4, 1.0)}, 16, 0.0)
