"""Episodes of evaluations, step by step: what is asked next, within which limits, with which tokens."""

from __future__ import annotations

from typing import Any

import pytest

from learner.environments.port import Episode, EpisodeKey, Turn, TurnAnswer
from learner.evaluation.episode import EpisodeLimits, EpisodeLost, EvalEpisode
from learner.evaluation.result import SampledAnswer
from learner.requests.port import Ask
from learner.tasks.port import EpisodeEnd, Score
from p2p.version import Version

STOP = 0
KEY = EpisodeKey(7, 0, 0)
ASK = Ask(
    request_class="evaluation", prompt_ids=(9, 9), max_new_tokens=20, stop_ids=(STOP,), seed=5, temperature=0.5, top_p=0.9,
    exact_version=Version(1, 3),
)  # fmt: skip


def episode(*, max_turns: int = 4, turn_tokens: int = 0, context: int = 0, **changes: Any) -> EvalEpisode:
    ask = Ask(**({name: getattr(ASK, name) for name in Ask.__slots__} | changes))
    return EvalEpisode(ask, EpisodeLimits(max_turns, turn_tokens, context), KEY, 3)


def turn(*ids: int) -> SampledAnswer:
    return SampledAnswer(ids, "stop" if ids[-1] == STOP else "length")


def given(e: EvalEpisode, *ids: int) -> SampledAnswer | Episode | None:
    return e.answered(TurnAnswer(KEY, 1, given=ids))


def test_each_turn_extends_the_very_tokens_before_it() -> None:
    e = episode()
    first = e.next_ask()
    assert first == ASK
    assert e.sampled(turn(1, STOP)) == Episode(KEY, 3, (Turn((1, STOP)),))
    assert given(e, 6, 7) is None
    second = e.next_ask()
    assert second.prompt_ids == (9, 9, 1, STOP, 6, 7) and second.max_new_tokens == 16
    assert second.seed != first.seed and 0 <= second.seed < 1 << 63
    assert (second.exact_version, second.temperature, second.stop_ids) == (Version(1, 3), 0.5, (STOP,))
    assert e.sampled(turn(2, STOP)).turns == (Turn((1, STOP), (6, 7)), Turn((2, STOP)))
    done = e.answered(TurnAnswer(KEY, 2, score=Score(0.5, False)))
    assert done == SampledAnswer((1, STOP, 2, STOP), "stop", Score(0.5, False)), "as training counts its tokens"


def test_seeds_are_the_samples_own_and_the_same_again() -> None:
    def seeds(seed: int) -> list[int]:
        e, found = episode(seed=seed, max_turns=9), list[int]()
        for _ in range(4):
            found.append(e.next_ask().seed)
            e.sampled(turn(1, STOP))
            given(e, 6)
        return found

    assert seeds(5) == seeds(5) and len({*seeds(5), *seeds(6)}) == 8


def test_no_turn_is_longer_than_it_may_be() -> None:
    e = episode(turn_tokens=3)
    assert e.next_ask().max_new_tokens == 3
    assert e.sampled(turn(1, 1, 1)).over == "", "the turn is full, the episode is not"
    given(e, *[6] * 15)
    assert e.next_ask().max_new_tokens == 2, "what is left of all tokens"


def test_the_last_turn_that_there_may_be_says_so() -> None:
    e = episode(max_turns=2)
    assert e.sampled(turn(1, STOP)).over == ""
    given(e, 6)
    assert e.sampled(turn(1, STOP)).over == "turns"


@pytest.mark.parametrize(("tokens", "over"), [(18, ""), (19, "length"), (20, "length")])
def test_without_room_for_another_turn_the_score_is_asked_for(tokens: int, over: str) -> None:
    assert episode().sampled(turn(*[1] * tokens)).over == over


def test_it_ended_by_length_only_where_no_tokens_were_left() -> None:
    def finish(e: EvalEpisode, last: SampledAnswer, end: EpisodeEnd | None = None) -> str:
        e.sampled(last)
        done = e.answered(TurnAnswer(KEY, 1, score=Score(1.0, True, end=end)))
        assert isinstance(done, SampledAnswer)
        return done.finish

    assert finish(episode(turn_tokens=3), turn(1, 1, 1)) == finish(episode(max_turns=1, turn_tokens=3), turn(1, 1, 1)) == "stop"
    assert finish(episode(), turn(*[1] * 19), EpisodeEnd("length")) == finish(episode(), turn(*[1] * 18, STOP)) == "length"


def test_an_answer_that_leaves_no_room_is_dropped_and_the_score_asked_for() -> None:
    e = episode()
    e.sampled(turn(1, 1, STOP))
    again = given(e, *[6] * 17)
    assert again == Episode(KEY, 3, (Turn((1, 1, STOP)),), "length")
    done = e.answered(TurnAnswer(KEY, 1, score=Score(1.0, True)))
    assert isinstance(done, SampledAnswer) and done.ids == (1, 1, STOP)


def test_the_models_context_bounds_prompt_and_episode_together() -> None:
    e = episode(context=12)
    assert e.next_ask().max_new_tokens == 10
    assert e.sampled(turn(*[1] * 9)).over == "length"
    assert episode(context=2).next_ask().max_new_tokens == 1, "whoever is asked refuses it, and says why"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (TurnAnswer(KEY, 1, failed="rows.jsonl, row 3: it raised"), "rows.jsonl, row 3: it raised"),
        (TurnAnswer(KEY, 1), "answered with nothing"),
        (TurnAnswer(KEY, 1, given=(6, STOP)), "ends with the stop token 0"),
        (TurnAnswer(KEY, 1, given=(-1,)), "outside the vocabulary"),
        (TurnAnswer(KEY, 1, score=Score(float("inf"), False)), "reward is inf"),
    ],
)
def test_an_answer_that_cannot_be_used_loses_the_episode(answer: TurnAnswer, why: str) -> None:
    e = episode()
    e.sampled(turn(1, STOP))
    with pytest.raises(EpisodeLost, match=why):
        e.answered(answer)
