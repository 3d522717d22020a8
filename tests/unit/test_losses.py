"""The policy loss and group advantages: values against hand calculation, and streaming equal to the whole batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from learner.trainer.advantages import group_advantages
from learner.trainer.losses import k3, merge_stats, policy_loss, report
from learner.trainer.settings import TrainerConfig


def options_with(**settings: Any) -> TrainerConfig:
    return TrainerConfig(model="", checkpoint_dir="", **{"proximal": "trainer", **settings})


def batch(seed: int, rows: int = 6, width: int = 5) -> tuple[torch.Tensor, ...]:
    gen = torch.Generator().manual_seed(seed)
    logprobs = -torch.rand(rows, width, generator=gen) * 2 - 0.05
    behaviour = (logprobs + 0.3 * torch.randn(rows, width, generator=gen)).clamp(max=0.0)
    advantages = torch.randn(rows, generator=gen)
    lengths = torch.randint(1, width + 1, (rows,), generator=gen)
    mask = torch.arange(width)[None, :] < lengths[:, None]
    return logprobs.requires_grad_(), behaviour, advantages, mask


def test_decoupled_gradient_is_minus_weight_times_advantage() -> None:
    logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    behaviour = torch.tensor([[-1.5, -2.2]])
    sums = policy_loss(logprobs, behaviour, torch.tensor([2.0]), torch.tensor([[True, True]]), options_with(tis_cap=1.5))
    sums.loss.backward()
    # exp(0.5) = 1.65 is over the cap, exp(0.2) = 1.22 is not
    assert logprobs.grad is not None
    assert logprobs.grad[0].tolist() == pytest.approx([-2.0 * 1.5, -2.0 * math.exp(0.2)], rel=1e-6)
    assert sums.weight == 2
    assert report(sums.stats)["tis/capped_mean"] == 0.5


def test_behaviour_proximal_clips_asymmetrically() -> None:
    # ratios 1.5 (A > 0: clipped high), 1.25 (inside 1.28), 0.7 (A < 0: clipped low), 0.7 (A > 0: not clipped)
    ratios = torch.tensor([[1.5, 1.25], [0.7, 0.7]])
    behaviour = torch.full((2, 2), -3.0)
    logprobs = (behaviour + ratios.log()).requires_grad_()
    mask = torch.tensor([[True, True], [True, False]])
    sums = policy_loss(logprobs, behaviour, torch.tensor([1.0, -1.0]), mask, options_with(proximal="behaviour"))
    sums.loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.flatten().tolist() == pytest.approx([0.0, -1.25, 0.0, 0.0], abs=1e-5)
    stats = report(sums.stats)
    assert stats["clip_ratio/high_mean"] == pytest.approx(1 / 3)
    assert stats["clip_ratio/low_mean"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("proximal", ["trainer", "behaviour"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_hardly_likely_token_does_not_turn_the_step_to_nan(proximal: str, advantage: float) -> None:
    """exp(99) overflows float32; the other token's gradient is what it would be without it."""
    options = options_with(proximal=proximal, kl_coef=0.1)
    logprobs = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    behaviour, reference = torch.tensor([[-100.0, -1.0]]), torch.tensor([[-1.0, 98.0]])
    mask = torch.tensor([[True, True]])
    sums = policy_loss(logprobs, behaviour, torch.tensor([advantage]), mask, options, reference=reference)
    sums.loss.backward()
    assert logprobs.grad is not None and bool(torch.isfinite(logprobs.grad).all()) and math.isfinite(sums.loss.item())
    assert float(logprobs.grad[0, 1]) == pytest.approx(-advantage, rel=1e-6)
    assert all(math.isfinite(v) for v in report(sums.stats).values())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_missing_behaviour_logprobs_are_refused_not_filled(value: float) -> None:
    logprobs, behaviour, advantages, mask = batch(0)
    behaviour[1, 0] = value
    with pytest.raises(ValueError, match=r"rows \[1\]"):
        policy_loss(logprobs, behaviour, advantages, mask, options_with())


