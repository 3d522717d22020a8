"""Evaluations' pure core: when they are due, what they ask for, pass@k and means with their errors, what is told of a part."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest

from learner.evaluation.plan import EvalPlan, Schedule, wanted
from learner.evaluation.result import EvalTally, SampledAnswer, better, ks, pass_at_k, standard_error
from learner.evaluation.settings import EvalSection, eval_plan
from learner.tasks.port import Score
from p2p.version import Version

V = Version(1, 5)


def plan(**changes: object) -> EvalPlan:
    values = {
        "name": "gsm", "prompts": 3, "samples": 1, "every": 10, "at_start": True, "at_end": True, "temperature": 0.0,
        "top_p": 1.0, "max_new_tokens": 16, "stop_ids": (0,), "seed": 7,
    }  # fmt: skip
    return EvalPlan(**(values | changes))  # type: ignore[arg-type]


# --- when ------------------------------------------------------------------------------------------------------------


def steps_evaluated(schedule: Schedule, steps: range) -> list[int]:
    done = []
    for step in steps:
        if schedule.due(step):
            done.append(step)
            schedule.took(step)
    return done


def test_at_the_start_every_so_many_steps_and_at_the_end() -> None:
    assert steps_evaluated(Schedule(plan(), last=25, done=None), range(26)) == [0, 10, 20, 25]
    assert steps_evaluated(Schedule(plan(every=0), last=25, done=None), range(26)) == [0, 25]
    assert steps_evaluated(Schedule(plan(at_start=False), last=25, done=None), range(26)) == [10, 20, 25]
    assert steps_evaluated(Schedule(plan(at_end=False), last=25, done=None), range(26)) == [0, 10, 20]
    assert steps_evaluated(Schedule(plan(every=0, at_start=False, at_end=False), last=25, done=None), range(26)) == []
    assert steps_evaluated(Schedule(plan(every=5), last=25, done=None), range(26)) == [0, 5, 10, 15, 20, 25], "the end only once"


def test_where_not_every_step_is_served_the_next_version_is_taken() -> None:
    assert steps_evaluated(Schedule(plan(), last=40, done=None), range(0, 44, 4)) == [0, 12, 20, 32, 40]


def test_what_comes_due_while_one_runs_is_one_evaluation_of_the_newest() -> None:
    schedule = Schedule(plan(), last=100, done=None)
    schedule.took(0)
    assert schedule.due(11)
    schedule.took(11)  # it took until step 47
    assert schedule.due(47)
    schedule.took(47)
    assert not schedule.due(49) and schedule.due(50)


def test_a_resumed_run_goes_on_with_its_schedule() -> None:
    assert steps_evaluated(Schedule(plan(), last=40, done=20), range(20, 41)) == [30, 40]
    assert steps_evaluated(Schedule(plan(), last=40, done=20), range(35, 41)) == [35, 40]
    assert steps_evaluated(Schedule(plan(), last=40, done=40), range(40, 41)) == []
    assert Schedule(plan(), last=40, done=40).ended and not Schedule(plan(), last=40, done=39).ended
    assert Schedule(plan(at_end=False), last=40, done=None).ended


# --- what ------------------------------------------------------------------------------------------------------------


def test_every_sequence_of_every_prompt_is_asked_for_at_the_one_version() -> None:
    those = list(wanted(plan(samples=2, prompts=2, temperature=0.7), [(1, 2), (3,)], V))
    assert [(one.prompt, one.sample, one.ask.prompt_ids) for one in those] == [
        (0, 0, (1, 2)), (0, 1, (1, 2)), (1, 0, (3,)), (1, 1, (3,)),
    ]  # fmt: skip
    ask = those[0].ask
    assert (ask.request_class, ask.exact_version, ask.temperature, ask.stop_ids) == ("evaluation", V, 0.7, (0,))
    assert ask.max_new_tokens == 16
    seeds = [one.ask.seed for one in those]
    assert len(set(seeds)) == 4 and all(0 <= seed < 1 << 63 for seed in seeds)
    again = [one.ask.seed for one in wanted(plan(samples=2, prompts=2), [(1, 2), (3,)], Version(2, 9))]
    assert again == seeds, "two versions are compared with the same draws"
    assert seeds != [one.ask.seed for one in wanted(plan(samples=2, prompts=2, seed=8), [(1, 2), (3,)], V)]


def test_a_table_of_the_configuration_is_a_plan() -> None:
    section = EvalSection(name="a", samples=4, temperature=1.0, prompts=9)
    made = eval_plan(section, max_new_tokens=64, stop_ids=(2,), seed=1)
    assert (made.name, made.samples, made.prompts, made.max_new_tokens, made.stop_ids) == ("a", 4, 9, 64, (2,))
    longer = section.model_copy(update={"max_new_tokens": 512})
    assert eval_plan(longer, max_new_tokens=64, stop_ids=(2,), seed=1).max_new_tokens == 512


# --- what came back --------------------------------------------------------------------------------------------------


def test_pass_at_k_is_the_share_of_subsets_with_a_right_one() -> None:
    for n in range(1, 8):
        for right in range(n + 1):
            marks = [i < right for i in range(n)]
            for k in range(1, n + 1):
                subsets = list(itertools.combinations(marks, k))
                expected = Fraction(sum(any(s) for s in subsets), len(subsets))
                assert math.isclose(pass_at_k(n, right, k), expected, abs_tol=1e-12), (n, right, k)
    assert pass_at_k(100_000, 1, 1000) == pytest.approx(0.01), "no factorial overflows"
    for wrong in ((4, 1, 0), (4, 1, 5), (4, 5, 1), (4, -1, 1)):
        with pytest.raises(ValueError, match="pass@"):
            pass_at_k(*wrong)


def test_which_k_are_told() -> None:
    assert [ks(n) for n in (1, 2, 3, 8, 12)] == [[], [2], [2, 3], [2, 4, 8], [2, 4, 8, 12]]


def answer(length: int, finish: str = "stop") -> SampledAnswer:
    return SampledAnswer(tuple(range(length)), finish)


def filled(rewards: list[list[tuple[float, bool]]], **changes: object) -> EvalTally:
    """A tally whose prompts got these (reward, exact), with answers of 3 tokens."""
    tally = EvalTally(plan(prompts=len(rewards), samples=len(rewards[0]), **changes), V)
    for prompt, scores in enumerate(rewards):
        for sample in range(len(scores)):
            whole = tally.answered(prompt, sample, answer(3))
            assert bool(whole) == (sample == len(scores) - 1)
        tally.scored(prompt, [Score(reward, exact) for reward, exact in scores])
    return tally


def test_means_and_errors_are_over_prompts() -> None:
    found = filled([[(1.0, True), (0.0, False)], [(2.0, True), (2.0, True)]], temperature=1.0).result(4.0)
    assert found is not None and found.whole
    assert (found.exact, found.reward, found.length, found.clipped, found.seconds) == (0.75, 1.25, 3.0, 0.0, 4.0)
    assert found.exact_error == pytest.approx(0.25), "of 0.5 and 1.0"
    assert found.reward_error == pytest.approx(0.75)
    assert found.metrics() == {
        "eval/gsm/exact/mean": 0.75, "eval/gsm/exact/stderr": pytest.approx(0.25), "eval/gsm/reward/mean": 1.25,
        "eval/gsm/reward/stderr": pytest.approx(0.75), "eval/gsm/completions/mean_length": 3.0,
        "eval/gsm/completions/clipped_ratio": 0.0, "eval/gsm/finished": 1.0, "eval/gsm/unscored": 0.0,
            "eval/gsm/seconds": 4.0, "eval/gsm/step": 5.0,
        "eval/gsm/avg@2": 0.75, "eval/gsm/pass@2": 1.0,
    }  # fmt: skip
    assert "exact 0.750 +- 0.250" in found.sentence() and "pass@2 1.000" in found.sentence() and "'gsm'" in found.sentence()


def test_the_default_evaluation_keeps_its_names() -> None:
    found = filled([[(0.5, False)], [(1.0, True)]], name="").result(1.0)
    assert found is not None
    assert {"eval/exact/mean", "eval/reward/mean", "eval/completions/mean_length"} < found.metrics().keys()
    assert not any("pass@" in key or "avg@" in key for key in found.metrics()), "one sample of each"


def test_one_prompt_has_no_error() -> None:
    found = filled([[(1.0, True)]]).result(1.0)
    assert found is not None and "eval/gsm/exact/stderr" not in found.metrics()
    assert standard_error([1.0]) is None and standard_error([]) is None


def test_a_prompt_counts_when_all_its_samples_are_scored() -> None:
    tally = EvalTally(plan(prompts=3, samples=2, temperature=1.0), V)
    assert tally.result(1.0) is None
    assert tally.answered(0, 1, answer(4, "length")) == []
    assert tally.answered(0, 1, answer(9)) == [], "a second answer to one request is none"
    assert tally.answered(0, 0, answer(2)) == [answer(2), answer(4, "length")], "in order of the samples"
    assert tally.result(1.0) is None and tally.finished == 0
    with pytest.raises(ValueError, match="3 scores"):
        tally.scored(0, [Score(1.0, True)] * 3)
    tally.scored(0, [Score(1.0, True), Score(0.0, False)])
    tally.answered(1, 0, answer(1))
    found = tally.result(2.0)
    assert found is not None and not found.whole and found.prompts == tally.finished == 1
    assert (found.length, found.clipped) == (3.0, 0.5)
    assert found.metrics()["eval/gsm/finished"] == pytest.approx(1 / 3) and "1 of 3 prompts" in found.sentence()


def test_of_two_parts_the_one_with_more_prompts_is_told() -> None:
    one, two = filled([[(1.0, True)]]).result(1.0), filled([[(1.0, True)]] * 2).result(1.0)
    assert better(one, two) is better(two, one) is two
    assert better(None, one) is better(one, None) is one and better(None, None) is None
    later = filled([[(0.0, False)]]).result(2.0)
    assert better(one, later) is later
