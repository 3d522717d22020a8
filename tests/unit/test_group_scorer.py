"""Reward functions of a person's, in real processes: both signatures, what they may return, and what their mistakes cost."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import Any

import pytest

from learner.rewards.group_scorer import PooledScorer
from learner.rewards.port import Answer, GroupUnscored, NoReward
from learner.rewards.settings import RewardPart, RewardSettings
from learner.tasks.port import Prompt, Score, Task
from p2p.errors import ShoalError, UsageError

FUNCTIONS = '''
import math, time

def by_trl(prompts, completions, answer, completion_ids, log_extra=None, trainer_state=None):
    assert prompts == ["2+2="] * len(completions) and len(answer) == len(completion_ids) == len(completions)
    log_extra("seen", completions)
    return [float(c == a) for c, a in zip(completions, answer)]

def lengths(completion_ids, **kwargs):
    return [len(ids) for ids in completion_ids]

def one(completion, prompt, answer, bonus=0.0):
    return (completion == answer) + bonus

async def waits(completions, **columns):
    import asyncio
    await asyncio.sleep(0)
    return [2.5 for c in completions]

async def waits_for_one(completion):
    return -3

def chat(prompts, completions, **columns):
    assert prompts[0][-1] == {"role": "user", "content": "2+2="}
    return [c[0]["content"] == "4" and c[0]["role"] == "assistant" for c in completions]

def sometimes(completion, **columns):
    return None if completion == "none" else 1.0

def does(completion, **columns):
    if completion == "raise":
        raise ValueError("oh\\nno")
    if completion == "hang":
        time.sleep(1000)
    if completion == "exit":
        import os
        os._exit(3)
    return {"nan": math.nan, "inf": math.inf, "text": "one", "none": None}.get(completion, 0.5)

def short(completions, **columns):
    return [1.0]

def no_list(completions, **columns):
    return 1.0

def wants(completion, colour):
    return 1.0

def numbers(completions, **columns):
    return [float(c) for c in completions]

def better_than_others(completions, **columns):
    if len(completions) < 2:
        raise ValueError("too few")
    return [float(c) - float(min(completions)) for c in completions]

def of_the_trainer(completions, prompt):
    return [1.0 for _ in completions]

def neither(text):
    return 1.0

def both(completion, completions):
    return 1.0

not_callable = 3
'''


class Rows(Task):
    """Stands for rows of data: every prompt is the same one, but only the first has the column "colour"."""

    name = "rows"

    def __init__(self, entry: Any, *, chat: bool = False) -> None:
        self.entry, self.chat = entry, chat

    def prompt(self, index: int) -> Prompt:
        entry = self.entry
        if isinstance(entry, dict) and index:
            entry = {name: value for name, value in entry.items() if name != "colour"}
        return Prompt(index, "2+2=", entry, self.chat, where=f"train.jsonl, row {index + 1}")

    def held_out(self, index: int) -> Prompt:
        return Prompt(index, "2+2=", self.entry, self.chat, held_out=True)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "rewards.py"
    path.write_text(textwrap.dedent(FUNCTIONS))
    return str(path)


def scorer_of(*functions: str | dict[str, Any], entry: Any = None, chat: bool = False, **settings: Any) -> PooledScorer:
    parts = [RewardPart.model_validate({"function": f} if isinstance(f, str) else f) for f in functions]
    task = Rows({"answer": "4"} if entry is None else entry, chat=chat)
    return PooledScorer(task, RewardSettings(reward=parts, **settings), allow_unconfined=True)


def answers(*texts: str, node: str = "a") -> list[Answer]:
    return [Answer(text, node, tuple(range(len(text)))) for text in texts]


async def rewards(scorer: PooledScorer, *texts: str) -> list[float]:
    return [score.reward for score in await scorer.score(0, answers(*texts))]


async def test_functions_are_called_as_trl_does_or_for_one_completion(file: str) -> None:
    with scorer_of(f"{file}:by_trl") as scorer:
        assert await scorer.score(0, answers("4", "5")) == [Score(1.0, True), Score(0.0, False)]
    with scorer_of({"function": f"{file}:one", "options": {"bonus": 0.25}}) as scorer:
        assert await rewards(scorer, "4", "5") == [1.25, 0.25]
        (score,) = await scorer.score_prompt(Rows({"answer": "4"}).held_out(0), answers("4"))
        assert score.reward == 1.25
        with pytest.raises(GroupUnscored):
            await scorer.score_prompt(Rows({}).held_out(0), answers("4"))
        assert not scorer.lost_in_a_row, "no group of training's"
    with scorer_of(f"{file}:chat", chat=True) as scorer:
        assert await rewards(scorer, "4", "5") == [1.0, 0.0]


async def test_async_functions_are_awaited_and_any_finite_number_is_a_reward(file: str) -> None:
    several = [f"{file}:waits", f"{file}:waits_for_one", {"function": f"{file}:lengths", "weight": 10, "name": "long"}]
    with scorer_of(*several) as scorer:
        (score,) = await scorer.score(0, answers("abc"))
    assert score.reward == 2.5 - 3 + 30 and score.parts == {"waits": 2.5, "waits_for_one": -3.0, "long": 3.0}


async def test_a_function_that_returns_none_does_not_apply(file: str) -> None:
    with scorer_of(f"{file}:sometimes", "exact") as scorer:
        first, second = await scorer.score(0, answers("none", "4"))
        assert (first.reward, first.parts, second.reward) == (0.0, {"exact": 0.0}, 2.0)
    with scorer_of(f"{file}:sometimes") as scorer:
        with pytest.raises(GroupUnscored, match=r"train.jsonl, row 1: .*about answer 1: all returned None"):
            await scorer.score(0, answers("x", "none"))


@pytest.mark.parametrize(
    ("function", "text", "why"),
    [
        ("does", "raise", r"reward function does: it raised ValueError: oh no"), ("does", "nan", "nan, which is no reward"),
        ("does", "inf", "inf, which is no reward"), ("does", "text", "'one', which is no number"),
        ("does", "hang", r"did not answer within 0.5 s"), ("does", "exit", r"closed the socket \(status 3\)"),
        ("does", "none", "all returned None"), ("short", "x", r"1 values for 2 completions"),
        ("no_list", "x", "1.0, not a list with a number for each completion"),
        ("wants", "x", r"needs 'colour', which the row does not have \(it has: answer, "),
    ],
)  # fmt: skip
async def test_a_functions_mistake_costs_its_group_and_names_the_prompt(file: str, function: str, text: str, why: str) -> None:
    with scorer_of(f"{file}:{function}", reward_s=0.5, entry={"answer": "4", "colour": "red"}) as scorer:
        with pytest.raises(GroupUnscored, match=rf"^train\.jsonl, row 8: .*{why}"):
            await scorer.score(7, answers("x", text))
        if function == "does":  # and the next group is scored
            assert await rewards(scorer, "x", "y") == [0.5, 0.5] and scorer.lost_in_a_row == 0


async def test_groups_lost_in_a_row_stop_the_run(file: str) -> None:
    with scorer_of(f"{file}:does", reward_failures=3) as scorer:
        for _ in range(2):
            with pytest.raises(GroupUnscored):
                await scorer.score(0, answers("raise"))
        assert await rewards(scorer, "x") == [0.5]
        for _ in range(2):
            with pytest.raises(GroupUnscored):
                await scorer.score(0, answers("raise"))
        stops = r"^3 groups in a row could not be scored \(task\.reward_failures = 3\); the last: train.jsonl, row 1: "
        with pytest.raises(ShoalError, match=stops) as stopped:
            await scorer.score(0, answers("raise"))
        assert not isinstance(stopped.value, GroupUnscored)


async def test_an_answer_on_which_a_function_fails_is_left_out_and_its_maker_named(file: str, caplog) -> None:
    """One stranger's answers, on which it raised, cost every group that had one, and sixteen of them the run."""
    group = [*answers("x", "y"), *answers("raise", node="stranger")]
    with scorer_of(f"{file}:does", reward_failures=3) as scorer:
        for _ in range(10):
            first, second, third = await scorer.score(0, group)
            assert first == second == Score(0.5, False)
            assert isinstance(third, NoReward) and "it raised ValueError: oh no" in third.why
        assert "answers of 3 are left out of their group" in caplog.text and "1 of node stranger" in caplog.text
        assert scorer.lost.blame() == "10 of node stranger"
        with pytest.raises(GroupUnscored):  # one that is left is better than nobody
            await scorer.score(0, group[1:])
        assert not scorer.lost_in_a_row, "the function works"
        with pytest.raises(GroupUnscored):
            await scorer.score_prompt(Rows({"answer": "4"}).held_out(0), group)


