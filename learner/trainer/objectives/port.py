"""The port of the objectives: the sampled tokens of a forward in, a loss for each token out.

Must not know models, optimizers, versions, or how losses are averaged (`learner.trainer.losses`). The configuration is read
without torch, so this file and the objectives work on tensors by their methods alone.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Self

from pydantic import model_validator

from learner.section import Section

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Nats: log ratios are cut to this size, since one token with exp(100) would outweigh the step or make it NaN."""

Level = Literal["token", "sequence"]
"""Of what a ratio is: of each token, or of the whole completion."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The sampled tokens of one forward, completion after completion: N tokens of R completions ("rows").

    pi is the trainer's policy, mu the one that sampled, at the temperature of the rollouts. What an environment gave is not here.
    """

    logprobs: Tensor
    """float [N], log pi, with gradient"""
    behaviour: Tensor
    """float [N], log mu as the node reported it"""
    proximal: Tensor
    """float [N], log pi before the first update of the step, without gradient; equal to `logprobs` in the first update"""
    row: Tensor
    """int64 [N], number of the token's row, rising"""
    lengths: Tensor
    """float [R], tokens of each row, at least 1"""
    advantages: Tensor
    """float [R]"""
    group_constants: Tensor
    """float [R]: `Objective.group_constant` of the row's group"""

    @property
    def advantage(self) -> Tensor:
        """[N]"""
        return self.advantages[self.row]

    @property
    def log_ratio(self) -> Tensor:
        """[N], log(pi / mu) with gradient, at most MAX_LOG_RATIO in size."""
        return (self.logprobs - self.behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def row_sum(self, values: Tensor) -> Tensor:
        """[N] -> [R]"""
        return values.new_zeros(len(self.lengths)).index_add(0, self.row, values)

    def row_mean(self, values: Tensor) -> Tensor:
        """[N] -> [R]"""
        return self.row_sum(values) / self.lengths


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """What an objective makes of `SampledTokens`."""

    loss: Tensor
    """[N] with gradient. An objective of whole completions gives each token of a row the row's value."""
    weight: Tensor
    """[N] without gradient: each token's gradient is - weight * advantage * (gradient of log pi), when its row is averaged over
    its tokens. 1 for plain policy gradient, 0 where the objective lets a token go."""


class Objective(Section):
    """An objective and its settings. A subclass is one file; its docstring has the formula and the source."""

    paper: ClassVar[str]
    """where it is from: a number on arXiv or a project's name"""
    nucleus: ClassVar[bool] = True
    """whether it goes with `rollout.top_p` below 1: then log mu is of the nucleus alone, and ratios are off by its mass"""
    reads_proximal: ClassVar[bool] = False
    """whether `SampledTokens.proximal` counts: with several updates a step it costs a forward of its own"""

    def group_constant(self, behaviour: Sequence[Sequence[float]]) -> float:
        """A number that the objective wants of every whole group: `behaviour` has log mu of each completion's sampled tokens."""
        return 0.0

    @property
    def every_row(self) -> bool:
        """Whether completions without advantage have a gradient too. Those of an objective that has none for them are not run."""
        return False

    @abstractmethod
    def terms(self, sampled: SampledTokens) -> TokenLosses:
        """The loss of each token. Pure."""


class RatioBounds(Objective):
    """An objective with bounds of a ratio, which leave something between them."""

    low: float
    high: float

    @model_validator(mode="after")
    def _rising(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low = {self.low:g} is above high = {self.high:g}")
        return self


class Clipped(NamedTuple):
    """A clipped surrogate."""

    loss: Tensor
    """with gradient"""
    free: Tensor
    """bool, False where the clip holds: no gradient comes from there"""


def surrogate(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Clipped:
    """PPO's clipped surrogate (arXiv 1707.06347, section 3) of tensors of one shape."""
    clipped = ratio.clamp(1 - low, 1 + high)
    loss = -(ratio * advantage).minimum(clipped * advantage)
    held = ((advantage > 0) & (ratio > 1 + high)) | ((advantage < 0) & (ratio < 1 - low))
    return Clipped(loss, ~held)


def around_proximal(sampled: SampledTokens, weight: Tensor, low: float, high: float) -> TokenLosses:
    """The clipped surrogate around the trainer's policy at the start of the step, each token's times `weight` ([N], without
    gradient)."""
    log_rho = (sampled.logprobs - sampled.proximal).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    rho = log_rho.exp()
    clipped = surrogate(rho, sampled.advantage, low, high)
    return TokenLosses(weight * clipped.loss, weight * rho.detach() * clipped.free)
