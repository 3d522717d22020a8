"""A task's environment processes, for as long as a run lasts. Must not know rollouts or nodes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import trio

from learner.environments.host import EnvironmentHost
from learner.environments.settings import EnvironmentSection
from learner.tasks.port import EnvironmentSource, Task
from learner.user_code import absolute_name
from p2p.errors import UsageError


def set_environment(task: Task, settings: EnvironmentSection) -> None:
    """Give the task the environment that the settings name. UsageError where it has one already."""
    if not settings.name:
        return
    if task.environment is not None:
        raise UsageError(f"environment.name = {settings.name!r}, and task {task.name} has an environment of its own")
    task.environment = EnvironmentSource(absolute_name(settings.name), dict(settings.options))


@asynccontextmanager
async def running_environment(
    task: Task, tokenizer: Any, stop_ids: Sequence[int], settings: EnvironmentSection
) -> AsyncIterator[EnvironmentHost | None]:
    """Whoever runs the task's episodes, ready; None for a task of single turns. The task's chat prompts name its tools from here
    on. UsageError when the environment cannot be made."""
    if task.environment is None:
        yield None
        return
    async with trio.open_nursery() as nursery:
        host = EnvironmentHost(task, tokenizer, stop_ids, settings)
        await nursery.start(host.run)
        if host.tools:
            task.chat_format = replace(task.chat_format, tools=host.tools)
        yield host
        nursery.cancel_scope.cancel()