async def test_of_a_call_with_all_answers_the_maker_on_whose_answers_it_fails_is_left_out(file: str) -> None:
    group = [*answers("1", "2", node="a"), *answers("no", "4", node="stranger"), *answers("3", node="c")]
    with scorer_of(f"{file}:numbers") as scorer:
        scores = await scorer.score(0, group)
        assert [s.reward if isinstance(s, Score) else None for s in scores] == [1.0, 2.0, None, None, 3.0]
        assert [s.reward for s in await scorer.score(0, answers("1", "2"))] == [1.0, 2.0]


async def test_a_function_that_needs_several_answers_is_asked_about_those_of_proven_nodes(file: str) -> None:
    group = [*answers("1", node="a"), *answers("no", node="stranger"), *answers("3", node="c")]
    with scorer_of(f"{file}:better_than_others", reward_failures=2) as scorer:
        for _ in range(2):
            scorer.lost.proven = lambda: ()
            with pytest.raises(GroupUnscored):
                await scorer.score(0, group)
        scorer.lost.proven = lambda: {"a", "c"}
        scores = await scorer.score(0, group)
        assert [s.reward if isinstance(s, Score) else None for s in scores] == [0.0, None, 2.0]


async def test_a_function_that_fails_on_everybody_stops_the_run_and_strangers_do_not(file: str) -> None:
    with scorer_of(f"{file}:does", reward_failures=3) as scorer:
        scorer.lost.proven = lambda: {"good"}
        for _ in range(10):
            with pytest.raises(GroupUnscored):
                await scorer.score(0, answers("raise", "raise", node="stranger"))
        for _ in range(2):
            with pytest.raises(GroupUnscored):
                await scorer.score(0, [*answers("raise", node="good"), *answers("raise", node="stranger")])
        stops = "^3 groups in a row .*answers that failed: 22 of node stranger, 3 of node good"
        with pytest.raises(ShoalError, match=stops) as stopped:
            await scorer.score(0, answers("raise", node="good"))
        assert not isinstance(stopped.value, GroupUnscored)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("{file}:missing", r"has no function 'missing' \(it has: by_trl, lengths"), ("{file}:not_callable", "has no function"),
        ("{file}:neither", r"its parameters are text"), ("{file}:both", "both completion and completions"),
        ("nowhere.py:f", "no such file: .*nowhere.py"), ("no_such_module:f", "cannot be imported: ModuleNotFoundError"),
        ("exakt", "unknown reward function 'exakt'; did you mean 'exact'"), ("regex", "needs one of the options"),
        ("judge", "judge with the options none"),
        ("{file}:wants", r"rewards\.py:wants needs the column 'colour', which task rows does not have \(it has: answer\)"),
        ("regex?pattern_column=pattern", r"regex needs the column 'pattern', which task rows does not have"),
        ("boxed?column=colour", r"boxed needs the column 'colour', which task rows does not have"),
        ("{file}:of_the_trainer", r"has the parameter 'prompt': who takes all completions of a group is given columns and comp"),
    ],
)  # fmt: skip
def test_a_function_that_cannot_be_had_is_said_at_the_start(file: str, function: str, why: str) -> None:
    name, _, option = function.format(file=file).partition("?")
    part = {"function": name, "options": dict([option.split("=")]) if option else {}}
    with pytest.raises(UsageError, match=why), scorer_of(part):
        pass


async def test_a_tasks_own_score_needs_no_process_and_may_be_any_number() -> None:
    class Ten(Rows):
        def score(self, prompt: Prompt, completion: str) -> Score:
            return Score(-10.0 if completion == "4" else 10.0, False)

    with PooledScorer(Ten("4")) as scorer:
        assert [s.reward for s in await scorer.score(0, answers("4", "5"))] == [-10.0, 10.0]


@pytest.mark.parametrize("made", [1.0, None, Score(math.nan, False), Score(math.inf, True)])
async def test_a_tasks_score_that_is_none_is_worth_nothing(made: Any) -> None:
    class Wrong(Rows):
        def score(self, prompt: Prompt, completion: str) -> Score:
            return made

    with PooledScorer(Wrong("4")) as scorer:
        assert await scorer.score(0, answers("4")) == [Score(0.0, False)]
