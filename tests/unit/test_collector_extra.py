"""The collector: groups with members beyond need, and groups that are cut where they stand."""

from __future__ import annotations

import numpy as np
import pytest

from learner.journal.records import Piece
from learner.rollouts.collector import Collector
from learner.rollouts.group import ATTEMPTS, first_attempt
from learner.rollouts.outcomes import Accepted, GroupProgress, Ignored, Sampling, WholeGroup
from p2p.protocol.rollout import Span, TokenEvent
from p2p.version import Version
from tests.support.groups import open_group, restore_group

V5, V6 = Version(1, 5), Version(1, 6)
STOP = 9


def tokens(request_id: str, start: int, ids: list[int], version: Version = V5, finish: str = "") -> TokenEvent:
    return TokenEvent.of(request_id, start, tuple(ids), np.full(len(ids), -0.5, np.float32), version, finish)


def opened(members: int, extra: int = 0, limit: int = 8) -> Collector:
    """Group 3, each member with a node of its own: a, b, c, ..."""
    collector = Collector(vocab_size=10)
    collector.published(V5)
    collector.published(V6)
    open_group(collector, 3, 30, [1, 2], V5, [100 + m for m in range(members)], Sampling(limit, (STOP,)), extra=extra)
    for m in range(members):
        collector.assign(f"3.{m}.0", "abcdefgh"[m])
    return collector


def whole(outcome: object) -> WholeGroup:
    assert isinstance(outcome, Accepted) and outcome.whole is not None
    return outcome.whole


def test_a_group_is_whole_with_the_members_that_end_first_in_order_of_member() -> None:
    collector = opened(4, extra=2)
    collector.tokens("a", tokens("3.0.0", 0, [1, 2, 3]))
    collector.tokens("d", tokens("3.3.0", 0, [1, STOP]))
    assert collector.progress_of(3) == GroupProgress((2,), (3, 0, 0), 1)
    collector.tokens("c", tokens("3.2.0", 0, [4]))
    done = collector.tokens("b", tokens("3.1.0", 0, [STOP]))
    got = whole(done)
    kept = got.group.trajectories
    assert [(t.seed, t.completion_ids, t.finish) for t in kept] == [(101, (STOP,), "stop"), (103, (1, STOP), "stop")]
    assert got.surplus == (3, 1)
    assert isinstance(done, Accepted) and set(got.cancel) == {("a", "3.0.0"), ("c", "3.2.0")}
    assert collector.progress_of(3) is None and collector.outstanding == () and collector.pending() == []
    assert not any(collector.books.held.values())  # memory of what is over
    # What is still under way from those that were not needed is nobody's fault.
    assert collector.tokens("a", tokens("3.0.0", 3, [STOP], finish="stop")) == Ignored("3.0.0")
    assert collector.declined("c", "3.2.0", "gone", retryable=False) == Ignored("3.2.0")
    assert collector.node_lost("a") == [] and collector.failures_by_node == {}


def test_a_member_that_waits_for_a_node_need_not_be_cancelled() -> None:
    collector = opened(3, extra=1)
    collector.node_lost("b")
    collector.tokens("a", tokens("3.0.0", 0, [STOP]))
    done = collector.tokens("c", tokens("3.2.0", 0, [STOP]))
    assert [s.seed for s in whole(done).group.trajectories] == [100, 102] and whole(done).cancel == ()


def test_a_group_must_need_someone() -> None:
    collector = Collector()
    collector.published(V5)
    with pytest.raises(ValueError, match="no members"):
        open_group(collector, 1, 0, [1], V5, [1, 2], Sampling(4, ()), extra=2)


