"""An evaluation's problems, and how answers to them are scored. Must not know versions, nodes or when anything is asked.

Evaluations score through `ScoreAnswers`, whatever is behind it, so that slow or hanging answers hold up neither the loop nor
training's own rewards.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from learner.evaluation.plan import EvalPlan
from learner.rewards.port import Answer
from learner.tasks.port import Prompt, Score, Task
from learner.tasks.prompting import decode_completion, encode_prompt
from p2p.errors import UsageError

ScoreAnswers = Callable[[Prompt, Sequence[Answer]], Awaitable[Sequence[Score]]]
"""Rewards of the answers to one prompt, in their order. Anything that it raises costs the evaluation this prompt."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation with its problems."""

    plan: EvalPlan
    problems: tuple[Prompt, ...]
    prompt_ids: tuple[tuple[int, ...], ...]
    """of each problem"""
    text: Callable[[Sequence[int]], str]
    """a completion's text"""
    score: ScoreAnswers


def make_evaluation(plan: EvalPlan, task: Task, tokenizer: Any, *, held_out: bool, score: ScoreAnswers) -> Evaluation:
    """The plan with the first problems of a task, each row of data once: with fewer prompts where there are no more. UsageError,
    which names the evaluation, when the task does not have them."""
    draw = task.held_out if held_out else task.prompt
    count = task.held_out_count if held_out else None
    try:
        drawn = [draw(i) for i in range(plan.prompts if not count else min(plan.prompts, count))]
        problems = tuple({prompt.where or prompt.index: prompt for prompt in drawn}.values())
        ids = tuple(encode_prompt(tokenizer, prompt, task.chat_format) for prompt in problems)
    except UsageError as error:
        raise UsageError(f"{plan.called}: {error}") from None

    def text(completion: Sequence[int]) -> str:
        return decode_completion(tokenizer, completion, task.stop)

    return Evaluation(replace(plan, prompts=len(problems)), problems, ids, text, score)
