"""From tokens of trusted nodes to what an honest node's statistics are at most. Pure.

The means must be upper bounds for honest nodes, or the tests' promise does not hold. So a measured mean is raised by four
standard errors and by a margin. Tokens of one prompt are loud or exact together, and a node may be given one prompt only: what
they have in common is seen once for each prompt, however many tokens there are. So standard errors are those of prompts, and the
bounds hold for a prompt that is much louder, or more exact, than the mean one. Must not know kinds, or what is done with bounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from learner.audit.bets import FAR, GROSS_POWER, LOGPROB_SCALE, NEAR, NOISE_SCALES, HonestMeans, grossness, logit_differences
from learner.audit.sequential import NodeTest
from p2p.errors import UsageError

MARGIN = 1.5
"""Factor on a measured mean that hardly depends on the prompts."""

PROMPT_MARGIN = 10.0
"""Factor on the means that do: on prompts with several times the entropy, a bfloat16 node's log probabilities were off
5.6 times as much, and 9 times as many tokens were near an edge (bench/audit.md). Nobody knows what will be asked."""

NOISE_MARGIN = 2.0
"""The same for noise of logits and for what it lacks: kinds of node are further apart than that."""

STRETCH, LEAST_STRETCH = 128, 8
"""Tokens of one prompt that are as loud or as exact as it has it, and how many such a stretch has at the least, unless most are
in shorter ones. A node's first tokens may all be of one prompt: one of 222 honest nodes was called wrong by 140 tokens of a
loud one, and where stretches went across prompts of 7 tokens, nearly all whose first prompt was very exact (bench/audit.md)."""

FEW_PROMPTS = 4
"""What is estimated over n prompts is taken for one and FEW_PROMPTS / n times as uncertain: of few prompts their spread is not
known well either."""

LOUD_SPREADS, EXACT_SPREADS = 4.0, 5.0
"""Standard deviations of stretches' loudness by which a prompt may be louder than the mean one, and of the log of it by which it
may be more exact. The first is narrow, for mild cheats are within what wider bounds allow; a bet on it is bounded by prompt
(`OF_A_PROMPT`). The second is wide since it costs little: who computes exactly where its kind rounds is a thousand times as
exact."""

LEAST_SHARE = 1e-3
"""Means of noise, and of what it lacks, are never taken for less."""

LEAST_TOWARD = 0.15
"""The mean of products with a suspect's differences is never taken for less. Rounding is a function of the context, and so is
what other weights do: they agree by chance for all tokens of one prompt at once, whose mean had a standard deviation of some 0.1
where that of all was zero (bench/audit.md). With 0.06, as measured token by token, an honest node was all but caught."""

LEAST = HonestMeans(far=2e-4, near=5e-4, gross=1e-5, off=1e-3, bias=5e-4)
"""Means are never taken for less: no sample is long enough to tell."""


def measure(
    distance: np.ndarray, claimed: np.ndarray, recomputed: np.ndarray, shift: np.ndarray,
    suspected: Mapping[str, np.ndarray] | None = None, *, repeated: np.ndarray | None = None, prompts: np.ndarray | None = None,
) -> HonestMeans:  # fmt: skip
    """From tokens of nodes that are known to be honest. `suspected`: of some suspects (see `NodeTest`) what these tokens' log
    probabilities are under their weights; without them nothing is bet on suspects. `repeated`, bool: those that came in the same
    context before, whose log probabilities say nothing new. `prompts`: a number for each token's prompt; None: one
    after the other, of STRETCH tokens each. UsageError without tokens."""
    n = len(distance)
    if not n:
        raise UsageError("a calibration needs tokens of trusted nodes")
    prompts = np.arange(n) // STRETCH if prompts is None else np.unique(prompts, return_inverse=True)[1]
    drawn = _ByPrompt(prompts)
    if repeated is not None and not repeated.all():
        claimed, recomputed, prompts = claimed[~repeated], recomputed[~repeated], prompts[~repeated]
        suspected = {name: values[~repeated] for name, values in (suspected or {}).items()}
    signed, said = np.clip((claimed - recomputed) / LOGPROB_SCALE, -1, 1) * LOGPROB_SCALE, _ByPrompt(prompts)

    def share(beyond: np.ndarray, margin: float) -> float:
        rate = float(beyond.mean())
        return margin * (rate + 4 * max(math.sqrt(max(rate, 1 / n) / n), drawn.error(beyond)))

    def mean(values: np.ndarray, by: _ByPrompt) -> float:
        return PROMPT_MARGIN * (abs(float(values.mean())) + 4 * by.error(values))

    logits = logit_differences(claimed, recomputed)
    known = ~np.isnan(logits)
    logits, of_known = np.abs(logits[known]), _ByPrompt(prompts[known])
    level = _mean(logits)
    extreme = of_known.extreme(logits)
    products = [_toward(level, claimed, recomputed, values) for values in (suspected or {}).values()]
    shares = [np.minimum(logits / scale, 1.0) for scale in NOISE_SCALES]
    return HonestMeans(
        far=max(LEAST.far, share(distance > FAR, MARGIN), _far_of(extreme.loud)),
        near=max(LEAST.near, share(distance > NEAR, PROMPT_MARGIN)),
        gross=max(LEAST.gross, mean(grossness(distance, shift), drawn), _gross_of(extreme.loud)),
        off=max(LEAST.off, mean(np.abs(signed), said)), bias=max(LEAST.bias, mean(signed, said)),
        noise=tuple(
            _most(of_scale, of_known, np.minimum(extreme.loud / scale, 1.0))
            for scale, of_scale in zip(NOISE_SCALES, shares, strict=True)
        ),
        quiet=tuple(
            _most(1.0 - of_scale, of_known, 1.0 - np.minimum(extreme.exact / scale, 1.0))
            for scale, of_scale in zip(NOISE_SCALES, shares, strict=True)
        ),
        level=level, toward=min(1.0, max(products, default=1.0)),
    )  # fmt: skip


class _Extreme(NamedTuple):
    """Differences of logits (nats, their amounts) as they would be of extreme prompts."""

    loud: np.ndarray
    exact: np.ndarray


class _ByPrompt:
    """Tokens by prompt. `of`: for each token its prompt's number, small ones."""

    def __init__(self, of: np.ndarray) -> None:
        self._of, self._order = of, np.argsort(of, kind="stable")
        self._prompts = int(np.count_nonzero(np.bincount(of))) if len(of) else 0

    def error(self, values: np.ndarray) -> float:
        """Standard error of the mean: as if tokens or prompts were independent, the larger one."""
        n, mean, prompts = len(values), float(values.mean()), self._prompts
        if prompts < 2:
            return abs(mean)
        sums = np.bincount(self._of, values - mean)
        by_prompt = math.sqrt(float((sums**2).sum()) * prompts / (prompts - 1)) / n
        return max(float(values.std()) / math.sqrt(n), by_prompt * _few(prompts))

    def extreme(self, amounts: np.ndarray) -> _Extreme:
        """Each stretch of tokens as if its prompt were as loud, or as exact, as prompts may be; with one stretch any are."""
        ordered, of = amounts[self._order], self._of[self._order]
        first = _stretches(of)
        lengths = np.diff([*first.tolist(), len(ordered)])
        means = np.add.reduceat(ordered, first) / lengths if len(first) else np.empty(0)
        told = lengths >= LEAST_STRETCH
        if 2 * lengths[told].sum() < len(ordered):  # what a few long ones have is not what all have
            told[:] = True
        if told.sum() < 2:
            return _Extreme(np.full(len(ordered), np.inf), np.zeros(len(ordered)))
        few = _few(len(np.unique(of[first[told]])))
        loud = float(means[told].mean()) + LOUD_SPREADS * few * float(means[told].std(ddof=1))
        rounds = told & (means > 0)
        each = np.repeat(rounds, lengths)
        alike, logs = ordered[each] / np.repeat(means, lengths)[each], np.log(means[rounds])
        exact = math.exp(float(logs.mean()) - EXACT_SPREADS * float(logs.std(ddof=1))) if len(logs) > 1 else 0.0
        return _Extreme(alike * loud, alike * exact)


