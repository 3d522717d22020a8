"""Evaluations beside training, on a mock clock with a twin of the swarm: one version each, anew where it goes, bounded ends."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from learner.evaluation.plan import EvalPlan, Schedule
from learner.evaluation.problems import Evaluation, make_evaluation
from learner.evaluation.result import EvalOutcome
from learner.evaluation.runner import ATTEMPTS, END_S, IN_FLIGHT, NEWER_S, NOBODY_S, STALL_S, Evaluations
from learner.requests.port import Ask
from learner.rewards.group_scorer import PooledScorer
from learner.rewards.port import Answer
from learner.tasks.port import Prompt, Score
from learner.tasks.registry import make_task, open_task
from learner.tasks.settings import DataSource, TaskSettings
from p2p.errors import ShoalError, UsageError
from p2p.version import Version
from tests.support.harness import inline
from tests.support.request_twin import STOP, RequestTwin, one_version

LAST = 100


class Letters:
    """One character a token."""

    chat_template = None

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(chr(i) for i in ids if i != STOP)


def right(ask: Ask) -> tuple[int, ...]:
    """The right answer to a problem of the task "reverse"."""
    return (*reversed(ask.prompt_ids[:-1]), STOP)


def plan(name: str = "", **changes: Any) -> EvalPlan:
    values: dict[str, Any] = {
        "prompts": 12, "samples": 1, "every": 10, "at_start": True, "at_end": True, "temperature": 0.0, "top_p": 1.0,
        "max_new_tokens": 8, "stop_ids": (STOP,), "seed": 1,
    }  # fmt: skip
    return EvalPlan(name=name, **(values | changes))


def evaluation(name: str = "", score: Any = None, **changes: Any) -> Evaluation:
    task = make_task("reverse")
    score = score or PooledScorer(task, in_thread=inline).score_prompt
    return make_evaluation(plan(name, **changes), task, Letters(), held_out=True, score=score)


class Stand:
    """Evaluations of a run, and what they found."""

    def __init__(self, twin: RequestTwin, those: Sequence[Evaluation], done: int | None) -> None:
        self.twin, self.found = twin, list[EvalOutcome]()
        pairs = [(one, Schedule(one.plan, last=LAST, done=done)) for one in those]
        self.evaluations = Evaluations(pairs, twin, served=twin.served, write=self.found.append)

    async def until(self, what: Callable[[], bool], seconds: float = 60.0) -> None:
        with trio.fail_after(seconds):
            while not what():
                await trio.sleep(0.05)


@asynccontextmanager
async def stand(twin: RequestTwin, *those: Evaluation, done: int | None = None) -> AsyncIterator[Stand]:
    async with trio.open_nursery() as nursery:
        made = Stand(twin, those or [evaluation()], done)
        nursery.start_soon(made.evaluations.run)
        yield made
        nursery.cancel_scope.cancel()
    assert twin.active == 0, "nothing is left asked for"


def v(step: int) -> Version:
    return Version(1, step)


async def test_one_version_is_asked_for_and_scored(autojump_clock) -> None:
    twin = one_version(answer=right)
    async with stand(twin) as s:
        await trio.sleep(20)
        assert not twin.asked, "no node is there"
        twin.serve(v(0))
        await s.until(lambda: bool(s.found))
        [found] = s.found
        assert found.whole and (found.version, found.exact, found.reward, found.length) == (v(0), 1.0, 1.0, 7.0)
        assert len(twin.asked) == 12 and {ask.exact_version for ask in twin.asked} == {v(0)}
        assert {ask.request_class for ask in twin.asked} == {"evaluation"} and not s.evaluations.running()
        held_out = [make_task("reverse").held_out(i) for i in range(12)]
        assert {ask.prompt_ids for ask in twin.asked} == {tuple(map(ord, prompt.text)) for prompt in held_out}
        for step in range(1, 31):
            twin.serve(v(step))
            await trio.sleep(3)
        assert [found.version.step for found in s.found] == [0, 10, 20, 30]


async def test_samples_of_a_prompt_and_several_evaluations(autojump_clock) -> None:
    def sometimes(ask: Ask) -> tuple[int, ...]:
        return right(ask) if ask.temperature == 0 or ask.seed % 2 else (1, 1)

    twin = one_version(v(0), answer=sometimes)
    async with stand(twin, evaluation(), evaluation("often", samples=8, temperature=1.0)) as s:
        await s.until(lambda: len(s.found) == 2)
        first, often = sorted(s.found, key=lambda found: found.plan.name)
        assert first.exact == 1.0 and first.passes == {}
        assert 0.2 < often.exact < 0.8 and often.exact < often.passes[2] < often.passes[8]
        assert often.clipped == pytest.approx(1 - often.exact)
        assert len(twin.asked) == 12 + 96 and {ask.temperature for ask in twin.asked} == {0.0, 1.0}


async def test_a_version_that_goes_is_begun_anew_with_the_next(autojump_clock, caplog) -> None:
    caplog.set_level("INFO", "shoal.evaluation")
    twin = one_version(v(0), places=2, answer=right)
    async with stand(twin) as s:
        await trio.sleep(2)
        assert s.evaluations.running() == [{"name": "", "version": "1.0", "sequences": 4, "of": 12}]
        twin.serve(v(1))
        await s.until(lambda: bool(s.found))
        assert s.found[0].whole and s.found[0].version == v(1)
        assert "begins anew with version 1.1: of 1.0 it was cut (no node serves version 1.0)" in caplog.text
        await trio.sleep(30)
        assert len(s.found) == 1, "the one of the start is done"


async def test_what_is_never_served_for_long_enough_is_told_in_part(autojump_clock, caplog) -> None:
    twin = one_version(v(0), places=2, answer=right)
    async with stand(twin) as s:
        for step in range(9):  # each for three of the twelve answers, at best
            twin.serve(v(step))
            await trio.sleep(3)
        [found] = s.found
        assert not found.whole and 1 <= found.prompts <= 8
        assert found.metrics()["eval/finished"] == found.prompts / 12
        assert "answers that end soon count for more" in caplog.text
        assert len({ask.exact_version for ask in twin.asked}) == ATTEMPTS, "no more than so many versions are tried"


async def test_nothing_found_is_said_and_not_written(autojump_clock, caplog) -> None:
    def none(ask: Ask) -> tuple[int, ...]:
        raise ShoalError("every node declined it: the prompt is too long")

    async with stand(one_version(v(0), answer=none)) as s:
        await trio.sleep(2 * NEWER_S)
        assert s.found == []
        assert "the prompt is too long (said once)" in caplog.text and "found nothing" in caplog.text


async def test_no_more_is_asked_for_than_is_taken(autojump_clock) -> None:
    twin = one_version(v(0), waiting=5, places=2, answer=right)
    async with stand(twin, evaluation(prompts=600)) as s:
        await s.until(lambda: bool(s.found), 3600)
        assert s.found[0].whole and twin.refused and twin.most_active == 5
    twin = one_version(v(0), waiting=10_000, places=2, answer=right)
    async with stand(twin, evaluation(prompts=600)):
        await trio.sleep(1)
        assert twin.most_active == IN_FLIGHT


async def test_a_version_that_nodes_may_yet_serve_is_waited_for(autojump_clock) -> None:
    twin = one_version(v(0), places=2, answer=right)
    async with stand(twin) as s:
        await trio.sleep(1)
        twin.coming.add(v(0))
        twin.serve(None)  # the last node of that version went
        await trio.sleep(30)
        assert not s.found
        twin.serve(v(0))
        await s.until(lambda: bool(s.found))
        assert s.found[0].whole and s.found[0].version == v(0)


async def test_a_swarm_that_makes_no_token_is_given_up(autojump_clock, caplog) -> None:
    twin = one_version(v(0), answer=right)
    twin.pause_s = math.inf
    async with stand(twin) as s:
        await trio.sleep(STALL_S + NEWER_S + 10)
        assert s.found == [] and not s.evaluations.running() and twin.active == 0
        assert f"no token came for {STALL_S:.0f} s" in caplog.text
        twin.pause_s = 0.1
        twin.serve(v(11))
        await s.until(lambda: bool(s.found))
        assert s.found[0].version == v(11), "the next one is not held up"


@pytest.mark.parametrize("reward", ["raises", "hangs", "too few"])
async def test_a_reward_that_fails_costs_its_prompt(reward: str, autojump_clock, caplog) -> None:
    honest = PooledScorer(make_task("reverse"), in_thread=inline).score_prompt

    async def score(prompt: Prompt, answers: Sequence[Answer]) -> Sequence[Score]:
        if prompt.index == 3:
            if reward == "raises":
                raise ZeroDivisionError("of the user's")
            if reward == "too few":
                return []
            await trio.sleep_forever()
        return await honest(prompt, answers)

    async with stand(one_version(v(0), answer=right), evaluation(score=score)) as s:
        with trio.move_on_after(2 * STALL_S + NEWER_S):
            await s.until(lambda: bool(s.found), 10_000)
        assert s.found[0].prompts == 11 and s.found[0].exact == 1.0
        assert "prompt 3 is not scored" in caplog.text or "no token came" in caplog.text


# --- resumed, and at the end -----------------------------------------------------------------------------------------


async def test_a_resumed_run_does_not_evaluate_twice(autojump_clock) -> None:
    twin = one_version(v(20), answer=right)
    async with stand(twin, done=20) as s:
        await trio.sleep(30)
        assert not s.found
        twin.serve(v(31))
        await s.until(lambda: bool(s.found))


async def test_the_end_waits_for_the_last_version(autojump_clock) -> None:
    twin = one_version(v(98), places=2, answer=right)
    async with stand(twin, done=90) as s:
        await trio.sleep(5)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(s.evaluations.settled, lambda: True)
            await trio.sleep(40)
            assert nursery.child_tasks and not s.found
            twin.serve(v(LAST))
        assert [found.version.step for found in s.found] == [LAST]
        with trio.fail_after(1):
            await s.evaluations.settled(lambda: False)


async def test_one_that_runs_when_training_ends_gives_way_to_the_last(autojump_clock) -> None:
    twin = one_version(v(90), places=1, answer=right)
    async with stand(twin, done=80) as s:
        await trio.sleep(3)
        assert s.evaluations.running()
        twin.serve(v(LAST))
        await s.evaluations.settled(lambda: True)
        assert [found.version.step for found in s.found] == [LAST]


async def test_the_end_does_not_wait_for_nobody(autojump_clock, caplog) -> None:
    async with stand(one_version(None)) as s:
        with trio.fail_after(NOBODY_S + 2):
            await s.evaluations.settled(lambda: False)
        assert "no node serves the last version: the run ends without the evaluation of it" in caplog.text


async def test_the_end_is_bounded(autojump_clock, caplog) -> None:
    twin = one_version(v(LAST), answer=right)
    twin.pause_s = math.inf
    async with stand(twin) as s:
        with trio.fail_after(END_S + 2):
            await s.evaluations.settled(lambda: True)


async def test_an_evaluation_that_nobody_wants_at_the_end_holds_nothing_up(autojump_clock) -> None:
    async with stand(one_version(None), evaluation(at_end=False)) as s:
        with trio.fail_after(1):
            await s.evaluations.settled(lambda: True)


def test_problems_that_are_not_to_be_had_are_said_with_the_evaluation() -> None:
    class Empty(Letters):
        def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
            raise UsageError("no chat template")

    task = make_task("reverse")
    score = PooledScorer(task, in_thread=inline).score_prompt
    with pytest.raises(UsageError, match="evaluation 'mine': no chat template"):
        make_evaluation(plan("mine"), task, Empty(), held_out=True, score=score)


@pytest.mark.parametrize("held_out", [True, False])
def test_each_row_of_data_is_asked_once_and_cut_at_the_tasks_stop(held_out: bool, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"p{i}", "answer": f"a{i}"}) + "\n" for i in range(8)))
    task = open_task(TaskSettings(data=[DataSource(path=str(file))], chat=False, stop=["##"], held_out=0.5))
    assert task.held_out_count is not None
    prompts = task.held_out_count if held_out else 8 - task.held_out_count
    score = PooledScorer(task, in_thread=inline).score_prompt
    made = make_evaluation(plan("mine", prompts=64), task, Letters(), held_out=held_out, score=score)
    assert made.plan.prompts == len(made.problems) == len({p.where for p in made.problems}) == prompts
    assert made.text([ord(c) for c in "a1##b"]) == "a1"
