"""Makes a run's evaluations ready: their problems, their scorers, and the processes of their environments. A thin shell.

All of these are the evaluations' own: answers that are slow to score, and turns that are slow to answer, keep no group of
training waiting. Must not know versions, nodes or the configuration as a whole.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import trio

from learner.environments.running import running_environment
from learner.environments.settings import EnvironmentSection
from learner.evaluation.episode import EpisodeLimits
from learner.evaluation.plan import EvalPlan
from learner.evaluation.playing import EpisodeDesk, EpisodePlayer
from learner.evaluation.problems import Evaluation, make_evaluation
from learner.rewards.group_scorer import PooledScorer
from learner.rewards.settings import RewardSettings
from learner.tasks.port import Prompt, Task
from p2p.errors import ShoalError, UsageError, first_of

log = logging.getLogger("shoal.evaluation")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalWish:
    """An evaluation that the settings ask for."""

    plan: EvalPlan
    task: Task
    task_seed: int
    rewards: RewardSettings
    allow_unconfined: bool
    held_out: bool
    optional: bool = False
    """the run goes on without it, where its problems are not to be had"""


class EvalOpener:
    """Makes evaluations one after another. `tokenizer` is any Hugging Face tokenizer, `context` the tokens that the model takes;
    `environment` says how environments run, `stop_ids` are the model's own tokens that end a turn."""

    def __init__(
        self, tokenizer: Any, context: int, environment: EnvironmentSection, *, stop_ids: Sequence[int],
        in_thread: Callable[..., Awaitable[Any]],
    ) -> None:  # fmt: skip
        self._tokenizer, self._environment, self._stop_ids, self._in_thread = tokenizer, environment, stop_ids, in_thread
        self._limits = EpisodeLimits(environment.max_turns, environment.turn_tokens, context)
        self._desks: dict[int, EpisodeDesk] = {}

    @asynccontextmanager
    async def opened(self, wishes: Sequence[EvalWish]) -> AsyncIterator[list[Evaluation]]:
        """The evaluations, whose processes end with the block. UsageError for one that is not `optional` and whose problems are
        not to be had, and for an environment that cannot be made."""
        made: list[Evaluation] = []
        with ExitStack() as held:
            async with trio.open_nursery() as nursery:
                for wish in wishes:
                    try:
                        made.append(await self._make(wish, held, nursery))
                    except UsageError as error:
                        if not wish.optional:
                            raise
                        log.warning("%s; the run goes on without it (trainer.eval_size = 0 turns it off)", error)
                yield made
                nursery.cancel_scope.cancel()

    async def _make(self, wish: EvalWish, held: ExitStack, nursery: trio.Nursery) -> Evaluation:
        plan, task = wish.plan, wish.task
        if task.environment is None:
            scorer = PooledScorer(task, wish.rewards, allow_unconfined=wish.allow_unconfined, in_thread=self._in_thread)
            made = make_evaluation(plan, task, self._tokenizer, held_out=wish.held_out, score=scorer.score_prompt)
            held.enter_context(scorer)
        else:
            if wish.rewards.reward:
                raise UsageError(f"{plan.called}: an environment rewards its episodes itself; leave the reward functions out")
            if id(task) not in self._desks:
                try:
                    first = task.held_out(0) if wish.held_out else task.prompt(0)
                except UsageError as error:
                    raise UsageError(f"{plan.called}: {error}") from None
                await nursery.start(self._keep, wish, first)
            desk = self._desks[id(task)]
            made = make_evaluation(
                plan, task, self._tokenizer, held_out=wish.held_out,
                player=lambda problems: EpisodePlayer(
                    desk, self._limits, first=desk.task.take(problems), turn_s=self._environment.turn_s
                ),
                chat_format=desk.task.chat_format,
            )  # fmt: skip
        if made.plan.prompts < plan.prompts:
            log.info("%s has %d prompts, not %d: there are no more", plan.called, made.plan.prompts, plan.prompts)
        return made

    async def _keep(self, wish: EvalWish, first: Prompt, *, task_status: Any) -> None:
        """A task's environment processes, for as long as they can be had. Once they run, nothing of this ends the run."""
        started, desk = False, EpisodeDesk(wish.task)
        try:
            async with running_environment(
                desk.task, self._tokenizer, self._stop_ids, self._environment, seed=wish.task_seed, first=first
            ) as host:
                assert host is not None
                started = True
                self._desks[id(wish.task)] = desk
                task_status.started()
                await desk.run(host)
        except* ShoalError as group:
            if not started:
                raise
            why = str(first_of(group))
            desk.close(why)
            log.warning("evaluations of task %s are over: %.300s", wish.task.name, why)