def _few(prompts: int) -> float:
    return 1 + FEW_PROMPTS / max(1, prompts)


def _stretches(of: np.ndarray) -> np.ndarray:
    """Where each begins, of tokens in order of their prompts `of`: one ends at STRETCH tokens, or before that with its prompt."""
    if not len(of):
        return np.empty(0, int)
    starts = np.flatnonzero(np.r_[True, np.diff(of) != 0])
    return np.concatenate([np.arange(*prompt, STRETCH) for prompt in zip(starts, [*starts[1:], len(of)], strict=True)])


def _far_of(differences: np.ndarray) -> float:
    """How often a draw is further than FAR from its interval where logits are off by so much, at the most: an edge between
    tokens moves by F (1 - F) times that, a quarter at the most, and a seeded number that is drawn amiss lies between an edge as
    it is and as it moved, at either end of an interval. Of simulated models it was up to 0.95 times this where logits are off by
    0.3 nats at the most, and 1.27 times where by 0.5 (bench/audit.md)."""
    return min(1.0, 2 * _mean(np.maximum(differences / 4 - FAR, 0.0)))


def _gross_of(differences: np.ndarray) -> float:
    """What the mean of `grossness` is, at the most. An edge between tokens moves by d in log odds: a seeded number that is a
    share t of that way from the edge has a shift of t d / 2, and lies there with a density of d / 4 at the most. The fourth power
    of that over t, for both ends of an interval, is d^5 / 160. An edge may be off by more than a token's own logit, so it is four
    times that. Of simulated models it was 0.07 to 0.5 times this (bench/audit.md)."""
    return min(1.0, _mean(np.minimum(differences ** (GROSS_POWER + 1) / 40, 1.0)))


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else 0.0


def _most(shares: np.ndarray, by: _ByPrompt, of_extreme: np.ndarray) -> float:
    """What the mean of such shares is taken for: at most 1, which says nothing."""
    n = len(shares)
    if not n:
        return 1.0
    all_in_all = NOISE_MARGIN * (float(shares.mean()) + 4 * max(by.error(shares), 1 / n))  # one without an event may hide 1 in n
    return min(1.0, max(LEAST_SHARE, all_in_all, _mean(of_extreme)))


def _toward(level: float, claimed: np.ndarray, recomputed: np.ndarray, suspected: np.ndarray) -> float:
    """What the mean of the products with one suspect's differences is taken for; 1 says nothing."""
    test = NodeTest(HonestMeans(level=level), suspects=("",))
    values = 2 * test.toward("", claimed, recomputed, suspected) - 1
    values = values[~np.isnan(values)]
    if not len(values):
        return 1.0
    return max(LEAST_TOWARD, MARGIN * (abs(float(values.mean())) + 4 * float(values.std()) / math.sqrt(len(values))))
