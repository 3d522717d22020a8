"""What an environment gave is read by the model and never trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch

from learner.trainer.consuming import group_metrics
from learner.trainer.model import completion_logprobs, load_model
from learner.trainer.packing import BadBatch, check_group
from learner.trainer.policy import PolicyTrainer
from learner.trainer.settings import TrainerConfig
from learner.trajectory import Gap, Group, Trajectory, pack_groups, unpack_groups
from netem.demo.tiny_model import build_random_model
from p2p.protocol.rollout import Span
from p2p.version import Version
from tests.support.trainer_twins import make_group

OLD, NEW = Version(1, 1), Version(1, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_random_model(tmp_path_factory.mktemp("tiny"), size="0.4m")


def config(folder: Path, **changes: Any) -> TrainerConfig:
    base = {"device": "cpu", "threads": 1, "steps": 3, "max_new_tokens": 16}
    return TrainerConfig(model=str(folder), checkpoint_dir="unused", **{**base, **changes})


def episode(seed: int, reward: float, given: Sequence[Gap] = (Gap(2, 5), Gap(7, 8)), size: int = 10) -> Trajectory:
    """Two turns and a last one, with what was given between them."""
    rng = np.random.default_rng(seed)
    logprobs = [-float(x) for x in rng.uniform(1.0, 4.0, size)]
    for gap in given:
        logprobs[gap.start : gap.stop] = [0.0] * (gap.stop - gap.start)
    return Trajectory(
        prompt_ids=(3, 4), completion_ids=tuple(int(x) for x in rng.integers(3, 40, size)), logprobs=tuple(logprobs),
        spans=(Span(OLD, 0, 2), Span(OLD, 5, 7), Span(NEW, 8, size)), given=tuple(given), reward=reward, finish="stop",
        node="n", seed=seed,
    )  # fmt: skip


EPISODES = Group(0, 0, tuple(episode(i, i / 3) for i in range(4)))


@pytest.mark.parametrize("aggregate", ["token", "sequence", "constant"])
@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_no_gradient_comes_from_what_was_given(folder: Path, aggregate: str, kl: float) -> None:
    model, _ = load_model(folder, "cpu")
    reference = load_model(folder, "cpu").model if kl else None
    seen: list[torch.Tensor] = []

    def keep(_: Any, __: Any, out: Any) -> None:
        if out.last_hidden_state.requires_grad:
            out.last_hidden_state.retain_grad()
            seen.append(out.last_hidden_state)

    model.get_decoder().register_forward_hook(keep)
    settings = config(
        folder, aggregate=aggregate, kl_coef=kl, share_prompts=False, micro_batch_tokens=4096, objective="decoupled"
    )
    trainer = PolicyTrainer(model, settings, reference=reference)
    trainer.accumulate([EPISODES])
    trainer.flush()
    (hidden,) = seen
    # Rows of 2 + 10 tokens without the last: position 1 + t predicts completion token t.
    assert hidden.grad is not None and hidden.shape[:2] == (1, 4 * 11)
    predicting = hidden.grad[0].reshape(4, 11, -1)[:, 1:]
    sampled = torch.tensor([True, True, False, False, False, True, True, False, True, True])
    assert torch.count_nonzero(predicting[:, ~sampled]) == 0
    assert (predicting[:, sampled].abs().sum(-1) > 0).all()
    assert trainer.stats["tokens"] == 4 * 6 and trainer.weight == (4 * 6 if aggregate == "token" else 4)


def test_log_probabilities_and_entropy_are_of_sampled_tokens_alone(folder: Path) -> None:
    model, _ = load_model(folder, "cpu")
    prompts, completions = [(5, 6), (7, 8, 9)], [(4, 5, 6, 7), (8, 9)]
    with torch.no_grad():
        plain = completion_logprobs(model, prompts, completions, entropy=True)
        none = completion_logprobs(model, prompts, completions, given=[(), ()], entropy=True)
        some = completion_logprobs(model, prompts, completions, given=[(Gap(1, 3),), ()], entropy=True)
    assert torch.equal(plain.logprobs, none.logprobs) and torch.equal(plain.mask, none.mask)
    assert plain.entropy is not None and none.entropy is not None and some.entropy is not None
    assert torch.equal(plain.entropy, none.entropy)
    assert some.mask.tolist() == [[True, False, False, True], [True, True, False, False]]
    assert torch.equal(some.logprobs, plain.logprobs * some.mask)
    assert torch.equal(some.entropy, plain.entropy * some.mask)


def test_lengths_count_what_was_sampled_and_age_is_of_the_oldest_sampled_token() -> None:
    (again,) = unpack_groups(pack_groups((EPISODES,)))
    assert again == EPISODES and again.is_scored
    metrics = group_metrics([again], 3)
    assert metrics["completions/mean_length"] == 6 and metrics["perf/tokens"] == 24
    assert metrics["off_policy/max"] == 2 and again.oldest == OLD


def test_the_parts_of_a_reward_are_kept() -> None:
    parts = {"format": 0.5, "answer": 1.0}
    group = Group(0, 0, (replace(EPISODES.trajectories[0], parts=parts),))
    assert unpack_groups(pack_groups((group,)))[0].trajectories[0].parts == parts


@pytest.mark.parametrize("fields", [9, 10, 12])
def test_groups_that_earlier_programs_wrote_are_read(fields: int) -> None:
    """Of 9 fields before makers, of 10 before given tokens."""
    group = make_group(1, np.random.default_rng(0), size=2)
    ((group_id, task, trajectories),) = msgpack.unpackb(pack_groups((group,)))
    before = msgpack.packb([[group_id, task, [t[:fields] for t in trajectories]]])
    assert unpack_groups(before) == (group,)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"given": (Gap(2, 5),)}, "do not cover"),
        ({"given": (Gap(2, 5), Gap(7, 9))}, "do not cover"),
        ({"given": (Gap(2, 5), Gap(7, 8), Gap(10, 12))}, "cover 12 of 10"),
        ({"given": (Gap(0, 10),), "spans": ()}, "no sampled token"),
        ({"logprobs": (-1.0,) * 10}, "log probabilities of tokens that were given"),
    ],
)
def test_spans_and_given_tokens_together_cover_the_completion(change: dict[str, Any], reason: str) -> None:
    check_group(EPISODES, Version(1, 3), 2)
    with pytest.raises(BadBatch, match="2 steps old"):
        check_group(EPISODES, Version(1, 3), 1)
    bad = Group(0, 0, (replace(EPISODES.trajectories[0], **change),))
    with pytest.raises(BadBatch, match=reason):
        check_group(bad, Version(1, 3), 2)