def test_a_cut_group_ends_with_what_its_members_have() -> None:
    collector = opened(3)
    collector.tokens("a", tokens("3.0.0", 0, [1, 2, 3]))
    collector.tokens("a", tokens("3.0.0", 3, [4], V6))
    collector.tokens("b", tokens("3.1.0", 0, [STOP]))
    assert collector.progress_of(3) == GroupProgress((1,), (4, 0), 2)
    with pytest.raises(ValueError, match="needs 2 more members, and 1 have a token"):
        collector.cut(3)
    assert collector.working("a") == ["3.0.0"]  # nothing has changed
    collector.tokens("c", tokens("3.2.0", 0, [7], V6))
    assert collector.progress_of(3) == GroupProgress((1,), (4, 1), 2)
    got = collector.cut(3)
    assert [(s.completion_ids, s.finish, s.node) for s in got.group.trajectories] == [
        ((1, 2, 3, 4), "truncated", "a"), ((STOP,), "stop", "b"), ((7,), "truncated", "c"),
    ]  # fmt: skip
    assert got.group.trajectories[0].spans == (Span(V5, 0, 3), Span(V6, 3, 4)) and got.group.oldest == V5
    assert set(got.cancel) == {("a", "3.0.0"), ("c", "3.2.0")} and got.surplus == ()
    assert collector.tokens("a", tokens("3.0.0", 4, [5], V6)) == Ignored("3.0.0")
    assert collector.outstanding == () and collector.unwritten.tokens == 6  # until the journal has it as finished
    with pytest.raises(KeyError):
        collector.cut(3)


def test_of_members_beyond_need_those_that_have_made_most_are_cut_and_the_others_are_surplus() -> None:
    collector = opened(5, extra=2)
    for node, member, count in (("a", 0, 1), ("b", 1, 5), ("c", 2, 3)):
        collector.tokens(node, tokens(f"3.{member}.0", 0, [1] * count))
    collector.tokens("d", tokens("3.3.0", 0, [STOP]))
    progress = collector.progress_of(3)
    assert progress == GroupProgress((1,), (1, 5, 3, 0), 2) and progress.longest == (5, 3) and progress.tokens == 10
    got = collector.cut(3)
    assert [(s.seed, s.finish) for s in got.group.trajectories] == [(101, "truncated"), (102, "truncated"), (103, "stop")]
    assert got.surplus == (1, 0) and len(got.cancel) == 4


def test_no_node_may_say_that_it_truncated() -> None:
    collector = opened(1)
    collector.tokens("a", tokens("3.0.0", 0, [1]))
    out = collector.tokens("a", tokens("3.0.0", 1, [1], finish="truncated"))
    assert collector.failures_by_node == {"a": 1} and not isinstance(out, Accepted)


def resumed(*members: list[int], extra: int) -> tuple[Collector, WholeGroup | None]:
    """A collector of epoch 2 that takes up group 3 of epoch 1."""
    collector = Collector(vocab_size=10, first_group=7, first_attempt=first_attempt(2))
    collector.published(Version(2, 5))
    pieces = [
        [Piece(3, m, 0, V5, np.array(ids, "<i4").tobytes(), np.full(len(ids), -0.5, "<f4").tobytes(), "a")] if ids else []
        for m, ids in enumerate(members)
    ]
    seeds = [100 + m for m in range(len(members))]
    return collector, restore_group(collector, 3, V5, seeds, Sampling(4, (STOP,)), pieces, extra=extra)


def test_a_restored_group_is_whole_when_as_many_as_it_needs_had_ended() -> None:
    collector, got = resumed([1], [STOP], [], [1, 2, 3, 4], extra=2)
    assert got is not None and [(s.seed, s.finish) for s in got.group.trajectories] == [(101, "stop"), (103, "length")]
    assert got.surplus == (1, 0) and collector.outstanding == () and collector.pending() == []


def test_a_restored_group_goes_on_with_all_its_members() -> None:
    collector, got = resumed([1], [STOP], [], [1, 2], extra=2)
    assert got is None
    names = [r.request_id for r in collector.pending()]
    assert names == [f"3.{m}.{ATTEMPTS + 1}" for m in (0, 2, 3)]
    collector.assign(names[1], "z")
    collector.assign(names[0], "y")
    done = collector.tokens("z", tokens(names[1], 0, [STOP], Version(2, 5)))
    got = whole(done)
    assert [s.seed for s in got.group.trajectories] == [101, 102] and got.cancel == (("y", names[0]),)
