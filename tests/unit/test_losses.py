"""The policy loss and group advantages: values against hand calculation, and streaming equal to the whole batch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from learner.rollouts.group_spec import RolloutSettings
from learner.rollouts.outcomes import Sampling
from learner.trainer.advantages import group_advantages
from learner.trainer.losses import LossSums, RowFacts, k3, merge_stats, policy_loss, report, weight_of
from learner.trainer.objectives.port import SampledTokens
from learner.trainer.objectives.registry import make_objective
from learner.trainer.packing import ForwardRow, GroupFacts
from learner.trainer.settings import TrainerConfig
from learner.trajectory import Group, Trajectory, overlong_penalty
from p2p.protocol.rollout import Span
from p2p.version import Version


def options_with(**settings: Any) -> TrainerConfig:
    return TrainerConfig(model="", checkpoint_dir="", **{"objective": "decoupled", **settings})


class Batch(NamedTuple):
    sampled: SampledTokens
    facts: RowFacts
    rows: list[ForwardRow]


def row_of(tokens: int, advantage: float, group: GroupFacts) -> ForwardRow:
    trajectory = Trajectory(
        prompt_ids=(1,), completion_ids=(2,) * tokens, logprobs=(-1.0,) * tokens, spans=(Span(Version(1, 0), 0, tokens),),
        finish="stop", node="n", seed=0, reward=0.0,
    )  # fmt: skip
    return ForwardRow(0, trajectory, advantage, group)


def batch_of(logprobs: Sequence[Tensor], behaviour: Sequence[Tensor], advantages: Sequence[float], ages: int = 0) -> Batch:
    """Of one group; a tensor [tokens] a row. The gradient is that of the rows' tensors."""
    lengths = torch.tensor([len(row) for row in logprobs])
    group = GroupFacts(len(logprobs), int(lengths.sum()))
    pi = torch.cat(list(logprobs))
    numbers = torch.repeat_interleave(torch.arange(len(logprobs)), lengths)
    return Batch(
        SampledTokens(
            logprobs=pi, behaviour=torch.cat(list(behaviour)), proximal=pi.detach(), row=numbers, lengths=lengths.float(),
            advantages=torch.tensor(list(advantages)), group_constants=torch.zeros(len(logprobs)),
        ),
        RowFacts(torch.full((len(logprobs),), float(group.tokens)), torch.full((len(pi),), ages)),
        [row_of(int(n), float(a), group) for n, a in zip(lengths, advantages, strict=True)],
    )  # fmt: skip


def loss(batch: Batch, config: TrainerConfig, **more: Any) -> LossSums:
    return policy_loss(batch.sampled, make_objective(config.objective, config.objective_options), config, batch.facts, **more)


def drawn(seed: int, rows: int = 6, width: int = 5) -> tuple[list[Tensor], list[Tensor], list[float]]:
    gen = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, width + 1, (rows,), generator=gen).tolist()
    logprobs = [-torch.rand(n, generator=gen) * 2 - 0.05 for n in lengths]
    behaviour = [(row + 0.3 * torch.randn(len(row), generator=gen)).clamp(max=0.0) for row in logprobs]
    return [row.requires_grad_() for row in logprobs], behaviour, torch.randn(rows, generator=gen).tolist()


