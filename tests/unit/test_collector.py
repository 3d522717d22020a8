"""The collector: tokens from many nodes, each hand-over, each refusal; and runs whose nodes lie and die at random."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from learner.journal.records import Piece
from learner.rollouts.collector import Collector
from learner.rollouts.group import ATTEMPTS, first_attempt
from learner.rollouts.outcomes import Accepted, EventRefused, GroupAborted, Ignored, Requeued, Sampling, Stay, WholeGroup
from learner.tasks.port import Score
from learner.trajectory import Group
from p2p.protocol.rollout import Span, TokenEvent
from p2p.version import Version
from tests.support.groups import open_group, restore_group

V5, V6, V7 = Version(1, 5), Version(1, 6), Version(1, 7)
STOP = 9


def tokens(
    request_id: str, start: int, ids: list[int], version: Version = V5, finish: str = "", **extra: Any
) -> TokenEvent:
    logprobs = extra.pop("logprobs", np.full(len(ids), -0.5, np.float32))
    return TokenEvent.of(request_id, start, tuple(ids), logprobs, version, finish, **extra)


def opened(samples: int = 1, budget: int = 3, max_new_tokens: int = 4) -> Collector:
    collector = Collector(vocab_size=10, failure_budget=budget)
    for version in (V5, V6):
        collector.published(version)
    sampling = Sampling(max_new_tokens, (STOP,), 0.7, 0.9)
    ids = open_group(collector, 3, 30, [1, 2], V5, [100 + m for m in range(samples)], sampling)
    assert ids == tuple(f"3.{m}.0" for m in range(samples))
    return collector


def test_a_group_finishes_with_its_last_member() -> None:
    collector = opened(samples=2)
    request = collector.assign("3.0.0", "a")
    assert (request.prompt_ids, request.seed, request.min_version, request.prefix_ids) == ((1, 2), 100, V5, ())
    assert (request.max_new_tokens, request.stop_ids, request.temperature, request.top_p) == (4, (STOP,), 0.7, 0.9)
    collector.assign("3.1.0", "b")
    assert collector.pending() == [] and collector.working("a") == ["3.0.0"]
    assert collector.tokens("a", tokens("3.0.0", 0, [1, STOP], finish="stop")) == Accepted("3.0.0", 2, stay=Stay(2))
    assert collector.tokens("b", tokens("3.1.0", 0, [1, 2], V5)) == Accepted("3.1.0", 2)
    done = collector.tokens("b", tokens("3.1.0", 2, [3, 4], V6, "length"))
    assert isinstance(done, Accepted) and done.whole is not None
    group = done.whole.group
    assert (group.group_id, group.task_index, group.oldest) == (3, 30, V5)
    assert [(s.completion_ids, s.finish, s.node, s.seed) for s in group.trajectories] == [
        ((1, STOP), "stop", "a", 100),
        ((1, 2, 3, 4), "length", "b", 101),
    ]
    assert group.trajectories[1].spans == (Span(V5, 0, 2), Span(V6, 2, 4))
    scored = group.scored([Score(1.0, True), Score(0.0, False)])
    assert [t.reward for t in scored.trajectories] == [1.0, 0.0] and scored.trajectories[0].exact
    assert collector.outstanding == () and collector.working("b") == []
    assert collector.tokens_by_node == {"a": 2, "b": 4}
    assert collector.tokens("b", tokens("3.1.0", 4, [1])) == Ignored("3.1.0")


def test_who_declined_is_asked_last_unless_it_was_only_behind() -> None:
    collector = opened(samples=1)
    collector.assign("3.0.0", "b")
    collector.declined("b", "3.0.0", "behind", retryable=True, avoid=False)
    assert [r.avoid for r in collector.pending()] == [frozenset()]
    collector.assign("3.0.1", "c")
    collector.declined("c", "3.0.1", "past", retryable=True)
    assert [r.avoid for r in collector.pending()] == [frozenset({"c"})]


def test_what_a_node_says_of_versions_is_kept_run_by_run_and_never_goes_back() -> None:
    collector = opened()
    collector.assign("3.0.0", "a")
    collector.tokens("a", tokens("3.0.0", 0, [1], V5))
    collector.tokens("a", tokens("3.0.0", 1, [2], V6))
    out = collector.tokens("a", tokens("3.0.0", 2, [STOP], V5, "stop"))
    assert isinstance(out, Requeued) and out.refusal is not None and "older than 1.6" in out.refusal.reason
    collector.assign("3.0.1", "b")
    done = collector.tokens("b", tokens("3.0.1", 2, [STOP], V6, "stop"))
    assert isinstance(done, Accepted) and done.whole is not None
    assert done.whole.group.trajectories[0].spans == (Span(V5, 0, 1), Span(V6, 1, 3))


def test_a_lost_node_costs_a_prefill_and_no_token() -> None:
    collector = opened()
    collector.assign("3.0.0", "a")
    collector.tokens("a", tokens("3.0.0", 0, [1, 2], V6))
    assert collector.node_lost("a") == ["3.0.1"]
    (request,) = collector.pending()
    assert (request.request_id, request.min_version, request.reserved) == ("3.0.1", V6, V5)
    assert (request.tokens, request.attempt, request.avoid) == (2, 1, frozenset())
    again = collector.assign("3.0.1", "b")
    assert (again.prefix_ids, again.seed, again.min_version, again.max_new_tokens) == ((1, 2), 100, V6, 4)
    assert collector.tokens("a", tokens("3.0.0", 2, [7], V6)) == Ignored("3.0.0")  # still under way when it died
    done = collector.tokens("b", tokens("3.0.1", 2, [STOP], V6, "stop"))
    assert isinstance(done, Accepted) and done.whole and done.whole.group.trajectories[0].completion_ids == (1, 2, STOP)
    assert collector.node_lost("nobody") == []


def test_what_was_accepted_waits_for_the_journal_joined_where_it_follows() -> None:
    collector = opened(samples=2, max_new_tokens=9)
    collector.assign("3.0.0", "a")
    collector.assign("3.1.0", "b")
    for start, version in ((0, V5), (2, V5), (4, V6)):
        collector.tokens("a", tokens("3.0.0", start, [1, 2], version))
    collector.tokens("b", tokens("3.1.0", 0, [4], V5, logprobs=np.array([-0.1], np.float32)))
    collector.tokens("b", tokens("3.1.0", 2, [4], V5))  # refused: a gap
    collector.assign("3.1.1", "c")
    collector.tokens("c", tokens("3.1.1", 1, [5], V5))
    assert (collector.unwritten.tokens, collector.unwritten.longest) == (8, 6)
    pieces = collector.unwritten.take()
    assert [(p.group_id, p.member, p.start, p.stop, p.version, p.node, p.event().ids) for p in pieces] == [
        (3, 0, 0, 4, V5, "a", (1, 2, 1, 2)),
        (3, 0, 4, 6, V6, "a", (1, 2)),
        (3, 1, 0, 1, V5, "b", (4,)),
        (3, 1, 1, 2, V5, "c", (5,)),
    ]
    assert pieces[2].event().logprobs[0] == np.float32(-0.1)
    assert (collector.unwritten.tokens, collector.unwritten.longest, collector.unwritten.take()) == (0, 0, [])
    collector.tokens("a", tokens("3.0.0", 6, [1], V6))
    collector.abort_group(3)
    assert collector.unwritten.tokens == 0 and collector.unwritten.take() == []


def resumed(*members: list[Piece], epoch: int = 2) -> tuple[Collector, WholeGroup | None]:
    """A collector of a later epoch that takes up group 3 of epoch 1."""
    collector = Collector(vocab_size=10, first_group=7, first_attempt=first_attempt(epoch))
    collector.published(Version(epoch, 6))
    sampling = Sampling(4, (STOP,))
    return collector, restore_group(collector, 3, V5, [100 + m for m in range(len(members))], sampling, members)


def journaled(member: int, *runs: tuple[int, list[int], Version, str]) -> list[Piece]:
    """Pieces of group 3: (start, ids, version, node)."""
    return [
        Piece(3, member, start, v, np.array(ids, "<i4").tobytes(), np.full(len(ids), -0.5, "<f4").tobytes(), node)
        for start, ids, v, node in runs
    ]


def test_a_restarted_learner_takes_no_tokens_of_a_version_of_its_earlier_life() -> None:
    """Whoever was given what the journal had went on under the version that its last tokens bear."""
    collector, _ = resumed(journaled(0, (0, [1], V6, "a")))
    (waiting,) = collector.pending()
    collector.assign(waiting.request_id, "b")
    assert collector.extend("b", tokens(waiting.request_id, 1, [2], V6)) == 0
    assert isinstance(collector.tokens("b", tokens(waiting.request_id, 1, [2], V6)), Requeued), "it goes elsewhere"


def test_a_restarted_learner_goes_on_from_the_last_journaled_token() -> None:
    collector, whole = resumed(
        journaled(0, (0, [1], V5, "a"), (1, [2], V6, "b")), [], journaled(2, (0, [1, STOP], V5, "c"))
    )
    assert whole is None and collector.outstanding == (3,)
    first, second = collector.pending()  # the third has its end
    assert (first.request_id, first.min_version, first.tokens) == (f"3.0.{ATTEMPTS + 1}", V6, 2)
    assert (second.request_id, second.min_version, second.tokens) == (f"3.1.{ATTEMPTS + 1}", V5, 0)
    assert first.attempt == 1  # before new groups, which count from 0
    again = collector.assign(first.request_id, "d")
    assert (again.prefix_ids, again.seed) == ((1, 2), 100)
    assert collector.unwritten.tokens == 0  # the journal has them
    new = Version(2, 6)
    collector.tokens("d", tokens(first.request_id, 2, [3, 4], new))
    collector.assign(second.request_id, "d")
    done = collector.tokens("d", tokens(second.request_id, 0, [STOP], new))
    assert isinstance(done, Accepted) and done.whole is not None
    one, two, three = done.whole.group.trajectories
    assert one.completion_ids == (1, 2, 3, 4) and one.logprobs == (-0.5,) * 4 and one.node == "d" and one.finish == "length"
    assert one.spans == (Span(V5, 0, 1), Span(V6, 1, 2), Span(new, 2, 4)) and done.whole.group.oldest == V5
    assert two.completion_ids == (STOP,) and three.completion_ids == (1, STOP)
    assert (three.node, three.finish, three.seed) == ("c", "stop", 102)
    assert [p.start for p in collector.unwritten.take()] == [2, 0]
    fresh = open_group(collector, 9, 0, [1], new, [1], Sampling(4, (STOP,)))
    assert fresh == (f"9.0.{ATTEMPTS}",) and collector.pending()[0].attempt == 0


def test_a_group_whose_every_member_had_ended_is_whole_at_once() -> None:
    collector, whole = resumed(journaled(0, (0, [1, 2, 3, 4], V5, "a")), journaled(1, (0, [STOP], V6, "b")))
    assert whole is not None and [s.finish for s in whole.group.trajectories] == ["length", "stop"]
    assert collector.outstanding == () and collector.pending() == []


@pytest.mark.parametrize("attempt", [0, 1, 7, ATTEMPTS - 1])
def test_no_late_token_of_an_earlier_epoch_is_accepted(attempt: int) -> None:
    """Not even from the very node that the sequence is with now, at the very position that is next."""
    collector, _ = resumed(journaled(0, (0, [1], V5, "a")))
    (request,) = collector.pending()
    collector.assign(request.request_id, "a")
    late = f"3.0.{attempt}"
    assert collector.tokens("a", tokens(late, 1, [5], Version(2, 6))) == Ignored(late)
    assert collector.declined("a", late, "no engine", retryable=True) == Ignored(late)
    assert collector.working("a") == [request.request_id] and collector.failures_by_node == {}
    refused = collector.tokens("a", tokens(f"3.0.{2 * ATTEMPTS}", 1, [5], Version(2, 6)))
    assert isinstance(refused, EventRefused)  # of an epoch that is still to come
    collector, _ = resumed(journaled(0, (0, [1], V5, "a")), epoch=3)
    late = f"3.0.{ATTEMPTS + 1}"
    assert collector.tokens("a", tokens(late, 1, [5], Version(3, 6))) == Ignored(late)


def test_only_whole_groups_of_an_earlier_epoch_are_taken_up() -> None:
    collector, _ = resumed([])
    with pytest.raises(ValueError, match="taken up already"):
        restore_group(collector, 3, V5, [1], Sampling(4, ()), [[]])
    with pytest.raises(ValueError, match="not of an earlier epoch"):
        restore_group(collector, 7, V5, [1], Sampling(4, ()), [[]])
    with pytest.raises(ValueError, match="1 seeds and 2 members"):
        restore_group(collector, 2, V5, [1], Sampling(4, ()), [[], []])
    with pytest.raises(ValueError, match="expected 1"):
        restore_group(collector, 2, V5, [1], Sampling(4, ()), [journaled(0, (0, [1], V5, "a"), (2, [1], V5, "a"))])
    assert collector.outstanding == (3,)


def test_lost_nodes_never_abort_a_group() -> None:
    collector = opened(budget=2)
    for attempt in range(50):
        collector.assign(f"3.0.{attempt}", "a")
        assert collector.node_lost("a") == [f"3.0.{attempt + 1}"]
    assert collector.outstanding == (3,)


def test_a_node_that_dies_before_its_last_event_costs_nothing() -> None:
    collector = opened()
    collector.assign("3.0.0", "a")
    done = collector.tokens("a", tokens("3.0.0", 0, [1, STOP]))  # no finish yet
    assert isinstance(done, Accepted) and done.whole and done.whole.group.trajectories[0].finish == "stop"
    assert collector.tokens("a", tokens("3.0.0", 2, [], finish="stop")) == Ignored("3.0.0")
    assert collector.node_lost("a") == []


def test_an_interrupted_trajectory_goes_on_elsewhere() -> None:
    collector = opened()
    collector.assign("3.0.0", "a")
    got = collector.tokens("a", tokens("3.0.0", 0, [1], finish="interrupt"))
    assert got == Requeued("3.0.1", ("a", "3.0.0"), None, 1, made=1)
    assert collector.assign("3.0.1", "b").prefix_ids == (1,)


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (tokens("3.0.0", 2, [1], V6), "tokens start at 2, expected 1"),
        (tokens("3.0.0", 0, [1], V6), "tokens start at 0, expected 1"),
        (tokens("3.0.0", 1, [1], V6, logprobs=np.array([np.nan], np.float32)), "not finite"),
        (tokens("3.0.0", 1, [1], V6, logprobs=np.array([0.5], np.float32)), "not finite values <= 0"),
        (tokens("3.0.0", 1, [1], V6, logprobs=np.array([-61.0], np.float32)), "logprob -61.0 of a sampled token"),
        (tokens("3.0.0", 1, [1], V6, logprobs=np.zeros(2, np.float32)), "4 bytes of token ids with 8 of logprobs"),
        (TokenEvent("3.0.0", 1, b"\1\0\0", b"\0\0\0", V6, "", ""), "3 bytes of token ids with 3 of logprobs"),
        (tokens("3.0.0", 1, [1], Version(1, 4)), "never published"),
        (tokens("3.0.0", 1, [1], V7), "version 1.7 was never published"),
        (tokens("3.0.0", 1, [1], V5), "version 1.5 is older than 1.6"),
        (tokens("3.0.0", 1, [1, 1, 1, 1], V6), "5 tokens of 4"),
        (tokens("3.0.0", 1, [STOP, 1], V6), "after a stop token"),
        (tokens("3.0.0", 1, [10], V6), "outside the vocabulary"),
        (tokens("3.0.0", 1, [2**32 - 1], V6), "outside the vocabulary"),
        (tokens("3.0.0", 1, [1], V6, "stop"), "no stop token"),
        (tokens("3.0.0", 1, [1], V6, "length"), "length at 2 of 4"),
        (tokens("3.0.0", 1, [1], V6, "done"), "unknown finish 'done'"),
        (tokens("3.0.0", 1, [], V6, "error", message="out of memory"), "error: out of memory"),
        (tokens("3.0.0", 1, [], V6, "abort"), "gave up with abort"),
    ],
)
def test_a_misbehaving_node_is_refused_by_name_and_replaced(event: TokenEvent, reason: str) -> None:
    collector = opened()
    collector.assign("3.0.0", "bad")
    collector.tokens("bad", tokens("3.0.0", 0, [4], V6))
    got = collector.tokens("bad", event)
    assert isinstance(got, Requeued) and got.refusal is not None
    assert got.cancel == ("bad", "3.0.0") and got.request_id == "3.0.1"
    assert got.refusal.peer == "bad" and got.refusal.version == event.version and reason in got.refusal.reason
    again = collector.assign("3.0.1", "good")
    assert again.prefix_ids == (4,)  # the last good token
    assert collector.failures_by_node == {"bad": 1}


def test_the_failure_budget_ends_a_group() -> None:
    collector = opened(samples=2, budget=3)
    collector.assign("3.1.0", "good")
    for attempt in range(2):
        collector.assign(f"3.0.{attempt}", f"n{attempt}")
        assert isinstance(collector.tokens(f"n{attempt}", tokens(f"3.0.{attempt}", 5, [1])), Requeued)
    assert [r.avoid for r in collector.pending()] == [frozenset({"n0", "n1"})]
    collector.assign("3.0.2", "n2")
    got = collector.declined("n2", "3.0.2", "prompt too long", retryable=False)
    assert isinstance(got, GroupAborted) and got.group_id == 3
    assert "failed 3 times, last on n2" in got.reason and got.refusal.peer == "n2"
    assert set(got.cancel) == {("n2", "3.0.2"), ("good", "3.1.0")}
    assert collector.outstanding == () and collector.pending() == [] and collector.working("good") == []
    assert collector.tokens("good", tokens("3.1.0", 0, [1])) == Ignored("3.1.0")


def test_a_node_may_decline_for_now() -> None:
    collector = opened(budget=1)
    collector.assign("3.0.0", "a")
    assert collector.declined("a", "3.0.0", "full", retryable=True) == Requeued("3.0.1", ("a", "3.0.0"))
    assert collector.declined("a", "3.0.0", "full", retryable=False) == Ignored("3.0.0")
    assert collector.declined("a", "junk", "full", retryable=False) == Ignored("junk")


def test_strangers_change_nothing() -> None:
    collector = opened()
    collector.assign("3.0.0", "a")
    for event in (
        tokens("3.0.0", 0, [1]),
        tokens("3.0.7", 0, [1]),
        tokens("3.4.0", 0, [1]),
        tokens("4.0.0", 0, [1]),
        tokens("x", 0, [1]),
        tokens("03.0.0", 0, [1]),
        tokens("3.0.-1", 0, [1]),
        tokens("9" * 500, 0, [1]),
    ):
        got = collector.tokens("thief", event)
        assert isinstance(got, EventRefused) and got.refusal.peer == "thief"
    assert collector.tokens("thief", tokens("2.0.0", 0, [1])) == Ignored("2.0.0")  # an earlier group, over
    assert collector.tokens("a", tokens("3.0.0", 0, [1])) == Accepted("3.0.0", 1)
    assert collector.failures_by_node == {}


def test_wrong_calls_are_named() -> None:
    collector = opened()
    with pytest.raises(ValueError, match="comes after"):
        open_group(collector, 3, 0, [1], V5, [1], Sampling(4, ()))
    with pytest.raises(ValueError, match="not published"):
        open_group(collector, 4, 0, [1], V7, [1], Sampling(4, ()))
    with pytest.raises(ValueError, match="no members"):
        open_group(collector, 4, 0, [1], V5, [], Sampling(4, ()))
    collector.assign("3.0.0", "a")
    with pytest.raises(KeyError):
        collector.assign("3.0.0", "b")
    with pytest.raises(KeyError):
        collector.assign("3.0.1", "b")
    assert collector.abort_group(3) == (("a", "3.0.0"),)
    with pytest.raises(KeyError):
        collector.abort_group(3)


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_each_group_finishes_whole_and_once(seed: int) -> None:
    """Tokens depend only on (seed, position), as the engine promises; nodes die, lie, stall, interrupt and repeat
    old events. Every group must come out with exactly the tokens an undisturbed run would give."""
    rng = random.Random(seed)
    length, samples, groups = 12, 3, 4

    def true_token(member_seed: int, position: int) -> int:
        return random.Random(member_seed * 1000 + position).randrange(8)

    collector = Collector(vocab_size=10, failure_budget=10_000)
    collector.published(V5)
    for g in range(groups):
        seeds = [g * samples + m for m in range(samples)]
        open_group(collector, g, g, [1], V5, seeds, Sampling(length, (STOP,)))
    running: dict[str, tuple[str, int, int]] = {}  # request id -> node, seed, position
    old: list[tuple[str, TokenEvent]] = []
    done: dict[int, Group] = {}
    newest = V5
    for _ in range(20_000):
        if len(done) == groups:
            break
        waiting = collector.pending()
        if waiting and rng.random() < 0.6:
            request = rng.choice(waiting)
            node = rng.choice("abcd")
            sent = collector.assign(request.request_id, node)
            running[request.request_id] = (node, sent.seed, len(sent.prefix_ids))
            continue
        if rng.random() < 0.02:
            newest = Version(1, newest.step + 1)
            collector.published(newest)
        if rng.random() < 0.05:
            node = rng.choice("abcd")
            held = {r for r, (n, _, _) in running.items() if n == node}
            assert len(collector.node_lost(node)) == len(held)
            running = {r: v for r, v in running.items() if r not in held}
        if old and rng.random() < 0.2:
            node, event = rng.choice(old)
            if event.request_id not in running:
                assert isinstance(collector.tokens(node, event), Ignored)
        if not running:
            continue
        request_id = rng.choice(sorted(running))
        node, member_seed, position = running[request_id]
        count = rng.randint(0, min(3, length - position))
        ids = [true_token(member_seed, position + i) for i in range(count)]
        finish = "length" if position + count == length else rng.choice(["", "", "", "interrupt", "error"])
        event = tokens(request_id, position, ids, newest, finish)
        if rng.random() < 0.1:
            event = tokens(request_id, position + 1, [1], newest)
        got = collector.tokens(node, event)
        old.append((node, event))
        if isinstance(got, Requeued):
            del running[request_id]
        else:
            assert isinstance(got, Accepted) and got.tokens == count
            if position + count == length:
                del running[request_id]
            else:
                running[request_id] = (node, member_seed, position + count)
            if got.whole:
                assert got.whole.group.group_id not in done
                done[got.whole.group.group_id] = got.whole.group
    assert sorted(done) == list(range(groups)) and collector.pending() == []
    for group in done.values():
        for sample in group.trajectories:
            assert sample.completion_ids == tuple(true_token(sample.seed, i) for i in range(length))
            assert [s.start for s in sample.spans] == [0, *[s.stop for s in sample.spans[:-1]]]
            assert sample.spans[-1].stop == length
    assert sum(collector.tokens_by_node.values()) == groups * samples * length
