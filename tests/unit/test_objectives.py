"""Each objective against a plain program of its paper's formula, in fp64: value and gradient. And what a step makes of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.section import wrong_keys
from learner.trainer.objectives.docs import objectives_markdown
from learner.trainer.objectives.port import SampledTokens
from learner.trainer.objectives.registry import OBJECTIVES, make_objective
from learner.trainer.settings import TrainerSection
from p2p.errors import UsageError

Rows = list[list[float]]
Plain = Callable[..., float]


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def ppo(ratio: float, a: float, low: float, high: float) -> float:
    return -min(ratio * a, clip(ratio, 1 - low, 1 + high) * a)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# The formulas, a whole batch each: `pi` are log probabilities, `held` the same where no gradient is taken through them, `prox`
# those at the start of the step. A loss of whole completions is counted once for each of its tokens, over its length.


def plain_grpo(pi: Rows, held: Rows, mu: Rows, prox: Rows, a: list[float], o: dict[str, Any]) -> float:
    total = 0.0
    for row, advantage in enumerate(a):
        for x, sg, m in zip(pi[row], held[row], mu[row], strict=True):
            ratio = math.exp(x - m)
            if advantage < 0 and ratio > o["cap"]:
                grown = 1.0 if o["beyond"] == "drop" else 1 + x - sg
                total += -o["cap"] * advantage * grown
            else:
                total += ppo(ratio, advantage, o["clip_low"], o["clip_high"])
    return total


def plain_gspo(pi: Rows, held: Rows, mu: Rows, prox: Rows, a: list[float], o: dict[str, Any]) -> float:
    total = 0.0
    for row, advantage in enumerate(a):
        s = math.exp(mean([x - m for x, m in zip(pi[row], mu[row], strict=True)]))
        total += len(pi[row]) * ppo(s, advantage, o["clip_low"], o["clip_high"])
    return total


def plain_cispo(pi: Rows, held: Rows, mu: Rows, prox: Rows, a: list[float], o: dict[str, Any]) -> float:
    return sum(
        -clip(math.exp(sg - m), o["low"], o["high"]) * a[row] * x
        for row in range(len(a))
        for x, sg, m in zip(pi[row], held[row], mu[row], strict=True)
    )


def plain_difference(pi: Rows, held: Rows, mu: Rows, prox: Rows, a: list[float], o: dict[str, Any]) -> float:
    total = 0.0
    for row, advantage in enumerate(a):
        for x, sg, m in zip(pi[row], held[row], mu[row], strict=True):
            moved = math.exp(sg) - math.exp(m)
            if o["one_sided"]:
                out = moved > o["distance"] if advantage > 0 else moved < -o["distance"]
            else:
                out = abs(moved) > o["distance"]
            total += 0.0 if out else -math.exp(x - m) * advantage
            total += o["penalty"] * (x - m) ** 2
    return total


def plain_decoupled(pi: Rows, held: Rows, mu: Rows, prox: Rows, a: list[float], o: dict[str, Any]) -> float:
    total = 0.0
    for row, advantage in enumerate(a):
        product = math.prod(math.exp(p - m) for p, m in zip(prox[row], mu[row], strict=True))
        for x, m, p in zip(pi[row], mu[row], prox[row], strict=True):
            weight = min(math.exp(p - m) if o["level"] == "token" else product, o["cap"])
            total += weight * ppo(math.exp(x - p), advantage, o["clip_low"], o["clip_high"])
    return total


def plain_masked(pi: Rows, held: Rows, mu: Rows, prox: Rows, a: list[float], o: dict[str, Any]) -> float:
    total = 0.0
    for row, advantage in enumerate(a):
        geometric = math.exp(mean([p - m for p, m in zip(prox[row], mu[row], strict=True)]))
        for x, m, p in zip(pi[row], mu[row], prox[row], strict=True):
            weight = math.exp(p - m) if o["level"] == "token" else geometric
            if o["low"] <= weight <= o["high"]:
                total += weight * ppo(math.exp(x - p), advantage, o["clip_low"], o["clip_high"])
    return total


def plain_topr(pi: Rows, held: Rows, mu: Rows, prox: Rows, a: list[float], o: dict[str, Any]) -> float:
    total = 0.0
    for row, advantage in enumerate(a):
        product = math.prod(math.exp(sg - m) for sg, m in zip(held[row], mu[row], strict=True))
        for x, sg, m in zip(pi[row], held[row], mu[row], strict=True):
            weight = 1.0
            if advantage < 0:
                weight = min(product if o["level"] == "sequence" else math.exp(sg - m), o["cap"])
            total += -weight * advantage * x
    return total


def plain_m2po(pi: Rows, held: Rows, mu: Rows, prox: Rows, a: list[float], o: dict[str, Any]) -> float:
    left = [
        ((sg - m) ** 2, x - m, a[row])
        for row in range(len(a))
        for x, sg, m in zip(pi[row], held[row], mu[row], strict=True)
    ]
    while left and mean([square for square, _, _ in left]) > o["moment"]:
        left.remove(max(left))
    return sum(-math.exp(log_ratio) * advantage for _, log_ratio, advantage in left)


def plain_gepo(pi: Rows, held: Rows, mu: Rows, prox: Rows, a: list[float], o: dict[str, Any]) -> float:
    q = [math.exp(mean(row)) for row in mu]
    expected = sum(x * x for x in q) / sum(q)
    return sum(
        len(row) * ppo(math.exp(mean(row)) / expected, advantage, o["clip_low"], o["clip_high"])
        for row, advantage in zip(pi, a, strict=True)
    )


CASES: list[tuple[str, dict[str, Any], Plain]] = [
    ("grpo", {}, plain_grpo),
    ("grpo", {"clip_low": 0.1, "clip_high": 0.4, "cap": 1.2, "beyond": "keep"}, plain_grpo),
    ("gspo", {}, plain_gspo),
    ("gspo", {"clip_low": 0.3, "clip_high": 0.3}, plain_gspo),
    ("cispo", {}, plain_cispo),
    ("cispo", {"low": 0.9, "high": 1.1}, plain_cispo),
    ("difference", {}, plain_difference),
    ("difference", {"distance": 0.1, "one_sided": True, "penalty": 1e-3}, plain_difference),
    ("decoupled", {}, plain_decoupled),
    ("decoupled", {"level": "sequence", "cap": 1.5}, plain_decoupled),
    ("masked", {}, plain_masked),
    ("masked", {"level": "sequence", "low": 0.8, "high": 1.2}, plain_masked),
    ("topr", {}, plain_topr),
    ("topr", {"level": "token"}, plain_topr),
    ("m2po", {}, plain_m2po),
    ("m2po", {"moment": 0.2}, plain_m2po),
    ("gepo", {}, plain_gepo),
]
"""An objective's name, its options, and its formula."""


