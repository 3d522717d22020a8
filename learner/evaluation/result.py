"""What an evaluation found: shares, means and their standard errors. Pure.

A prompt counts when all its samples are scored. So what an evaluation found before it was cut off can be told, with the share of
the prompts that it rests on: answers that end soon are over-represented in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev

from learner.evaluation.plan import EvalPlan
from learner.tasks.port import Score, check_score
from p2p.version import Version


@dataclass(frozen=True, slots=True)
class SampledAnswer:
    """A completion of an evaluation."""

    ids: tuple[int, ...]
    """of an episode, those that were sampled"""
    finish: str
    """"stop", or "length" when it was cut by `max_new_tokens`; of an episode, its last turn"""
    score: Score | None = None
    """of an episode, which its environment scores"""


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The probability that at least one of `k` samples is right, of which `right` of `samples` were: the unbiased estimate of
    Chen et al., arXiv 2107.03374. ValueError when k is not from 1 to `samples`."""
    if not 1 <= k <= samples or not 0 <= right <= samples:
        raise ValueError(f"pass@{k} of {right} right among {samples} samples")
    return 1.0 - math.prod(1.0 - k / n for n in range(samples - right + 1, samples + 1)) if samples - right >= k else 1.0


def ks(samples: int) -> list[int]:
    """The k for which pass@k is told: powers of two up to the number of samples, and that number; [] for one sample."""
    return [k for k in range(2, samples + 1) if k == samples or not k & (k - 1)]


def standard_error(values: Sequence[float]) -> float | None:
    """Of their mean; None for fewer than two."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOutcome:
    """One evaluation of one version. Means are over prompts of the means over each prompt's samples, and so are their standard
    errors: samples of one prompt are not independent."""

    plan: EvalPlan
    version: Version
    prompts: int
    """that counted; `plan.prompts` when it is whole"""
    exact: float
    exact_error: float | None
    reward: float
    reward_error: float | None
    length: float
    """mean tokens of a completion"""
    clipped: float
    """share of the completions that were cut by `max_new_tokens`"""
    passes: dict[int, float]
    """k -> pass@k"""
    unscored: int = 0
    """prompts that were answered and do not count: their reward could not be had"""
    seconds: float
    """from its beginning"""

    @property
    def whole(self) -> bool:
        return self.prompts == self.plan.prompts

    def metrics(self) -> dict[str, float]:
        """What metrics.jsonl has of it."""
        values: dict[str, float | None] = {
            "exact/mean": self.exact, "exact/stderr": self.exact_error, "reward/mean": self.reward,
            "reward/stderr": self.reward_error, "completions/mean_length": self.length,
            "completions/clipped_ratio": self.clipped, "finished": self.prompts / self.plan.prompts, "seconds": self.seconds,
            "unscored": float(self.unscored),
            "step": float(self.version.step),
        }  # fmt: skip
        if self.passes:
            values[f"avg@{self.plan.samples}"] = self.exact
            values |= {f"pass@{k}": value for k, value in self.passes.items()}
        return {self.plan.prefix + key: value for key, value in values.items() if value is not None}

    def sentence(self) -> str:
        """For the log."""
        error = f" +- {self.exact_error:.3f}" if self.exact_error is not None else ""
        passes = "".join(f", pass@{k} {value:.3f}" for k, value in self.passes.items())
        missing = self.plan.prompts - self.prompts - self.unscored
        why = [f"{self.unscored} could not be scored"] if self.unscored else []
        why += [f"{missing} were not answered in time, so answers that end soon count for more"] if missing > 0 else []
        part = "" if self.whole else f" (it rests on {self.prompts} of {self.plan.prompts} prompts: {', '.join(why)})"
        return (
            f"{self.plan.called} of version {self.version}: exact {self.exact:.3f}{error}, reward {self.reward:.3f}{passes}, "
            f"{self.seconds:.1f} s{part}"
        )


@dataclass(slots=True)
class _Answered:
    """One prompt."""

    answers: dict[int, SampledAnswer] = field(default_factory=dict)
    """by number of the sample"""
    scores: Sequence[Score] = ()
    lost: bool = False
    """they could not be scored"""


class EvalTally:
    """The answers to one evaluation of one version, as they come."""

    def __init__(self, plan: EvalPlan, version: Version) -> None:
        self.plan, self.version = plan, version
        self._prompts: dict[int, _Answered] = {}

    def answered(self, prompt: int, sample: int, answer: SampledAnswer) -> list[SampledAnswer]:
        """A sequence has ended. The answers to its prompt when all of them are here now, in order of the samples; else []."""
        one = self._prompts.setdefault(prompt, _Answered())
        if sample in one.answers:
            return []
        one.answers[sample] = answer
        return [one.answers[i] for i in sorted(one.answers)] if len(one.answers) == self.plan.samples else []

    def scored(self, prompt: int, scores: Sequence[Score]) -> None:
        """What the answers to a prompt are worth, in the order of `answered`. ValueError for another number of scores, and for
        what is no score."""
        if len(scores) != self.plan.samples:
            raise ValueError(f"{len(scores)} scores for {self.plan.samples} answers")
        self._prompts[prompt].scores = tuple(map(check_score, scores))

    def unscored(self, prompt: int) -> None:
        """The answers to a prompt cannot be scored: it does not count."""
        self._prompts.setdefault(prompt, _Answered()).lost = True

    @property
    def lost(self) -> int:
        """Prompts that cannot be scored."""
        return sum(one.lost for one in self._prompts.values())

    @property
    def finished(self) -> int:
        """Prompts that count."""
        return sum(bool(one.scores) for one in self._prompts.values())

    def result(self, seconds: float) -> EvalOutcome | None:
        """What was found until now; None when no prompt counts yet."""
        done = [one for one in self._prompts.values() if one.scores]
        if not done:
            return None
        exact = [fmean(score.exact for score in one.scores) for one in done]
        reward = [fmean(score.reward for score in one.scores) for one in done]
        answers = [answer for one in done for answer in one.answers.values()]
        n = self.plan.samples
        return EvalOutcome(
            plan=self.plan, version=self.version, prompts=len(done), exact=fmean(exact), exact_error=standard_error(exact),
            reward=fmean(reward), reward_error=standard_error(reward), length=fmean(len(a.ids) for a in answers),
            clipped=fmean(a.finish != "stop" for a in answers), seconds=seconds, unscored=self.lost,
            passes={k: fmean(pass_at_k(n, sum(s.exact for s in one.scores), k) for one in done) for k in ks(n)},
        )  # fmt: skip


def better(a: EvalOutcome | None, b: EvalOutcome | None) -> EvalOutcome | None:
    """Which of two is told: the one that rests on more prompts, of equal ones the second."""
    if a is None or b is None:
        return a or b
    return a if a.prompts > b.prompts else b
