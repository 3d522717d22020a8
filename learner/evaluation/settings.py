"""The tables [[eval]] of a configuration: which evaluations there are. Must not know how they are made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import Field, field_validator

from learner.evaluation.plan import EvalPlan
from learner.rewards.settings import RewardSettings
from learner.section import Finding, Section
from learner.tasks.settings import TaskSettings

RESERVED = ("exact", "reward", "completions")
"""Names that no evaluation may have: the default evaluation's own metrics are called eval/exact/mean and so on."""

MOST_SEQUENCES = 1_000_000
"""Sequences of one evaluation at the most: its answers are in the head's memory until they are scored."""


class EvalTask(RewardSettings, TaskSettings):
    """A task that is here for an evaluation, and how its answers are scored: the keys of [task]."""


class EvalSection(Section):
    """An evaluation: problems that the nodes answer every so many steps, with one version of the weights, beside training. Each
    has a table of its own, headed [[eval]]; `trainer.eval_size` and `trainer.eval_every` make one more, without a name."""

    name: str
    """Its name: its metrics are `eval/NAME/...`. Lower-case letters, digits and -._ are taken."""
    task: EvalTask | None = None
    """A task of its own: a table `[eval.task]` below the table [[eval]], with the keys of [task]. Without it: the run's task."""
    environment: bool = False
    """Play the prompts of its own task as episodes of the run's environment (`environment.name`), which rewards them. The run's
    own task is played in it anyway, and a task that has an environment in its own."""
    problems: Literal["auto", "held_out", "all"] = "auto"
    """Which of the task's problems, from the first on. "held_out": those that are kept from training. "all": those that a
    run would train on, for a data set that is here for evaluation only. "auto": "all" of a task of its own, else "held_out"."""
    prompts: int = Field(default=64, ge=1, le=10_000)
    """Prompts that are answered."""
    samples: int = Field(default=1, ge=1, le=1024)
    """Completions of a prompt: the k of pass@k and avg@k."""
    every: int = Field(default=0, ge=0)
    """Steps between two of these evaluations. 0 evaluates before the first and after the last step only."""
    at_start: bool = True
    """Evaluate the first version of the run, too."""
    at_end: bool = True
    """Evaluate the last version of the run, too. The run ends after that, or after half an hour."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature. 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus of the sampling: the most likely tokens that have this probability together."""
    max_new_tokens: int = Field(default=0, ge=0)
    """Most tokens of a completion. 0 is `rollout.max_new_tokens`."""

    @field_validator("name")
    @classmethod
    def _sound(cls, name: str) -> str:
        if not 0 < len(name) <= 40 or not name.strip("-._") or set(name) - set("abcdefghijklmnopqrstuvwxyz0123456789-._"):
            raise ValueError(f"{name[:60]!r} is no name: 1 to 40 lower-case letters, digits and -._")
        if name in RESERVED:
            raise ValueError(f"{name!r} would mix its metrics with the default evaluation's: call it otherwise")
        return name

    @property
    def held_out(self) -> bool:
        """Whether its problems are the task's held-out ones."""
        return self.problems == "held_out" or (self.problems == "auto" and self.task is None)


def eval_findings(sections: Sequence[EvalSection]) -> Iterator[Finding]:
    """What is wrong with these evaluations, each right by itself."""
    seen = set[str]()
    for i, one in enumerate(sections):
        if one.name in seen:
            yield Finding(f"eval.{i}.name: {one.name!r} is there twice: each evaluation has a name of its own", ("eval",))
        seen.add(one.name)
        if one.samples > 1 and not one.temperature:
            yield Finding(
                f"eval.{i} ({one.name}): samples = {one.samples} with temperature = 0 would be as many equal answers: set its "
                "temperature, 1.0 say, or samples = 1",
                ("eval",),
            )
        if one.prompts * one.samples > MOST_SEQUENCES:
            yield Finding(
                f"eval.{i} ({one.name}): {one.prompts} prompts with {one.samples} samples each are more than {MOST_SEQUENCES:,} "
                "completions",
                ("eval",),
            )


def eval_plan(section: EvalSection, *, max_new_tokens: int, stop_ids: tuple[int, ...], seed: int) -> EvalPlan:
    """What a table [[eval]] asks for, in a run with this `seed` and `rollout.max_new_tokens`."""
    return EvalPlan(
        name=section.name, prompts=section.prompts, samples=section.samples, every=section.every, at_start=section.at_start,
        at_end=section.at_end, temperature=section.temperature, top_p=section.top_p,
        max_new_tokens=section.max_new_tokens or max_new_tokens, stop_ids=stop_ids, seed=seed,
    )  # fmt: skip