def test_statistics_say_what_was_clipped() -> None:
    # ratios 1.5 (A > 0: clipped high), 1.25 (inside 1.28), 0.7 (A < 0: clipped low)
    ratios = [torch.tensor([1.5, 1.25]), torch.tensor([0.7])]
    behaviour = [torch.full_like(row, -3.0) for row in ratios]
    logprobs = [(-3.0 + row.log()).requires_grad_() for row in ratios]
    sums = loss(batch_of(logprobs, behaviour, [1.0, -1.0], ages=3), options_with(objective="grpo"))
    sums.loss.backward()
    assert [row.grad.tolist() for row in logprobs if row.grad is not None] == [pytest.approx([0.0, -1.25]), [0.0]]
    stats = report(sums.stats)
    assert stats["clip_ratio/high_mean"] == stats["clip_ratio/low_mean"] == pytest.approx(1 / 3)
    assert stats["objective/weight_mean"] == pytest.approx(1.25 / 3)
    assert stats["off_policy/effective"] == pytest.approx(3.45**2 / (1.5**2 + 1.25**2 + 0.7**2) / 3, rel=1e-5)
    assert stats["mismatch_kl/age_2"] == pytest.approx(stats["mismatch_kl/mean"]) and "mismatch_kl/age_0" not in stats


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_missing_behaviour_logprobs_are_refused_not_filled(value: float) -> None:
    logprobs, behaviour, advantages = drawn(0)
    behaviour[1][0] = value
    with pytest.raises(ValueError, match=r"rows \[1\]"):
        loss(batch_of(logprobs, behaviour, advantages), options_with())


@pytest.mark.parametrize("aggregate", ["token", "sequence", "group", "constant"])
@pytest.mark.parametrize("objective", ["grpo", "gspo", "decoupled"])
def test_parts_sum_to_the_whole(aggregate: Any, objective: str) -> None:
    options = options_with(aggregate=aggregate, objective=objective, max_new_tokens=5)
    logprobs, behaviour, advantages = drawn(2)
    batch = batch_of(logprobs, behaviour, advantages)
    whole = loss(batch, options)
    gradient = torch.cat(torch.autograd.grad(whole.loss, logprobs))
    total, weight, stats = torch.zeros(len(gradient)), 0.0, dict[str, float]()
    for rows in (slice(4, 6), slice(0, 1), slice(1, 4)):
        part = batch_of(logprobs[rows], behaviour[rows], advantages[rows])
        tokens = torch.full((len(part.rows),), float(len(gradient)))  # the group's, of which this is a part
        sums = loss(part._replace(facts=RowFacts(tokens, part.facts.ages)), options)
        parts = torch.autograd.grad(sums.loss, logprobs[rows])
        at = sum(len(row) for row in logprobs[: rows.start])
        for grad in parts:
            total[at : at + len(grad)] += grad
            at += len(grad)
        weight += weight_of(batch.rows[rows], aggregate)
        merge_stats(stats, sums.stats)
    assert weight == pytest.approx(weight_of(batch.rows, aggregate), rel=1e-12)
    torch.testing.assert_close(total, gradient, rtol=1e-6, atol=1e-7)
    assert report(stats) == pytest.approx(report(whole.stats), rel=1e-5)


def test_aggregates_weigh_tokens_as_documented() -> None:
    logprobs = [torch.full((4,), -1.0, requires_grad=True), torch.full((1,), -1.0, requires_grad=True)]
    batch = batch_of(logprobs, [row.detach() for row in logprobs], [-1.0, -1.0])

    def of(aggregate: Any) -> tuple[float, float]:
        return loss(batch, options_with(aggregate=aggregate, max_new_tokens=8)).loss.item(), weight_of(batch.rows, aggregate)

    assert of("token") == (5.0, 5.0)
    assert of("sequence") == (2.0, 2.0)
    assert of("group") == (1.0, 1.0)
    assert of("constant") == (5 / 8, 2.0)


def test_k3_estimates_kl() -> None:
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.3, 0.2])
    expected = float((p * (p / q).log()).sum())
    assert float((p * k3((q / p).log())).sum()) == pytest.approx(expected, rel=1e-5)  # expectation over p is exact
    assert bool((k3(torch.linspace(-3, 3, 13)) >= 0).all())


