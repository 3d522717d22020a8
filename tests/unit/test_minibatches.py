"""Several optimizer updates a step: against a plain fp64 program, however groups arrive, and what the step says of them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.trainer.forward.forward import TokenForward
from learner.trainer.minibatches import HeldGroup, HeldGroups
from learner.trainer.model import load_model
from learner.trainer.policy import PolicyTrainer
from learner.trainer.settings import TrainerConfig
from learner.trainer.trained import WholeModel
from learner.trajectory import Group
from netem.demo.tiny_model import build_random_model
from tests.support.trainer_twins import make_group

CLIP, LR, DECAY, GRAD_CLIP = 0.02, 1e-3, 0.1, 0.5


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_random_model(tmp_path_factory.mktemp("tiny"), size="0.4m")


def settings(folder: Path, **changes: Any) -> TrainerConfig:
    base: dict[str, Any] = {
        "device": "cpu", "threads": 1, "max_new_tokens": 8, "lr_ramp": 0, "lr": LR, "weight_decay": DECAY,
        "grad_clip": GRAD_CLIP, "objective": "decoupled", "objective_options": {"clip_low": CLIP, "clip_high": CLIP},
    }  # fmt: skip
    return TrainerConfig(model=str(folder), checkpoint_dir="unused", **{**base, **changes})


def trainer_of(config: TrainerConfig) -> PolicyTrainer:
    return PolicyTrainer(WholeModel(load_model(config.model, "cpu").model), config)


def groups_of(count: int, seed: int = 0) -> list[Group]:
    """Of one prompt: what is learned of one minibatch moves the others."""
    rng = np.random.default_rng(seed)
    made = [make_group(i, rng) for i in range(count)]
    prompt = made[0].trajectories[0].prompt_ids
    return [
        dataclasses.replace(g, trajectories=tuple(dataclasses.replace(t, prompt_ids=prompt) for t in g.trajectories))
        for g in made
    ]


def weights(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().double() for name, p in trainer.trained.parameters()}


# The plain program: float64, a sequence at a time, AdamW by its formula.


def plain_step(model: torch.nn.Module, groups: list[Group], updates: int, *, centre: str = "start") -> dict[str, torch.Tensor]:
    """The weights after one step. `centre` "now" takes pi itself for pi_prox: what is wrong from the second update on."""
    model = model.double()
    parameters = {n: p for n, p in model.named_parameters()}
    first = {n: torch.zeros_like(p) for n, p in parameters.items()}
    second = {n: torch.zeros_like(p) for n, p in parameters.items()}
    start = [[logprobs_of(model, t).detach() for t in g.trajectories] for g in groups]
    size = len(groups) // updates
    for update in range(updates):
        total, tokens = torch.zeros((), dtype=torch.float64), 0
        for number in range(update * size, (update + 1) * size):
            group = groups[number]
            rewards = torch.tensor(group.rewards, dtype=torch.float64)
            advantages = (rewards - rewards.mean()) / (rewards.std(correction=1) + 1e-4)
            for t, advantage, before in zip(group.trajectories, advantages, start[number], strict=True):
                pi = logprobs_of(model, t)
                prox = before if centre == "start" else pi.detach()
                weight = (prox - torch.tensor(t.logprobs, dtype=torch.float64)).exp().clamp(max=2.0)
                rho = (pi - prox).exp()
                clipped = rho.clamp(1 - CLIP, 1 + CLIP)
                total = total - (weight * torch.minimum(rho * advantage, clipped * advantage)).sum()
                tokens += len(t.completion_ids)
        gradients = dict(zip(parameters, torch.autograd.grad(total / tokens, list(parameters.values())), strict=True))
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
        with torch.no_grad():
            for name, p in parameters.items():
                g = gradients[name] * min(1.0, GRAD_CLIP / norm)
                first[name] = 0.9 * first[name] + 0.1 * g
                second[name] = 0.95 * second[name] + 0.05 * g * g
                m, v = first[name] / (1 - 0.9 ** (update + 1)), second[name] / (1 - 0.95 ** (update + 1))
                decay = 0.0 if p.ndim < 2 or "embed" in name else DECAY
                p.copy_(p * (1 - LR * decay) - LR * m / (v.sqrt() + 1e-8))
    return {n: p.detach().clone() for n, p in parameters.items()}


def logprobs_of(model: torch.nn.Module, t: Any) -> torch.Tensor:
    logits = model(torch.tensor([[*t.prompt_ids, *t.completion_ids]])).logits[0, len(t.prompt_ids) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(t.completion_ids)[:, None])[:, 0]


def apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float((a[n] - b[n]).square().sum()) for n in a))


@pytest.mark.parametrize("updates", [1, 2])
def test_the_weights_after_a_step_are_those_of_a_plain_program(tiny: Path, updates: int) -> None:
    """The distance is that of float32; any other reading of the formula is far from it."""
    groups = groups_of(4)
    trainer = trainer_of(settings(tiny, minibatches=updates))
    before = weights(trainer)
    for group in groups:
        trainer.accumulate([group], 0)
    metrics = trainer.step(0)
    ours, plain = weights(trainer), plain_step(load_model(tiny, "cpu").model, groups, updates)
    moved = apart(plain, before)
    assert apart(ours, plain) < 2e-4 * moved
    if updates == 2:
        assert metrics["clip_ratio/high_mean"] + metrics["clip_ratio/low_mean"] > 0.05  # the trust region was met
        for wrong in (
            plain_step(load_model(tiny, "cpu").model, groups, 1),
            plain_step(load_model(tiny, "cpu").model, groups, 2, centre="now"),
        ):
            assert apart(ours, wrong) > 0.1 * moved


@pytest.mark.parametrize("objective", ["decoupled", "grpo"])
def test_a_step_is_the_same_bits_however_its_groups_arrive(tiny: Path, objective: str) -> None:
    groups, found = groups_of(5), list[Any]()
    for cuts in ([5], [1, 1, 1, 1, 1], [3, 2]):
        trainer = trainer_of(settings(tiny, minibatches=2, objective=objective, micro_batch_tokens=64))
        rest = iter(groups)
        for cut in cuts:
            trainer.accumulate(list(itertools.islice(rest, cut)), 0)
        trainer.flush()
        found.append((trainer.step(0), [p.detach().numpy().tobytes() for p in trainer.trained.module.parameters()]))
    assert found[0] == found[1] == found[2]


def test_the_metrics_are_over_all_updates(tiny: Path) -> None:
    """With next to no learning rate several updates see what one sees."""
    groups, found = groups_of(6), list[dict[str, float]]()
    for count in (1, 3, 50):
        trainer = trainer_of(settings(tiny, minibatches=count, lr=1e-12, objective_options={}))
        steps = list[int]()
        trainer.optimizer.register_step_post_hook(lambda *_, steps=steps: steps.append(1))
        trainer.accumulate(groups, 0)
        metrics = trainer.step(0)
        assert len(steps) == min(count, len(groups))
        assert metrics.pop("optim/grad_norm") > 0
        found.append(metrics)
    for several in found[1:]:
        assert several == pytest.approx(found[0], rel=1e-4, abs=1e-6)


def test_an_objective_without_a_trust_region_costs_no_second_forward(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count, own = list[int](), TokenForward.__call__
    monkeypatch.setattr(TokenForward, "__call__", lambda *a, **k: (count.append(1), own(*a, **k))[1])
    for objective, forwards in (("cispo", 3), ("masked", 4)):
        trainer = trainer_of(settings(tiny, minibatches=3, objective=objective, objective_options={}))
        trainer.accumulate(groups_of(3), 0)
        count.clear()
        trainer.step(0)
        assert len(count) == forwards  # the look ahead takes all three groups at once


def test_missing_logprobs_are_refused_when_they_arrive(tiny: Path) -> None:
    (group,) = groups_of(1)
    first = dataclasses.replace(group.trajectories[0], logprobs=(math.nan,) * len(group.trajectories[0].logprobs))
    trainer = trainer_of(settings(tiny, minibatches=2))
    with pytest.raises(ValueError, match=r"groups \[0\]: missing or non-finite"):
        trainer.accumulate([dataclasses.replace(group, trajectories=(first, *group.trajectories[1:]))], 0)


@given(groups=st.integers(1, 40), count=st.integers(1, 50))
def test_minibatches_are_even_and_lose_no_group(groups: int, count: int) -> None:
    held = HeldGroups(count)
    for number in range(groups):
        held.add(HeldGroup(float(number), []))
    parts = list(held.minibatches())
    assert [g.weight for part in parts for g in part] == list(range(groups))
    sizes = [len(part) for part in parts]
    assert len(parts) == min(count, groups) and min(sizes) >= 1 and max(sizes) - min(sizes) <= 1