def test_what_stands_at_padding_does_not_matter() -> None:
    logprobs, behaviour, advantages, mask = batch(1)
    garbage = torch.where(mask, behaviour, torch.full_like(behaviour, math.nan))
    a = policy_loss(logprobs, behaviour, advantages, mask, options_with())
    b = policy_loss(logprobs, garbage, advantages, mask, options_with())
    assert a.loss.item() == b.loss.item()
    assert a.stats == b.stats


@pytest.mark.parametrize("aggregate", ["token", "sequence", "constant"])
@pytest.mark.parametrize("proximal", ["trainer", "behaviour"])
def test_parts_sum_to_the_whole(aggregate: str, proximal: str) -> None:
    options = options_with(aggregate=aggregate, proximal=proximal, max_new_tokens=5)
    logprobs, behaviour, advantages, mask = batch(2)
    whole = policy_loss(logprobs, behaviour, advantages, mask, options)
    (grad,) = torch.autograd.grad(whole.loss, logprobs)
    total, weight, stats = torch.zeros_like(grad), 0.0, dict[str, float]()
    for rows in (slice(4, 6), slice(0, 1), slice(1, 4)):
        part = policy_loss(logprobs[rows], behaviour[rows], advantages[rows], mask[rows], options)
        total += torch.autograd.grad(part.loss, logprobs)[0]
        weight += part.weight
        merge_stats(stats, part.stats)
    assert weight == whole.weight
    torch.testing.assert_close(total / weight, grad / whole.weight, rtol=1e-6, atol=1e-7)
    assert report(stats) == pytest.approx(report(whole.stats), rel=1e-5)


def test_aggregates_weigh_tokens_as_documented() -> None:
    logprobs = torch.full((2, 4), -1.0, requires_grad=True)
    mask = torch.tensor([[True] * 4, [True, False, False, False]])
    args = (logprobs, torch.full((2, 4), -1.0), torch.tensor([-1.0, -1.0]), mask)
    token = policy_loss(*args, options_with(aggregate="token"))
    sequence = policy_loss(*args, options_with(aggregate="sequence"))
    constant = policy_loss(*args, options_with(aggregate="constant", max_new_tokens=8))
    assert (token.loss.item(), token.weight) == (5.0, 5)
    assert (sequence.loss.item(), sequence.weight) == (2.0, 2)
    assert (constant.loss.item(), constant.weight) == (5 / 8, 2)


def test_k3_estimates_kl() -> None:
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.3, 0.2])
    expected = float((p * (p / q).log()).sum())
    assert float((p * k3((q / p).log())).sum()) == pytest.approx(expected, rel=1e-5)  # expectation over p is exact
    assert bool((k3(torch.linspace(-3, 3, 13)) >= 0).all())


def test_kl_to_the_reference_pulls_back() -> None:
    logprobs = torch.tensor([[-1.0]], requires_grad=True)
    args = (logprobs, torch.tensor([[-1.0]]), torch.tensor([0.0]), torch.tensor([[True]]))
    policy_loss(*args, options_with(kl_coef=0.1), reference=torch.tensor([[-2.0]])).loss.backward()
    assert logprobs.grad is not None and logprobs.grad.item() > 0  # descent lowers an over-likely token
    with pytest.raises(ValueError, match="reference"):
        policy_loss(*args, options_with(kl_coef=0.1))


def test_group_advantages() -> None:
    scaled = group_advantages([0.0, 1.0])
    assert scaled.dtype == np.float32
    assert scaled.tolist() == pytest.approx([-0.5 / (0.5**0.5 + 1e-4), 0.5 / (0.5**0.5 + 1e-4)])
    assert group_advantages([0.0, 1.0], scale=False).tolist() == [-0.5, 0.5]
    assert group_advantages([0.1, 0.1, 0.1]).tolist() == [0.0, 0.0, 0.0]  # exactly: 0.1 summed thrice is not 0.3
    assert group_advantages([3.0]).tolist() == [0.0]
    for bad in ([], [math.nan, 1.0]):
        with pytest.raises(ValueError):
            group_advantages(bad)
