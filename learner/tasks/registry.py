"""Tasks by name; the only module that knows all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from learner.tasks.guess_number import GuessNumberTask
from learner.tasks.letters_and_sums import AddTask, ReverseTask
from learner.tasks.port import Task
from learner.tasks.reasoning_gym import ReasoningGymTask
from p2p.errors import UsageError
from p2p.verbs import nearest

BUILT_IN: dict[str, type[ReverseTask] | type[AddTask] | type[GuessNumberTask]] = {
    "reverse": ReverseTask, "add": AddTask, "guess_number": GuessNumberTask,
}  # fmt: skip


def known_tasks() -> tuple[str, ...]:
    return (*BUILT_IN, "reasoning_gym:DATASET")


def make_task(name: str, seed: int = 0, options: Mapping[str, Any] | None = None) -> Task:
    """The task called `name`, its problems drawn from `seed`. UsageError on an unknown name or option."""
    kwargs = dict(options or {})
    if "seed" in kwargs or "dataset" in kwargs:
        raise UsageError(f"task {name}: seed is task.seed and the data set part of task.name, neither is an option")
    family, colon, dataset = name.partition(":")
    if family == "reasoning_gym" and dataset:
        return ReasoningGymTask(dataset, seed, **kwargs)
    if colon or family not in BUILT_IN:
        raise UsageError(f"unknown task {name!r}{nearest(name, BUILT_IN) or '; known: ' + ', '.join(known_tasks())}")
    try:
        return BUILT_IN[family](seed, **kwargs)
    except TypeError as error:
        raise UsageError(f"task {name} with options {kwargs}: {error}") from None
