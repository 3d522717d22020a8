"""An evaluation's problems, and how answers to them are scored. Must not know versions, nodes or when anything is asked.

Evaluations score through `ScoreAnswers`, whatever is behind it, so that slow or hanging answers hold up neither the loop nor
training's own rewards.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from learner.evaluation.plan import EvalPlan
from learner.evaluation.playing import EpisodePlayer
from learner.rewards.port import Answer
from learner.tasks.port import ChatFormat, Prompt, Score, Task
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
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    """digests of the data that its problems are read from, as `Task.fingerprint`"""
    player: EpisodePlayer | None = None
    """who plays its samples, where they are episodes; they bring their scores then"""


def make_evaluation(
    plan: EvalPlan, task: Task, tokenizer: Any, *, held_out: bool, score: ScoreAnswers | None = None,
    player: Callable[[Sequence[Prompt]], EpisodePlayer] | None = None, chat_format: ChatFormat | None = None,
) -> Evaluation:  # fmt: skip
    """The plan with the first problems of a task, each row of data once: with fewer prompts where there are no more. Its answers
    are scored by `score`, or episodes of these problems are played by a `player`. `chat_format`: where it is not the task's own.
    UsageError, which names the evaluation, when the task does not have them."""
    draw = task.held_out if held_out else task.prompt
    count = task.held_out_count if held_out else None
    form = chat_format or task.chat_format
    try:
        drawn = [draw(i) for i in range(plan.prompts if not count else min(plan.prompts, count))]
        problems = tuple({prompt.where or prompt.index: prompt for prompt in drawn}.values())
        ids = tuple(encode_prompt(tokenizer, prompt, form) for prompt in problems)
    except UsageError as error:
        raise UsageError(f"{plan.called}: {error}") from None

    def text(completion: Sequence[int]) -> str:
        return decode_completion(tokenizer, completion, task.stop)

    return Evaluation(
        replace(plan, prompts=len(problems)), problems, ids, text, score or _scored_already,
        fingerprint=task.fingerprint, player=player(problems) if player is not None else None,
    )  # fmt: skip


async def _scored_already(prompt: Prompt, answers: Sequence[Answer]) -> Sequence[Score]:
    raise UsageError("episodes are scored by their environment")
