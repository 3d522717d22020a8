"""Which answer is scored next: shares by node, and turns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.rewards.fair_queue import REMEMBERED, FairQueue


def start_all(queue: FairQueue) -> list[int]:
    """Every job that may start now, in order."""
    started = []
    while (job := queue.next()) is not None:
        started.append(job)
    return started


def test_answers_of_one_node_never_hold_all_workers() -> None:
    queue = FairQueue(workers=3)
    for job in range(10):
        queue.add(job, "slow")
    assert start_all(queue) == [0, 1, 2] and queue.held_by("slow") == 3
    queue.add(100, "other")
    assert start_all(queue) == [100], "the worker that is kept for others"
    queue.done(100)
    assert start_all(queue) == [], "and it is not the slow node's"
    queue.done(0)
    assert start_all(queue) == [3]
    assert (queue.running, queue.waiting) == (3, 6)


def test_with_one_worker_nodes_take_turns() -> None:
    queue = FairQueue(workers=1)
    for job in range(3):
        queue.add(job, "slow")
        queue.add(10 + job, "other")
    order = []
    while queue.waiting:
        order += start_all(queue)
        queue.done(order[-1])
    assert order == [0, 10, 1, 11, 2, 12]


def test_a_node_that_always_has_one_answer_does_not_go_before_all_others() -> None:
    queue = FairQueue(workers=1)
    for job in range(3):
        queue.add(job, "many")
    order = []
    for turn in range(6):
        queue.add(100 + turn, "one by one")
        order += start_all(queue)
        queue.done(order[-1])
    assert {0, 1, 2} <= set(order)


def test_what_is_withdrawn_is_never_started() -> None:
    queue = FairQueue(workers=2)
    for job in range(3):
        queue.add(job, "a")
    queue.done(1)
    queue.done(77)
    assert start_all(queue) == [0, 2]
    with pytest.raises(ValueError, match="known already"):
        queue.add(0, "b")


def test_nodes_that_come_and_go_are_forgotten() -> None:
    queue = FairQueue(workers=1)
    for job in range(REMEMBERED + 5):
        queue.add(job, str(job))
        assert start_all(queue) == [job]
        queue.done(job)
    assert (queue.running, queue.waiting) == (0, 0)


@given(st.integers(1, 4), st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60))
def test_a_worker_is_never_idle_for_a_node_that_may_have_it(workers: int, steps: list[tuple[str, bool]]) -> None:
    queue, node_of, running = FairQueue(workers), dict[int, str](), list[int]()
    for job, (node, end) in enumerate(steps):
        queue.add(job, node)
        node_of[job] = node
        if end and running:
            queue.done(running.pop(0))
        running += start_all(queue)
        held = {n: sum(node_of[j] == n for j in running) for n in "abc"}
        assert all(queue.held_by(n) == count <= workers for n, count in held.items()) and queue.running <= queue.most
        if queue.waiting:
            assert queue.running >= workers
    while running:
        queue.done(running.pop(0))
        running += start_all(queue)
    assert queue.waiting == 0
