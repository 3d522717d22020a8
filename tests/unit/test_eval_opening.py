"""Evaluations made ready, with real processes of environments: shared by those of a task, refused where they cannot be."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from learner.environments.settings import EnvironmentSection
from learner.evaluation.opening import EvalOpener, EvalWish
from learner.evaluation.plan import EvalPlan
from learner.evaluation.result import SampledAnswer
from learner.requests.port import Ask
from learner.rewards.settings import RewardPart, RewardSettings
from learner.tasks.guess_number import SYMBOLS
from learner.tasks.port import EnvironmentSource, Task
from learner.tasks.registry import make_task, open_task
from learner.tasks.settings import DataSource, TaskSettings
from netem.demo.tiny_model import char_tokenizer
from p2p.errors import UsageError, first_of
from p2p.version import Version

TOKENIZER = char_tokenizer("<>?")
EOS = TOKENIZER.eos_token_id
PATIENCE_S = 120.0


def wish(task: Task, name: str = "", **changes: Any) -> EvalWish:
    plan = EvalPlan(
        name=name, prompts=4, samples=1, every=0, at_start=True, at_end=True, temperature=0.0, top_p=1.0, max_new_tokens=16,
        stop_ids=(EOS,), seed=1,
    )  # fmt: skip
    values: dict[str, Any] = {"task_seed": 0, "rewards": RewardSettings(), "allow_unconfined": False, "held_out": True}
    return EvalWish(plan=plan, task=task, **(values | changes))


def opener(**settings: Any) -> EvalOpener:
    environment = EnvironmentSection(max_turns=5, **settings)
    return EvalOpener(TOKENIZER, 64, environment, stop_ids=(EOS,), in_thread=trio.to_thread.run_sync)


def run(body: Callable[[], Awaitable[None]]) -> None:
    trio.run(body)


def test_evaluations_of_one_task_share_its_processes_and_play() -> None:
    task = make_task("guess_number", 3)

    async def body() -> None:
        ask = Ask(
            request_class="evaluation", prompt_ids=(1,), max_new_tokens=16, stop_ids=(EOS,), seed=1, exact_version=Version(1, 0)
        )
        async with opener().opened([wish(task), wish(task, "own")]) as made:
            for one in made:
                for number, problem in enumerate(one.problems):
                    guesses = iter([*[s for s in SYMBOLS[:16] if s != SYMBOLS[problem.entry["secret"]]][:2],
                                    SYMBOLS[problem.entry["secret"]]])  # fmt: skip

                    async def sample(_: Ask, guesses: Any = guesses) -> SampledAnswer:
                        return SampledAnswer((*TOKENIZER.encode(next(guesses), add_special_tokens=False), EOS), "stop")

                    assert one.player is not None
                    with trio.fail_after(PATIENCE_S):
                        played = await one.player.play(number, ask, sample, lambda: None)
                    assert played is not None and played.score is not None
                    assert (played.score.exact, played.score.reward) == (True, 0.9)

    run(body)
    assert [task.held_out(i).entry for i in range(4)] == [make_task("guess_number", 3).held_out(i).entry for i in range(4)]


def test_turns_of_an_evaluation_are_read_up_to_the_stop_string() -> None:
    task = make_task("guess_number", 3)
    task.stop = ("??",)

    async def body() -> None:
        ask = Ask(
            request_class="evaluation", prompt_ids=(1,), max_new_tokens=16, stop_ids=(EOS,), seed=1, exact_version=Version(1, 0)
        )
        async with opener().opened([wish(task)]) as [made]:
            right = SYMBOLS[made.problems[0].entry["secret"]]

            async def sample(_: Ask) -> SampledAnswer:
                return SampledAnswer(tuple(TOKENIZER.encode(f"{right}??", add_special_tokens=False)), "stop")

            assert made.player is not None
            with trio.fail_after(PATIENCE_S):
                played = await made.player.play(0, ask, sample, lambda: None)
            assert played is not None and played.score is not None and played.score.exact, "as in training: without the string"

    run(body)


def rows(tmp_path: Path, held_out: float) -> Task:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(8)))
    task = open_task(TaskSettings(data=[DataSource(path=str(file))], chat=False, held_out=held_out), own_score=False)
    task.environment = EnvironmentSource("learner.environments.guess_number:GuessNumber", {"guesses": 2})
    return task


def test_the_default_evaluation_is_left_out_where_nothing_is_held_out(tmp_path: Path, caplog) -> None:
    task = rows(tmp_path, 0.0)

    async def body() -> None:
        async with opener().opened([wish(task, optional=True)]) as made:
            assert made == []

    run(body)
    assert "no row is held out" in caplog.text and "the run goes on without it" in caplog.text

    async def table() -> None:
        async with opener().opened([wish(task, "own")]):
            raise AssertionError("it must not run")

    with pytest.raises(BaseException) as caught:
        run(table)
    assert str(first_of(caught.value)).startswith("evaluation 'own': task.data")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"rewards": RewardSettings(reward=[RewardPart(function="exact")])}, "rewards its episodes itself"),
        ({"source": EnvironmentSource("nowhere:Game")}, "no module 'nowhere' is installed"),
    ],
)
def test_what_cannot_be_is_one_line(change: dict[str, Any], why: str) -> None:
    task = make_task("guess_number")
    task.environment = change.pop("source", task.environment)

    async def body() -> None:
        async with opener().opened([wish(task, "own", **change)]):
            raise AssertionError("it must not run")

    with pytest.raises(BaseException) as caught:
        run(body)
    error = first_of(caught.value)
    assert isinstance(error, UsageError) and why in str(error) and "\n" not in str(error)
