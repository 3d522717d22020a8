"""A task's environment processes, for as long as a run lasts. Must not know rollouts or nodes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import trio

from learner.environments.home import EnvironmentTold
from learner.environments.host import EnvironmentHost
from learner.environments.settings import EnvironmentSection
from learner.tasks.port import EnvironmentSource, Prompt, Task
from learner.tasks.turns import check_turn_stops
from learner.user_code import absolute_name
from p2p.errors import UsageError


def set_environment(task: Task, settings: EnvironmentSection) -> None:
    """Give the task the environment that the settings name. UsageError where it has one already, and where its own cannot run
    where the settings say."""
    if not settings.name:
        _check_place(task, settings)
        return
    if task.environment is not None:
        raise UsageError(f"environment.name = {settings.name!r}, and task {task.name} has an environment of its own")
    task.environment = EnvironmentSource(absolute_name(settings.name), dict(settings.options))


def _check_place(task: Task, settings: EnvironmentSection) -> None:
    if settings.run == "sandbox" and task.environment is not None and task.environment.unconfinable:
        raise UsageError(
            f'environment.run = "sandbox", and task {task.name} cannot run there: {task.environment.unconfinable}; set '
            'environment.run = "process"'
        )


@asynccontextmanager
async def running_environment(
    task: Task, tokenizer: Any, stop_ids: Sequence[int], settings: EnvironmentSection, *, seed: int,
    first: Prompt | None = None,
) -> AsyncIterator[EnvironmentHost | None]:  # fmt: skip
    """Whoever runs the task's episodes, ready; None for a task of single turns. The task's chat prompts name its tools from here
    on. `stop_ids` are the model's own, without those of `task.stop`; `seed` is the task's, from which episodes draw theirs;
    `first` a prompt like the others, where it is not the task's own first one. UsageError when the environment cannot be made or
    cannot run where the settings say, or a stop string leaves no turn."""
    if task.environment is None:
        yield None
        return
    _check_place(task, settings)
    first = first or task.prompt(0)
    check_turn_stops(task, tokenizer, stop_ids, first)
    async with trio.open_nursery() as nursery:
        host = EnvironmentHost(task, tokenizer, stop_ids, settings, seed=seed)
        await nursery.start(host.run)
        if host.tools:
            task.chat_format = replace(task.chat_format, tools=host.tools)
            if not first.chat:
                EnvironmentTold(task.environment.name).odd(
                    "it has tools, and the task's prompts are no chat (of rows of data: task.chat = false): the model is not "
                    "told what it may call"
                )
        yield host
        nursery.cancel_scope.cancel()
