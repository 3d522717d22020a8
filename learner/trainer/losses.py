"""The loss of a step: what an objective makes of each token, averaged. Pure torch: no model, no optimizer, no network, no clock.

What is computed is a *sum* over tokens and the weight it must be divided by, never a mean. Micro-batches stream in
before the step's other groups exist; gradients of sums add up, and one division before the optimizer step makes the
streamed step equal to the whole-batch step (RLBoost, arXiv 2510.19225, micro-batch pipelining).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.trainer.objectives.port import MAX_LOG_RATIO, Objective, SampledTokens
from learner.trainer.packing import ForwardRow
from learner.trainer.settings import Aggregate, TrainerConfig

AGES = (0, 1, 2, 4, 8, 16)
"""Optimizer steps: tokens are counted apart by their age from here to below the next one."""


@dataclass(frozen=True, slots=True)
class RowFacts:
    """What a forward's rows are, besides their tokens."""

    group_tokens: Tensor
    """float [R]: sampled tokens of the row's whole group"""
    ages: Tensor
    """int64 [N]: optimizer steps between the version that sampled each token and the step that trains on it"""


@dataclass(frozen=True, slots=True)
class LossSums:
    """Sums over one micro-batch; sums of two micro-batches add up. Divided by `weight_of` all rows of the step, `loss` is its
    mean."""

    loss: Tensor
    """scalar with gradient"""
    stats: dict[str, float]
    """sums over tokens, and `mismatch_kl_max`; see `merge_stats` and `report`"""


def check_logprobs(behaviour: Tensor, row: Tensor) -> None:
    """ValueError where a token has no usable behaviour logprob ([N], of the rows [N]). Zeros in their place would read as
    certainty and corrupt every ratio silently, so nothing is ever filled in."""
    bad = ~torch.isfinite(behaviour)
    if bool(bad.any()):
        rows = sorted({int(i) for i in row[bad]})
        raise ValueError(f"missing or non-finite behaviour logprobs in {int(bad.sum())} tokens of rows {rows}")
    if bool((behaviour > 1e-3).any()):
        raise ValueError("behaviour logprobs above 0: these are not log probabilities")


def policy_loss(
    sampled: SampledTokens, objective: Objective, config: TrainerConfig, facts: RowFacts, *,
    reference: Tensor | None = None, entropy: Tensor | None = None,
) -> LossSums:  # fmt: skip
    """The step's loss, summed over this micro-batch.

    `reference`  [N] the reference model's log probabilities, when kl_coef > 0
    `entropy`    [N] nats, with gradient when entropy_coef > 0

    ValueError on missing or non-finite behaviour logprobs.
    """
    check_logprobs(sampled.behaviour, sampled.row)
    terms = objective.terms(sampled)
    per_token = terms.loss
    if config.kl_coef:
        if reference is None:
            raise ValueError("kl_coef > 0 needs reference logprobs")
        kl = k3(reference - sampled.logprobs)
        if config.kl_off_policy == "weigh":
            kl = kl * sampled.log_ratio.exp()
        per_token = per_token + config.kl_coef * kl
    if config.entropy_coef:
        if entropy is None:
            raise ValueError("entropy_coef > 0 needs entropies")
        per_token = per_token - config.entropy_coef * entropy

    if config.aggregate == "token":
        loss = per_token.sum()
    elif config.aggregate == "sequence":
        loss = sampled.row_mean(per_token).sum()
    elif config.aggregate == "group":
        loss = (sampled.row_sum(per_token) / facts.group_tokens).sum()
    else:
        loss = per_token.sum() / config.max_new_tokens
    with torch.no_grad():
        stats = _statistics(sampled, terms.weight, facts.ages)
        if entropy is not None:
            stats["entropy"] = float(entropy.sum())
    return LossSums(loss, stats)


def weight_of(rows: Sequence[ForwardRow], aggregate: Aggregate) -> float:
    """What the sum of these rows' losses counts in the step's mean: tokens for "token", groups for "group" (a row is its part of
    one), completions otherwise."""
    if aggregate == "token":
        return float(sum(row.trajectory.sampled_tokens for row in rows))
    if aggregate == "group":
        return math.fsum(1.0 / row.group.rows for row in rows)
    return float(len(rows))


def _statistics(sampled: SampledTokens, weight: Tensor, ages: Tensor) -> dict[str, float]:
    log_mismatch = sampled.log_ratio.detach()
    ratio, mismatch = log_mismatch.double().exp(), k3(log_mismatch)
    let_go = (weight == 0) & (sampled.advantage != 0)
    stats = {
        "tokens": float(len(log_mismatch)),
        "clip_low": float((let_go & (log_mismatch < 0)).sum()),
        "clip_high": float((let_go & (log_mismatch >= 0)).sum()),
        "weight": float(weight.sum()),
        "ratio": float(ratio.sum()),
        "ratio_square": float(ratio.square().sum()),
        "mismatch_kl": float(mismatch.sum()),
        "mismatch_kl_max": float(mismatch.max()) if mismatch.numel() else 0.0,
    }
    bucket = torch.bucketize(ages, torch.tensor(AGES, device=ages.device), right=True) - 1
    for index, tokens in enumerate(torch.bincount(bucket, minlength=len(AGES)).tolist()):
        if tokens:
            stats[f"tokens/age_{AGES[index]}"] = float(tokens)
            stats[f"mismatch_kl/age_{AGES[index]}"] = float(mismatch[bucket == index].sum())
    return stats


def k3(log_ratio: Tensor) -> Tensor:
    """Schulman's k3 estimate of KL(p || q) from samples of p, given log q/p: exp(x) - x - 1, unbiased and >= 0, up to
    |x| = MAX_LOG_RATIO; beyond it is constant."""
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(log_ratio) - log_ratio


def merge_stats(total: dict[str, float], part: dict[str, float]) -> None:
    """Add one micro-batch's sums to the step's, in place; names ending in _max take the maximum."""
    for name, value in part.items():
        total[name] = max(total.get(name, value), value) if name.endswith("_max") else total.get(name, 0.0) + value


def report(total: dict[str, float]) -> dict[str, float]:
    """Metrics of the whole step from its merged sums; none where no token went through a forward. `mismatch_kl` is KL(mu || pi),
    k3, over sampled tokens; `off_policy/effective` is the effective sample size of the ratios, (sum r)^2 / sum r^2, as a share
    of the tokens."""
    tokens = total.get("tokens", 0.0)
    if not tokens:
        return {}
    metrics = {
        "clip_ratio/low_mean": total["clip_low"] / tokens,
        "clip_ratio/high_mean": total["clip_high"] / tokens,
        "objective/weight_mean": total["weight"] / tokens,
        "ratio/mean": total["ratio"] / tokens,
        "off_policy/effective": total["ratio"] ** 2 / total["ratio_square"] / tokens,
        "mismatch_kl/mean": total["mismatch_kl"] / tokens,
        "mismatch_kl/max": total["mismatch_kl_max"],
    }
    if "entropy" in total:
        metrics["entropy"] = total["entropy"] / tokens
    for age in AGES:
        if aged := total.get(f"tokens/age_{age}", 0.0):
            metrics[f"mismatch_kl/age_{age}"] = total[f"mismatch_kl/age_{age}"] / aged
    return metrics
