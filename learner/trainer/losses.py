"""The policy loss. Pure torch on padded tensors: no model, no optimizer, no network, no clock.

What is computed is a *sum* over tokens and the weight it must be divided by, never a mean. Micro-batches stream in
before the step's other groups exist; gradients of sums add up, and one division before the optimizer step makes the
streamed step equal to the whole-batch step (RLBoost, arXiv 2510.19225, micro-batch pipelining).

The objective is GRPO's clipped surrogate (arXiv 2402.03300) with clip-higher (DAPO, arXiv 2503.14476), in decoupled
form (AReaL, arXiv 2505.24298): the proximal policy `pi_old` is the trainer's own at the start of the step, and what
the rollout policy `mu` (older weights, another engine, bf16) did differently is a truncated importance weight:

    loss = - min(pi_old / mu, tis_cap) * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A),   r = pi / pi_old

With one optimizer step per batch pi == pi_old in value, so r is 1, the clip is idle and only the weight acts.
`proximal="behaviour"` is the other common choice: r = min(pi / mu, tis_cap), clipped; staleness then meets
the trust region itself, which stops pushing tokens that have already moved far (the form GRPO trainers use
off-policy).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.trainer.settings import TrainerConfig

MAX_LOG_RATIO = 20.0
"""Nats: log ratios are cut to this size, since one token with exp(100) would outweigh the step or make it NaN."""


@dataclass(frozen=True, slots=True)
class LossSums:
    """Sums over one micro-batch; sums of two micro-batches add up. Divide `loss` by `weight` for the step's loss."""

    loss: Tensor
    """scalar with gradient"""
    weight: float
    """tokens for "token", sequences otherwise"""
    stats: dict[str, float]
    """sums over tokens, and `mismatch_kl_max`; see `merge_stats` and `report`"""


def check_logprobs(behaviour: Tensor, mask: Tensor) -> None:
    """ValueError where a real token has no usable behaviour logprob. Zeros in their place would read as certainty and
    corrupt every ratio silently, so nothing is ever filled in."""
    bad = mask & ~torch.isfinite(behaviour)
    if bool(bad.any()):
        rows = sorted({int(i) for i in bad.nonzero()[:, 0]})
        raise ValueError(f"missing or non-finite behaviour logprobs in {int(bad.sum())} tokens of rows {rows}")
    if bool((mask & (behaviour > 1e-3)).any()):
        raise ValueError("behaviour logprobs above 0: these are not log probabilities")


def policy_loss(
    logprobs: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    mask: Tensor,
    config: TrainerConfig,
    *,
    reference: Tensor | None = None,
) -> LossSums:
    """The step's loss, summed over this micro-batch.

    `logprobs`   [B, T] trainer's log probability of each completion token, with gradient
    `behaviour`  [B, T] the rollout engine's, as it reported them; anything where the mask is False
    `advantages` [B]    one per sequence
    `mask`       [B, T] bool, True at sampled completion tokens (not at padding, not at what an environment gave): loss,
                 weight and every statistic are over these alone
    `reference`  [B, T] the reference model's, when kl_coef > 0

    ValueError on missing or non-finite behaviour logprobs.
    """
    check_logprobs(behaviour, mask)
    behaviour = torch.where(mask, behaviour, logprobs.detach())  # [B, T], padding gives ratio 1 and is masked below
    proximal = logprobs.detach() if config.proximal == "trainer" else behaviour
    log_ratio = logprobs - proximal
    if config.proximal == "behaviour":
        # The ratio is itself the importance weight: truncate it, or a token of negative advantage that the trainer has
        # since come to prefer weighs without bound. Before exp: of an overflow, clamp's backward would be 0 * inf.
        log_ratio = log_ratio.clamp(max=math.log(config.tis_cap))
    ratio = torch.exp(log_ratio)  # [B, T]
    clipped = torch.clamp(ratio, 1 - config.clip_low, 1 + config.clip_high)
    advantage = advantages[:, None]  # [B, 1]
    per_token = -torch.minimum(ratio * advantage, clipped * advantage)  # [B, T]

    log_mismatch = (logprobs.detach() - behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)  # log pi/mu
    if config.proximal == "trainer":
        per_token = per_token * torch.exp(log_mismatch).clamp(max=config.tis_cap)
    if config.kl_coef:
        if reference is None:
            raise ValueError("kl_coef > 0 needs reference logprobs")
        per_token = per_token + config.kl_coef * k3(reference - logprobs)

    per_token = torch.where(mask, per_token, torch.zeros_like(per_token))
    lengths = mask.sum(dim=1)  # [B]
    if config.aggregate == "token":
        loss, weight = per_token.sum(), float(lengths.sum())
    elif config.aggregate == "sequence":
        loss, weight = (per_token.sum(dim=1) / lengths.clamp(min=1)).sum(), float(len(lengths))
    else:
        loss, weight = per_token.sum() / config.max_new_tokens, float(len(lengths))

    with torch.no_grad():
        low = (ratio < 1 - config.clip_low) & (advantage < 0) & mask
        high = (ratio > 1 + config.clip_high) & (advantage > 0) & mask
        mismatch = torch.where(mask, k3(log_mismatch), torch.zeros_like(log_mismatch))
        stats = {
            "tokens": float(lengths.sum()),
            "clip_low": float(low.sum()),
            "clip_high": float(high.sum()),
            "tis_capped": float(((log_mismatch.exp() > config.tis_cap) & mask).sum()),
            "ratio": float(torch.where(mask, log_mismatch.exp(), torch.zeros_like(log_mismatch)).sum()),
            "mismatch_kl": float(mismatch.sum()),
            "mismatch_kl_max": float(mismatch.max()) if mismatch.numel() else 0.0,
        }
    return LossSums(loss, weight, stats)


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
    """Metrics of the whole step from its merged sums. `mismatch_kl` is KL(mu || pi), k3, over completion tokens."""
    tokens = max(total.get("tokens", 0.0), 1.0)
    return {
        "clip_ratio/low_mean": total.get("clip_low", 0.0) / tokens,
        "clip_ratio/high_mean": total.get("clip_high", 0.0) / tokens,
        "tis/capped_mean": total.get("tis_capped", 0.0) / tokens,
        "ratio/mean": total.get("ratio", 0.0) / tokens,
        "mismatch_kl/mean": total.get("mismatch_kl", 0.0) / tokens,
        "mismatch_kl/max": total.get("mismatch_kl_max", 0.0),
        "entropy": total.get("entropy", 0.0) / tokens,
    }
