"""The trainer on a CUDA device against itself on the processor. Skipped where there is none."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MistralConfig

from learner.client.port import ResumeInfo
from learner.tasks.registry import make_task
from learner.trainer.checkpoints.checkpoint import load_checkpoint, take_snapshot, write_snapshot
from learner.trainer.forward.forward import TokenForward
from learner.trainer.forward.layout import RowTokens
from learner.trainer.model import load_model
from learner.trainer.policy import PolicyTrainer
from learner.trainer.settings import TrainerConfig
from learner.trainer.trained import WholeModel
from learner.trainer.trainer import run_trainer
from netem.demo.tiny_model import build_random_model
from tests.support.trainer_twins import FakeClient, make_group, step_groups, whole_tensors

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_random_model(tmp_path_factory.mktemp("tiny"), size="0.4m")


def rows_of(seed: int, prompts: int = 3, samples: int = 4) -> list[RowTokens]:
    """Several completions behind each prompt, of lengths that differ much."""
    rng = np.random.default_rng(seed)

    def tokens(least: int, most: int) -> tuple[int, ...]:
        return tuple(int(x) for x in rng.integers(3, 48, rng.integers(least, most)))

    return [RowTokens(prompt, tokens(1, 200)) for prompt in (tokens(2, 60) for _ in range(prompts)) for _ in range(samples)]


def gradients(model: Any, found: Any) -> dict[str, torch.Tensor]:
    weights = torch.linspace(-1, 1, len(found.logprobs), device=found.logprobs.device)
    ((found.logprobs * weights).sum() + 0.1 * found.entropy.sum()).backward()
    return {name: p.grad.double().cpu() for name, p in model.named_parameters()}


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("checkpoint", [True, False])
@pytest.mark.parametrize(("bfloat16", "nats", "part"), [(False, 1e-4, 1e-4), (True, 0.03, 0.05)])
def test_log_probabilities_and_gradients_are_those_of_the_processor(
    tiny: Path, share: bool, checkpoint: bool, bfloat16: bool, nats: float, part: float
) -> None:
    rows = rows_of(1)
    reference, model = load_model(tiny, "cpu").model.double(), load_model(tiny, "cuda").model
    want = TokenForward(reference, share_prompts=False)(rows)
    forward = TokenForward(model, share_prompts=share, checkpoint_layers=checkpoint, bfloat16=bfloat16)
    assert not forward.reason and forward.varlen == bfloat16
    found = forward(rows)
    assert found.logprobs.dtype == torch.float32
    assert float((found.logprobs.detach().double().cpu() - want.logprobs.detach()).abs().max()) < nats
    mine, theirs = gradients(model, found), gradients(reference, want)
    for name, gradient in theirs.items():
        assert float((mine[name] - gradient).norm()) <= part * float(gradient.norm()) + 1e-6, name


def test_behind_a_sliding_window_too() -> None:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=64, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        intermediate_size=192, sliding_window=17, max_position_embeddings=512,
    )  # fmt: skip
    reference = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    model = copy.deepcopy(reference).cuda()
    rows = rows_of(2)
    want, forward = TokenForward(reference.double(), share_prompts=False)(rows), TokenForward(model, bfloat16=True)
    assert forward.varlen
    found = forward(rows)
    assert float((found.logprobs.detach().double().cpu() - want.logprobs.detach()).abs().max()) < 0.03
    mine, theirs = gradients(model, found), gradients(reference, want)
    assert all(float((mine[n] - g).norm()) <= 0.05 * float(g.norm()) + 1e-6 for n, g in theirs.items())


def test_a_row_of_32k_tokens_goes_through_at_a_bounded_size(tiny: Path) -> None:
    model = load_model(tiny, "cuda").model
    model.config.max_position_embeddings = 40_000
    forward = TokenForward(model, checkpoint_layers=True, bfloat16=True)
    ids = tuple(3 + i % 40 for i in range(32_768))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    forward([RowTokens(ids[:64], ids[64:])]).logprobs.sum().backward()
    # A mask or scores of tokens x tokens would be 1 GiB and more; a layer's tokens are 32k x 256 x 2 bytes.
    assert torch.cuda.max_memory_allocated() - before < 700 << 20


def config(tiny: Path, root: Path, **changes: Any) -> TrainerConfig:
    base = {"device": "cuda", "steps": 6, "max_new_tokens": 8, "lr": 1e-3, "lr_ramp": 0, "checkpoint_every": 1}
    return TrainerConfig(model=str(tiny), checkpoint_dir=str(root), **{**base, **changes})


@pytest.fixture
def fixed_order() -> Iterator[None]:
    """Flash attention's gradient adds in no fixed order otherwise, and AdamW makes whole steps of the signs of gradients that are
    next to nothing: two undisturbed runs were as far apart as they moved."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("compute", ["auto", "float32"])
def test_a_run_and_the_same_resumed(tiny: Path, tmp_path: Path, rank: int, compute: str, fixed_order: None) -> None:
    """What is published after a resumption is what was undisturbed, up to sums that CUDA adds in no fixed order."""
    task, tokenizer = make_task("reverse", 0), load_model(tiny, "cpu").tokenizer
    feed: Callable[[int], Any] = lambda step: step_groups(step, tokenizer, task)
    settings = {"compute_dtype": compute, "lora": {"rank": rank}, "served_dtype": "float32"}
    whole, first = FakeClient(feed), FakeClient(feed)
    run_trainer(whole, config(tiny, tmp_path / "whole", **settings))
    run_trainer(first, config(tiny, tmp_path / "cut", **{**settings, "steps": 3}))
    second = FakeClient(feed, start=ResumeInfo(1, 3, first.committed[-1][1]))
    run_trainer(second, config(tiny, tmp_path / "second", **settings))
    for step in (3, 6):
        one, other = values(whole.published[step]), values(second.published[step])
        assert one.keys() == other.keys()
        moved = max(float(np.abs(one[n] - values(whole.published[0])[n]).max()) for n in one)
        apart = max(float(np.abs(one[n] - other[n]).max()) for n in one)
        assert moved > 1e-3 and apart < 0.1 * moved, (moved, apart)


def values(published: Any) -> dict[str, np.ndarray]:
    tensors = published if isinstance(published, dict) else whole_tensors(published)
    return {name: bits.view(np.float32) if dtype == "float32" else bits for name, (dtype, bits) in tensors.items()}


def test_a_checkpoint_beside_training_has_the_step_that_it_is_of(tiny: Path, tmp_path: Path) -> None:
    trainer = PolicyTrainer(WholeModel(load_model(tiny, "cuda").model), config(tiny, tmp_path))
    rng = np.random.default_rng(0)

    def train(step: int) -> None:
        trainer.accumulate([make_group(i, rng) for i in range(4)], step)
        trainer.step(step)

    train(0)
    for number in range(1, 6):
        snapshot = take_snapshot(number, trainer.trained, trainer.optimizer, epoch=1, config={})
        want = {name: tensor.detach().clone() for name, tensor in trainer.trained.named_state()}
        writing = threading.Thread(target=write_snapshot, args=(tmp_path, snapshot))
        writing.start()
        snapshot.let_go()  # as the optimizer's hook does
        train(number)
        writing.join()
        saved = load_file(tmp_path / f"step_{number}" / "model.safetensors")
        assert all(torch.equal(saved[name], tensor.cpu()) for name, tensor in want.items())
    again = PolicyTrainer(WholeModel(load_model(tiny, "cuda").model), config(tiny, tmp_path))
    assert load_checkpoint(tmp_path / "step_5", again.trained, again.optimizer) == 5
