"""Sequences that make no progress are found, and only those."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from learner.rollouts.stalls import ONE_FACTOR, StallWatch


def test_a_silent_node_loses_all_it_holds() -> None:
    watch = StallWatch(60.0)
    held = {"a": {"1.0.0": 0, "1.1.0": 5}, "b": {"2.0.0": 0}}
    assert watch.look(held, 0.0) == []
    held["b"]["2.0.0"] = 1
    assert watch.look(held, 50.0) == []
    (stall,) = watch.look(held, 61.0)
    assert stall.node == "a" and stall.request_ids == ("1.0.0", "1.1.0") and stall.reason == "no token from this node for 61 s"
    assert [s.node for s in watch.look(held, 111.0)] == ["a", "b"]


def test_more_work_is_no_progress_but_work_after_none_starts_the_clock() -> None:
    watch = StallWatch(60.0)
    watch.look({"a": {"1.0.0": 0}}, 0.0)
    watch.look({"a": {"1.0.0": 0, "2.0.0": 0}}, 59.0)
    assert watch.look({"a": {"1.0.0": 0, "2.0.0": 0}}, 61.0)
    watch.look({"a": {}}, 62.0)
    assert watch.look({"a": {"3.0.0": 0}}, 500.0) == []
    assert watch.look({"a": {"3.0.0": 0}}, 559.0) == []
    assert watch.look({"a": {"3.0.0": 0}}, 561.0)


def test_one_withheld_sequence_is_found_while_the_others_flow() -> None:
    watch = StallWatch(60.0)
    for second in range(0, int(ONE_FACTOR * 60) + 1, 10):
        assert watch.look({"a": {"1.0.0": 3, "2.0.0": second}}, float(second)) == []
    (stall,) = watch.look({"a": {"1.0.0": 3, "2.0.0": 7}}, ONE_FACTOR * 60 + 5)
    assert stall.request_ids == ("1.0.0",)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 4), st.integers(1, 59)), max_size=10))
def test_a_node_that_moves_in_time_is_never_stalled(moves) -> None:
    """Any node that gains a token at least every 59 s keeps its work; nothing that is gone is remembered."""
    watch, now = StallWatch(60.0), 0.0
    tokens = {"a": [0] * 5, "b": [0] * 5}
    for node, index, wait in moves:
        tokens[node][index] += 1
        other = "b" if node == "a" else "a"
        tokens[other][0] += 1
        assert watch.look({n: {f"{n}{i}": t for i, t in enumerate(ts)} for n, ts in tokens.items()}, now) == []
        now += wait
    assert watch.look({}, now) == [] and not watch._moved and not watch._node_moved  # memory of what is over


def test_a_node_of_short_sequences_moves_though_none_is_seen_twice() -> None:
    """Each look finds other sequences, which came and will have gone before the next: it was said to make nothing."""
    watch = StallWatch(60.0)
    for look in range(100):
        assert watch.look({"a": {f"{look}.0.0": 0}}, 2.0 * look, {"a": 7 * look}) == []
    ends = {"a": 693}
    for look in range(100, 130):
        assert watch.look({"a": {f"{look}.0.0": 0}}, 2.0 * look, ends) == []
    assert [stall.node for stall in watch.look({"a": {"130.0.0": 0}}, 260.0, ends)] == ["a"]