def test_kl_to_the_reference_pulls_back() -> None:
    logprobs = [torch.tensor([-1.0], requires_grad=True)]
    batch = batch_of(logprobs, [torch.tensor([-1.0])], [0.0])
    loss(batch, options_with(kl_coef=0.1), reference=torch.tensor([-2.0])).loss.backward()
    assert logprobs[0].grad is not None and logprobs[0].grad.item() > 0  # descent lowers an over-likely token
    with pytest.raises(ValueError, match="reference"):
        loss(batch, options_with(kl_coef=0.1))


def test_a_weighed_kl_is_unbiased_for_stale_tokens() -> None:
    """Over all tokens of a vocabulary as mu draws them: the KL divergence of pi from the reference, and its own gradient."""
    mu, ref = (torch.log_softmax(torch.tensor(x, dtype=torch.float64), 0) for x in ([0, 0.5, 0.3], [0.4, 0, 0]))
    logits = torch.tensor([1.0, 0.2, -1.0], dtype=torch.float64, requires_grad=True)
    policy = torch.log_softmax(logits, 0)
    true = (policy.exp() * (policy - ref)).sum()
    (wanted,) = torch.autograd.grad(true, logits, retain_graph=True)
    got = torch.zeros((), dtype=torch.float64)
    for token in range(3):
        batch = batch_of([policy[token : token + 1]], [mu[token : token + 1]], [0.0])
        sums = loss(batch, options_with(kl_coef=1.0, kl_off_policy="weigh"), reference=ref[token : token + 1])
        got = got + mu[token].exp() * sums.loss
    assert got.item() == pytest.approx(true.item(), rel=1e-9)
    torch.testing.assert_close(torch.autograd.grad(got, logits)[0], wanted, rtol=1e-9, atol=1e-12)


def test_an_entropy_bonus_spreads_the_policy() -> None:
    logits = torch.tensor([1.0, -1.0], requires_grad=True)
    policy = torch.log_softmax(logits, 0)
    entropy = -(policy.exp() * policy).sum()[None]
    batch = batch_of([policy[:1]], [policy[:1].detach()], [0.0])
    loss(batch, options_with(entropy_coef=0.1), entropy=entropy).loss.backward()
    assert logits.grad is not None and logits.grad[0].item() > 0 > logits.grad[1].item()


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


def test_leave_one_out_and_overlong() -> None:
    assert group_advantages([0.0, 1.0, 1.0], scale=False, leave_one_out=True).tolist() == pytest.approx([-1.0, 0.5, 0.5])
    assert [overlong_penalty(n, 100, 20) for n in (10, 80, 90, 100)] == [0.0, 0.0, 0.5, 1.0]
    assert overlong_penalty(100, 100, 0) == 0.0


@pytest.mark.parametrize(
    ("rewards", "lengths", "soft", "taken"),
    [
        ([1.0, 1.0], [3, 9], 0, False),
        ([1.0, 1.0], [3, 9], 4, True),  # by length alone: 9 of 10 tokens are 3 into the last 4
        ([1.0, 1.0], [9, 9], 4, False),
        ([0.25, 1.0], [6, 9], 4, False),  # what the longer has more, it loses
        ([0.0, 1.0], [3, 9], 0, True),
    ],
)
def test_what_differs_as_it_is_trained_on_is_not_dropped(
    rewards: list[float], lengths: list[int], soft: int, taken: bool
) -> None:
    settings = RolloutSettings(
        max_staleness=0, groups_per_step=1, samples=2, seed=0, sampling=Sampling(10, (0,), 1.0, 1.0), micro_batch_groups=1,
        keep_equal=False, overlong_tokens=soft,
    )  # fmt: skip
    rows = [row_of(n, 0.0, GroupFacts()).trajectory for n in lengths]
    group = Group(0, 0, tuple(dataclasses.replace(t, reward=r) for t, r in zip(rows, rewards, strict=True)))
    assert settings.takes(group) == taken
    advantages = group_advantages(group.shaped(10, soft))
    assert bool(np.any(advantages != 0)) == taken
    assert dataclasses.replace(settings, keep_equal=True).takes(group)
