"""An evaluation's problems, and how answers to them are scored. Must not know versions, nodes or when anything is asked.

Evaluations score through `ScoreAnswers`, whatever is behind it, so that slow or hanging answers hold up neither the loop nor
training's own rewards.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from learner.evaluation.plan import EvalPlan
from learner.rewards.scoring import Scorer
from learner.tasks.port import Prompt, Score, Task
from learner.tasks.prompting import decode_completion, encode_prompt
from p2p.errors import UsageError

ScoreAnswers = Callable[[Prompt, Sequence[str]], Awaitable[Sequence[Score]]]
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
    """The plan with the first problems of a task. UsageError, which names the evaluation, when the task does not have them."""
    draw = task.held_out if held_out else task.prompt
    try:
        problems = tuple(draw(i) for i in range(plan.prompts))
        ids = tuple(encode_prompt(tokenizer, prompt) for prompt in problems)
    except UsageError as error:
        raise UsageError(f"{plan.called}: {error}") from None
    return Evaluation(plan, problems, ids, lambda completion: decode_completion(tokenizer, completion), score)


def score_in_thread(scorer: Scorer, in_thread: Callable[..., Awaitable[Any]]) -> ScoreAnswers:
    """Scores one answer after the other in a worker thread."""

    async def score(prompt: Prompt, answers: Sequence[str]) -> Sequence[Score]:
        return [await in_thread(scorer.score, prompt, answer) for answer in answers]

    return score
