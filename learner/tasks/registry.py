"""Tasks by name: the one door through which every task is made, ours and a user's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from learner.tasks.data.task import DataTask
from learner.tasks.guess_digits import GuessDigitsTask
from learner.tasks.guess_number import GuessNumberTask
from learner.tasks.letters_and_sums import AddTask, ReverseTask
from learner.tasks.port import Task
from learner.tasks.reasoning_gym import ReasoningGymTask
from learner.tasks.settings import TaskSettings
from learner.tasks.verifiers import VerifiersTask
from learner.tasks.wrapped import WrappedTask
from learner.user_code import load_named, told
from p2p.errors import ShoalError, UsageError
from p2p.verbs import nearest

BUILT_IN: dict[str, type[Task]] = {
    "reverse": ReverseTask, "add": AddTask, "guess_number": GuessNumberTask, "guess_digits": GuessDigitsTask, "data": DataTask,
}  # fmt: skip
"""Tasks of ours that are one class each."""

FAMILIES: dict[str, type[Task]] = {"reasoning_gym": ReasoningGymTask, "verifiers": VerifiersTask}
"""Tasks named FAMILY:MEMBER; the class is made with the member's name before the seed."""


def known_tasks() -> tuple[str, ...]:
    """What may stand in `task.name`, for messages."""
    return (*BUILT_IN, "reasoning_gym:DATASET", "verifiers:ENVIRONMENT", "file.py:Class", "module:Class")


def make_task(name: str, seed: int = 0, options: Mapping[str, Any] | None = None) -> Task:
    """The task called `name` with nothing else set, its problems drawn from `seed`. UsageError as `open_task`."""
    return open_task(TaskSettings(name=name, seed=seed, options=dict(options or {})))


def open_task(settings: TaskSettings, *, own_score: bool = True) -> Task:
    """The task that the settings describe. UsageError on an unknown name or option, on data that cannot be read, and on a user's
    class that cannot be had. `own_score`: it scores its answers itself, there are no reward functions.

    It may take as long as reading all of its data takes.
    """
    name, options = settings.kind, settings.options
    if "seed" in options or "dataset" in options:
        raise UsageError(f"task {name}: seed is task.seed and the data set part of task.name, neither is an option")
    family, colon, member = name.partition(":")
    kind = FAMILIES.get(family) if colon and member else BUILT_IN.get(name)
    users = kind is None
    if kind is None:
        kind = _users(name)
    if settings.data and not issubclass(kind, DataTask):
        raise UsageError(f"task.data goes with the task data or a DataTask of yours, and task.name = {name!r} is neither")
    task = _made(kind, settings, member=member if family in FAMILIES else "", own_score=own_score, users=users)
    if not hasattr(task, "name"):
        task.name = name
    if settings.template_options:
        task.chat_format = replace(task.chat_format, options={**task.chat_format.options, **settings.template_options})
    task.stop = (*task.stop, *settings.stop)
    dressed = bool(settings.system_prompt or settings.few_shot) and not isinstance(task, DataTask)
    if not users and not dressed:
        return task
    wrapped = WrappedTask(task, settings)
    wrapped.prompt(0)  # what is wrong with it is wrong with the first one
    return wrapped


def _users(name: str) -> type[Task]:
    """A user's class."""
    if ":" not in name or name.partition(":")[0] in BUILT_IN:
        raise UsageError(f"unknown task {name!r}{nearest(name, BUILT_IN) or '; known: ' + ', '.join(known_tasks())}")
    found = load_named(name, "task.name")
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise UsageError(f"task.name: {name} is no subclass of learner.tasks.port.Task")
    return found


def _made(kind: type[Task], settings: TaskSettings, *, member: str, own_score: bool, users: bool) -> Task:
    name, options, make = settings.kind, dict(settings.options), kind  # options of a person: types are checked there
    construct: Any = make
    try:
        if issubclass(kind, DataTask):
            return construct(settings, own_score=own_score, **options)
        return construct(member, settings.seed, **options) if member else construct(settings.seed, **options)
    except ShoalError:
        raise
    except TypeError as error:
        if users and error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise UsageError(f"task {name}: {told(error)}") from error
        raise UsageError(f"task {name} with options {options}: {error}") from None
    except Exception as error:
        if not users:
            raise
        raise UsageError(f"task {name}: {told(error)}") from error