def draw(seed: int, rows: int = 5) -> tuple[Rows, Rows, Rows, list[float]]:
    """log pi, log mu, log pi_prox and advantages of one group."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 7, rows)
    pi = [(-rng.exponential(1.0, n) - 0.01).tolist() for n in lengths]
    mu = [[min(-1e-3, x + d) for x, d in zip(row, rng.normal(0, 0.4, len(row)), strict=True)] for row in pi]
    prox = [[min(-1e-3, x + d) for x, d in zip(row, rng.normal(0, 0.2, len(row)), strict=True)] for row in pi]
    advantages = rng.normal(0, 1, rows).tolist()
    return pi, mu, prox, advantages


def flat(rows: Rows) -> torch.Tensor:
    return torch.tensor([x for row in rows for x in row], dtype=torch.float64)


def sampled(pi: torch.Tensor, mu: Rows, prox: Rows, a: list[float], constant: float) -> SampledTokens:
    lengths = torch.tensor([len(row) for row in mu])
    return SampledTokens(
        logprobs=pi, behaviour=flat(mu), proximal=flat(prox), row=torch.repeat_interleave(torch.arange(len(mu)), lengths),
        lengths=lengths.double(), advantages=torch.tensor(a, dtype=torch.float64),
        group_constants=torch.full((len(mu),), constant, dtype=torch.float64),
    )  # fmt: skip


@pytest.mark.parametrize(("name", "options", "plain"), CASES, ids=lambda value: str(value) if isinstance(value, str) else "")
@pytest.mark.parametrize("seed", range(12))
def test_loss_and_gradient_are_the_formulas(name: str, options: dict[str, Any], plain: Plain, seed: int) -> None:
    objective = make_objective(name, options)
    pi, mu, prox, a = draw(seed)
    settings = objective.model_dump()
    leaf = flat(pi).requires_grad_()
    terms = objective.terms(sampled(leaf, mu, prox, a, objective.group_constant(mu)))
    value = terms.loss.sum().item()
    (gradient,) = torch.autograd.grad(terms.loss.sum(), leaf)
    assert value == pytest.approx(plain(pi, pi, mu, prox, a, settings), rel=1e-12, abs=1e-12)

    step = 1e-6
    at = 0
    for row in range(len(pi)):
        for token in range(len(pi[row])):
            there, back = [list(r) for r in pi], [list(r) for r in pi]
            there[row][token] += step
            back[row][token] -= step
            slope = (plain(there, pi, mu, prox, a, settings) - plain(back, pi, mu, prox, a, settings)) / (2 * step)
            assert float(gradient[at]) == pytest.approx(slope, rel=1e-6, abs=1e-7), (row, token)
            at += 1


@pytest.mark.parametrize("name", OBJECTIVES)
@given(seed=st.integers(0, 10_000))
def test_the_weight_is_what_a_token_s_gradient_has(name: str, seed: int) -> None:
    """The statistics say what the gradient does: - weight * advantage, averaged over the row."""
    objective = make_objective(name, {})
    pi, mu, prox, a = draw(seed)
    leaf = flat(pi).requires_grad_()
    batch = sampled(leaf, mu, prox, a, objective.group_constant(mu))
    terms = objective.terms(batch)
    (gradient,) = torch.autograd.grad(batch.row_mean(terms.loss).sum(), leaf)
    expected = -terms.weight * batch.advantage / batch.lengths[batch.row]
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_on_policy_each_is_plain_policy_gradient(name: str) -> None:
    """With pi = mu = pi_prox nothing is clipped, masked or weighed (GEPO weighs by the group even then)."""
    objective = make_objective(name, {})
    pi, _, _, a = draw(3)
    if name == "gepo":
        pi = [[-0.7] * len(row) for row in pi]
    terms = objective.terms(sampled(flat(pi).requires_grad_(), pi, pi, a, objective.group_constant(pi)))
    torch.testing.assert_close(terms.weight, torch.ones_like(terms.weight), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_hardly_likely_token_does_not_turn_the_step_to_nan(name: str, advantage: float) -> None:
    """exp(99) overflows float32."""
    objective = make_objective(name, {})
    leaf = torch.tensor([-1.0, -1.0], requires_grad=True)
    mu = [[-100.0], [-1.0]]
    batch = SampledTokens(
        logprobs=leaf, behaviour=torch.tensor([-100.0, -1.0]), proximal=leaf.detach(), row=torch.tensor([0, 1]),
        lengths=torch.ones(2), advantages=torch.full((2,), advantage),
        group_constants=torch.full((2,), objective.group_constant(mu)),
    )  # fmt: skip
    terms = objective.terms(batch)
    (gradient,) = torch.autograd.grad(terms.loss.sum(), leaf)
    assert bool(torch.isfinite(gradient).all()) and bool(torch.isfinite(terms.loss).all())


def test_an_unknown_name_or_option_is_said_with_what_was_meant() -> None:
    with pytest.raises(UsageError, match=r"unknown objective 'gsp'.*did you mean 'gspo'"):
        make_objective("gsp", {})
    with pytest.raises(UsageError, match=r"objective cispo: hig: .*did you mean high"):
        make_objective("cispo", {"hig": 2.0})
    with pytest.raises(UsageError, match=r"clip_low: .*greater than or equal to 0"):
        make_objective("grpo", {"clip_low": -0.1})


@pytest.mark.parametrize("name", ["cispo", "masked"])
def test_bounds_that_leave_nothing_between_them_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=rf"objective {name}: low = 3 is above high = 1"):
        make_objective(name, {"low": 3.0, "high": 1.0})
    with pytest.raises(UsageError, match=rf"objective {name}: low = 6 is above high = 5"):
        make_objective(name, {"low": 6.0})  # above the default
    same = make_objective(name, {"low": 1.0, "high": 1.0})
    assert same.terms(sampled(flat([[-1.0]]), [[-1.0]], [[-1.0]], [1.0], 0.0)).weight == 1


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"kl_coef": 0.1}, True),
        ({"entropy_coef": 0.1}, True),
        ({"objective": "difference", "objective_options": {"penalty": 0.1}}, True),
        ({"objective": "difference"}, False),
        ({"objective": "difference", "objective_options": {"penalty": 0.1}, "scale_advantages": "group"}, False),
    ],
)
def test_advantages_scaled_by_the_batch_need_a_gradient_of_advantages_alone(settings: dict[str, Any], refused: bool) -> None:
    found = wrong_keys(TrainerSection, {"scale_advantages": "batch", **settings})
    assert bool(found) == refused and all('scale_advantages = "batch"' in wrong.what for wrong in found)


def test_the_page_has_every_objective_and_option() -> None:
    page = objectives_markdown()
    for name, kind in OBJECTIVES.items():
        assert f"## {name} " in page
        assert all(f"| `{key}` |" in page for key in kind.model_fields)
