"""Episodes of several turns in the collector: what is asked, what an answer does, and that nothing waits at a node meanwhile."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from learner.environments.port import Episode, EpisodeKey, Turn, TurnAnswer
from learner.journal.records import Piece
from learner.rollouts.collector import Collector
from learner.rollouts.episodes import LIVES
from learner.rollouts.group import first_attempt
from learner.rollouts.outcomes import Accepted, BegunAnew, GroupAborted, Ignored, Sampling, Stay, TurnLimits, WholeGroup
from learner.tasks.port import EpisodeEnd, Score
from learner.trajectory import Gap
from p2p.protocol.rollout import Span, TokenEvent
from p2p.version import Version
from tests.support.groups import open_group, restore_group

V5, V6 = Version(1, 5), Version(1, 6)
STOP = 9
TURNS = Sampling(20, (STOP,), turns=TurnLimits(3))
DONE = Score(0.5, True, {"right": 1.0})
KEY = EpisodeKey(3, 0)


def tokens(request_id: str, start: int, ids: list[int], version: Version = V5, finish: str = "") -> TokenEvent:
    return TokenEvent.of(request_id, start, ids, np.full(len(ids), -0.5, np.float32), version, finish)


def opened(samples: int = 1, sampling: Sampling = TURNS, extra: int = 0) -> Collector:
    collector = Collector(vocab_size=10)
    for version in (V5, V6):
        collector.published(version)
    open_group(collector, 3, 30, [1, 2], V5, [100 + m for m in range(samples)], sampling, extra=extra)
    return collector


def asked(collector: Collector) -> list[Episode]:
    return list(collector.episodes.take_work().ask)


def first_turn(collector: Collector, node: str = "a") -> None:
    collector.assign("3.0.0", node)
    assert collector.tokens(node, tokens("3.0.0", 0, [1, STOP], finish="stop")) == Accepted("3.0.0", 2, stay=Stay(2))


def test_a_turn_that_ends_waits_for_its_environment_and_for_no_node() -> None:
    collector = opened()
    first_turn(collector)
    assert collector.pending() == [] and collector.working("a") == [] and collector.progress() == {"a": {}}
    assert asked(collector) == [Episode(KEY, 30, (Turn((1, STOP)),))]
    assert asked(collector) == []
    assert collector.tokens("a", tokens("3.0.0", 0, [1, STOP], finish="stop")) == Ignored("3.0.0")
    assert collector.node_lost("a") == []
    with pytest.raises(KeyError):
        collector.assign("3.0.1", "b")


def test_the_next_turn_extends_the_very_ids_of_the_last() -> None:
    collector = opened()
    first_turn(collector)
    assert collector.episodes.answered(TurnAnswer(KEY, 1, (4, STOP, 5))) == Accepted("3.0.1", 0)
    (request,) = collector.pending()
    assert (request.request_id, request.tokens, request.prefer, request.attempt) == ("3.0.1", 5, "a", 1)
    again = collector.assign("3.0.1", "b")
    assert (again.prefix_ids, again.seed, again.max_new_tokens) == ((1, STOP, 4, STOP, 5), 100, 20)
    assert collector.extend("b", tokens("3.0.1", 5, [6], V5)) == 1
    assert collector.node_lost("b") == ["3.0.2"] and collector.pending()[0].prefer == ""
    assert collector.assign("3.0.2", "c").prefix_ids == (1, STOP, 4, STOP, 5, 6)
    collector.tokens("c", tokens("3.0.2", 6, [STOP], V6, "stop"))
    assert asked(collector)[-1].turns == (Turn((1, STOP), (4, STOP, 5)), Turn((6, STOP)))
    done = collector.episodes.answered(TurnAnswer(KEY, 2, score=DONE))
    assert isinstance(done, Accepted) and done.whole is not None
    (t,) = done.whole.group.trajectories
    assert t.completion_ids == (1, STOP, 4, STOP, 5, 6, STOP) and t.logprobs == (-0.5, -0.5, 0.0, 0.0, 0.0, -0.5, -0.5)
    assert t.spans == (Span(V5, 0, 2), Span(V5, 5, 6), Span(V6, 6, 7)) and t.given == (Gap(2, 5),)
    assert (t.reward, t.exact, t.parts, t.finish, t.sampled_tokens) == (0.5, True, {"right": 1.0}, "stop", 4)
    assert done.whole.group.is_scored
    pieces = collector.unwritten.take()
    assert [(p.start, p.stop, p.version, p.node, len(p.logprobs)) for p in pieces] == [
        (0, 2, V5, "a", 8), (2, 5, None, "", 0), (5, 6, V5, "b", 4), (6, 7, V6, "c", 4),
    ]  # fmt: skip


def test_a_turn_has_its_own_budget() -> None:
    collector = opened(sampling=replace(TURNS, turns=TurnLimits(3, turn_tokens=2)))
    assert collector.assign("3.0.0", "a").max_new_tokens == 2
    collector.tokens("a", tokens("3.0.0", 0, [1, 2], finish="length"))
    collector.episodes.answered(TurnAnswer(KEY, 1, (4,)))
    assert collector.assign("3.0.1", "a").max_new_tokens == 5
    collector.tokens("a", tokens("3.0.1", 3, [1, 2], finish="length"))
    assert [e.over for e in asked(collector)] == [""]


@pytest.mark.parametrize(
    ("limits", "budget", "over"), [(TurnLimits(1), 20, "turns"), (TurnLimits(3), 2, "length"), (TurnLimits(3), 3, "length")]
)
def test_the_environment_scores_what_no_turn_can_follow(limits: TurnLimits, budget: int, over: str) -> None:
    collector = opened(sampling=Sampling(budget, (STOP,), turns=limits))
    first_turn(collector)
    assert [e.over for e in asked(collector)] == [over]
    assert isinstance(collector.episodes.answered(TurnAnswer(KEY, 1, (4,))), Ignored)
    done = collector.episodes.answered(TurnAnswer(KEY, 1, score=DONE))
    assert isinstance(done, Accepted) and done.whole is not None


@pytest.mark.parametrize(
    ("limits", "budget", "ids", "end", "finish"),
    [
        (TurnLimits(3, turn_tokens=2), 20, [1, 2], EpisodeEnd(), "stop"),  # a turn of all its tokens, which was right
        (TurnLimits(3, turn_tokens=2), 20, [1, 2], None, "stop"),
        (TurnLimits(1, turn_tokens=2), 20, [1, 2], EpisodeEnd("turns"), "stop"),
        (TurnLimits(3), 3, [1, STOP], EpisodeEnd("length"), "length"),  # there was no room for the turn that it still needed
        (TurnLimits(3), 3, [1, STOP], None, "length"),
        (TurnLimits(3, turn_tokens=2), 20, [1, STOP], EpisodeEnd("time"), "stop"),
    ],
)
def test_an_episode_ended_by_length_only_where_no_tokens_were_left(
    limits: TurnLimits, budget: int, ids: list[int], end: EpisodeEnd | None, finish: str
) -> None:
    collector = opened(sampling=Sampling(budget, (STOP,), turns=limits))
    collector.assign("3.0.0", "a")
    collector.tokens("a", tokens("3.0.0", 0, ids, finish="stop" if ids[-1] == STOP else "length"))
    done = collector.episodes.answered(TurnAnswer(KEY, 1, score=replace(DONE, end=end)))
    assert isinstance(done, Accepted) and done.whole is not None
    assert [t.finish for t in done.whole.group.trajectories] == [finish]


def test_an_answer_that_leaves_no_room_for_a_turn_is_not_kept() -> None:
    collector = opened(sampling=Sampling(6, (STOP,), turns=TurnLimits(3)))
    first_turn(collector)
    asked(collector)
    assert collector.episodes.answered(TurnAnswer(KEY, 1, (4,) * 4)) == Accepted("3.0.1", 0)
    assert asked(collector) == [Episode(KEY, 30, (Turn((1, STOP)),), "length")]
    done = collector.episodes.answered(TurnAnswer(KEY, 1, score=DONE))
    assert isinstance(done, Accepted) and done.whole and done.whole.group.trajectories[0].completion_ids == (1, STOP)


def test_late_and_doubled_answers_are_ignored() -> None:
    collector = opened()
    first_turn(collector)
    for late in (
        TurnAnswer(EpisodeKey(2, 0), 1, (4,)), TurnAnswer(EpisodeKey(3, 7), 1, (4,)), TurnAnswer(EpisodeKey(3, 0, 1), 1, (4,)),
        TurnAnswer(KEY, 2, (4,)), TurnAnswer(KEY, 0, (4,)),
    ):  # fmt: skip
        assert isinstance(collector.episodes.answered(late), Ignored)
    collector.episodes.answered(TurnAnswer(KEY, 1, (4,)))
    for late in (TurnAnswer(KEY, 1, (5,)), TurnAnswer(KEY, 1, score=DONE), TurnAnswer(KEY, 1, failed="no")):
        assert isinstance(collector.episodes.answered(late), Ignored)
    assert collector.assign("3.0.1", "a").prefix_ids == (1, STOP, 4)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (TurnAnswer(KEY, 1, failed="row 17: the tool is not there"), "row 17: the tool is not there"),
        (TurnAnswer(KEY, 1), "answered with nothing"),
        (TurnAnswer(KEY, 1, (4, 10)), "token id 10, outside the vocabulary"),
        (TurnAnswer(KEY, 1, (4, STOP)), "ends with the stop token 9"),
        (TurnAnswer(KEY, 1, score=Score(float("nan"), False)), "reward is nan"),
    ],
)
def test_what_cannot_be_used_costs_the_group(answer: TurnAnswer, reason: str) -> None:
    collector = opened(samples=2)
    first_turn(collector)
    collector.assign("3.1.0", "b")
    asked(collector)
    out = collector.episodes.answered(answer)
    assert isinstance(out, GroupAborted) and reason in out.reason and out.refusal is None
    assert out.cancel == (("b", "3.1.0"),) and collector.outstanding == ()
    assert set(collector.episodes.take_work().forget) == {KEY, EpisodeKey(3, 1)}
    assert collector.unwritten.take() == []


def test_a_life_begins_anew_with_the_same_draws_and_not_for_ever() -> None:
    collector = opened()
    for life in range(LIVES - 1):
        request = collector.assign(f"3.0.{2 * life}", "a")
        assert (request.prefix_ids, request.seed) == ((), 100)
        collector.tokens("a", tokens(request.request_id, 0, [1, STOP], finish="stop"))
        key = EpisodeKey(3, 0, life)
        assert asked(collector) == [Episode(key, 30, (Turn((1, STOP)),))]
        out = collector.episodes.answered(TurnAnswer(key, 1, anew="its sandbox is gone"))
        assert out == BegunAnew(3, 0, f"3.0.{2 * life + 2}", "its sandbox is gone")
        assert collector.unwritten.take() == [] and [w.tokens for w in collector.pending()] == [0]
    last = collector.assign(f"3.0.{2 * LIVES - 2}", "a").request_id
    collector.tokens("a", tokens(last, 0, [1, STOP], finish="stop"))
    out = collector.episodes.answered(TurnAnswer(EpisodeKey(3, 0, LIVES - 1), 1, anew="its sandbox is gone"))
    assert isinstance(out, GroupAborted) and f"begun anew {LIVES} times" in out.reason


def test_members_that_are_not_needed_are_forgotten() -> None:
    collector = opened(samples=2, extra=1)
    first_turn(collector)
    collector.assign("3.1.0", "b")
    collector.tokens("b", tokens("3.1.0", 0, [2, STOP], finish="stop"))
    assert len(asked(collector)) == 2
    done = collector.episodes.answered(TurnAnswer(EpisodeKey(3, 1), 1, score=DONE))
    assert isinstance(done, Accepted) and done.whole is not None and done.whole.surplus == (2,)
    assert collector.episodes.take_work().forget == (KEY,)
    assert isinstance(collector.episodes.answered(TurnAnswer(KEY, 1, (4,))), Ignored)


def test_a_cut_episode_is_scored_by_its_environment() -> None:
    collector = opened(samples=3)
    first_turn(collector)  # waits for its environment
    collector.assign("3.1.0", "b")
    collector.tokens("b", tokens("3.1.0", 0, [2, 3]))  # in the midst of a turn
    collector.assign("3.2.0", "c")
    collector.tokens("c", tokens("3.2.0", 0, [2, STOP], finish="stop"))
    collector.episodes.answered(TurnAnswer(EpisodeKey(3, 2), 1, (4,)))  # before its second turn
    asked(collector)
    with pytest.raises(ValueError, match="episodes"):
        collector.cut(3)
    assert collector.episodes.cut(3) == (("b", "3.1.0"),) and collector.episodes.cut(3) is None
    assert sorted((e.key.member, e.turns, e.over) for e in asked(collector)) == [
        (0, (Turn((1, STOP)),), "time"), (1, (Turn((2, 3)),), "time"), (2, (Turn((2, STOP)),), "time"),
    ]  # fmt: skip
    assert collector.pending() == [] and isinstance(collector.episodes.answered(TurnAnswer(KEY, 1, (4,))), Ignored)
    outcomes = [collector.episodes.answered(TurnAnswer(EpisodeKey(3, m), 1, score=DONE)) for m in range(3)]
    done = outcomes[-1]
    assert isinstance(done, Accepted) and done.whole is not None
    assert [(t.completion_ids, t.finish) for t in done.whole.group.trajectories] == [
        ((1, STOP), "truncated"), ((2, 3), "truncated"), ((2, STOP), "truncated"),
    ]  # fmt: skip


def journaled(start: int, ids: list[int], version: Version | None) -> Piece:
    logprobs = b"" if version is None else np.full(len(ids), -0.5, "<f4").tobytes()
    return Piece(3, 0, start, version, np.array(ids, "<i4").tobytes(), logprobs, "" if version is None else "a")


@pytest.mark.parametrize("last", [[6], [6, STOP]])
def test_a_resumed_episode_goes_on_or_asks_again(last: list[int]) -> None:
    collector = Collector(vocab_size=10, first_group=7, first_attempt=first_attempt(2))
    pieces = [journaled(0, [1, STOP], V5), journaled(2, [4, 5], None), journaled(4, last, V6)]
    assert restore_group(collector, 3, V5, [100], TURNS, [pieces]) is None
    if last == [6]:
        assert asked(collector) == []
        (request,) = collector.pending()
        assert collector.assign(request.request_id, "b").prefix_ids == (1, STOP, 4, 5, 6)
    else:
        assert collector.pending() == []
        assert asked(collector) == [Episode(KEY, 30, (Turn((1, STOP), (4, 5)), Turn((6, STOP))))]
        done = collector.episodes.answered(TurnAnswer(KEY, 2, score=DONE))
        assert isinstance(done, Accepted) and isinstance(done.whole, WholeGroup)
        assert done.whole.group.trajectories[0].given == (Gap(2, 4),)
