"""What an evaluation asks for, and when it is due. Pure.

An evaluation is due at steps, and runs on whatever version the nodes serve when it is looked for: so one that comes due while the
one before still runs waits for it, and however many came due meanwhile, one evaluation of the then newest version answers all.
Must not know nodes, tasks or what an answer is worth.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from learner.requests.port import Ask
from learner.rollouts.stop_strings import StopStrings
from p2p.version import Version


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalPlan:
    """One evaluation, as the settings have it."""

    name: str
    """"" is the default evaluation"""
    prompts: int
    samples: int
    """completions of a prompt"""
    every: int
    """steps between two of these; 0: only at the start and the end"""
    at_start: bool
    at_end: bool
    temperature: float
    top_p: float
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    seed: int
    stop: StopStrings | None = None
    """strings that end a completion, beside `stop_ids`"""

    @property
    def called(self) -> str:
        """Its name in a sentence."""
        return f"evaluation {self.name!r}" if self.name else "the evaluation"

    @property
    def prefix(self) -> str:
        """What the names of its metrics begin with."""
        return f"eval/{self.name}/" if self.name else "eval/"


class Wanted(NamedTuple):
    """A sequence that an evaluation asks for."""

    prompt: int
    """number of the prompt in the evaluation, from 0"""
    sample: int
    """number of the sample of that prompt, from 0"""
    ask: Ask


def wanted(plan: EvalPlan, prompt_ids: Sequence[tuple[int, ...]], version: Version) -> Iterator[Wanted]:
    """All sequences of an evaluation of `version`, prompt by prompt. Their seeds do not depend on the version, so two versions
    are compared with the same draws."""
    for prompt, ids in enumerate(prompt_ids):
        for sample in range(plan.samples):
            ask = Ask(
                request_class="evaluation", prompt_ids=ids, max_new_tokens=plan.max_new_tokens, stop_ids=plan.stop_ids,
                seed=_seed(plan, prompt, sample), temperature=plan.temperature, top_p=plan.top_p, exact_version=version,
                stop=plan.stop,
            )  # fmt: skip
            yield Wanted(prompt, sample, ask)


def _seed(plan: EvalPlan, prompt: int, sample: int) -> int:
    """63 bits: the same in every process, for ever."""
    text = f"evaluation {plan.seed} {plan.name} {prompt} {sample}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


class Schedule:
    """When an evaluation is due. `last` is the step with which the run ends,
    `done` the step of the newest evaluation of earlier lives; None: there is none."""

    def __init__(self, plan: EvalPlan, *, last: int, done: int | None) -> None:
        self._plan, self._last, self._done = plan, last, done

    def due(self, step: int) -> bool:
        """Whether the version of this step is to be evaluated."""
        if self._done is not None and step <= self._done:
            return False
        if step >= self._last:
            return self._plan.at_end
        if self._done is None and self._plan.at_start:
            return True
        return bool(self._plan.every) and step // self._plan.every > (self._done or 0) // self._plan.every

    def took(self, step: int) -> None:
        """The version of this step was evaluated, or given up."""
        self._done = step if self._done is None else max(self._done, step)

    @property
    def ended(self) -> bool:
        """Whether nothing can come due any more."""
        return not self._plan.at_end or (self._done is not None and self._done >= self._last)
