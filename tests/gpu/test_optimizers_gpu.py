"""Optimizers for a CUDA device: state on the host, and in 8 bits. Skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from learner.trainer.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from learner.trainer.model import load_model
from learner.trainer.policy import PolicyTrainer
from learner.trainer.settings import TrainerConfig
from learner.trainer.trained import WholeModel
from netem.demo.tiny_model import build_random_model
from tests.support.trainer_twins import make_group

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("kind", ["adamw_host", "adamw_8bit", "muon"])
def test_it_trains_on_the_device_and_its_checkpoint_holds_all(tmp_path: Path, kind: str) -> None:
    if kind == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    folder = build_random_model(tmp_path / "tiny", size="0.4m")
    config = TrainerConfig(
        model=str(folder), checkpoint_dir="unused", device="cuda", max_new_tokens=8, lr_ramp=0, lr=3e-3, objective="topr",
        optimizer=kind,
    )  # fmt: skip
    through, resumed = (PolicyTrainer(WholeModel(load_model(folder, "cuda").model), config) for _ in range(2))

    def take(trainer: PolicyTrainer) -> float:
        rng = np.random.default_rng(0)
        trainer.accumulate([make_group(i, rng) for i in range(4)], 0)
        return trainer.step(0)["loss/mean"]

    losses = [take(through) for _ in range(10)]
    assert losses[-1] < losses[0] - 0.2
    if kind != "adamw_8bit":
        twin = PolicyTrainer(WholeModel(load_model(folder, "cpu").model), config.model_copy(update={"device": "cpu"}))
        assert losses == pytest.approx([take(twin) for _ in range(10)], abs=0.02)
    path = save_checkpoint(tmp_path, 10, through.trained, through.optimizer, epoch=1, config={})
    load_checkpoint(path, resumed.trained, resumed.optimizer)
    for (name, a), (_, b) in zip(through.trained.named_state(), resumed.trained.named_state(), strict=True):
        assert torch.equal(a, b), name
    if kind == "adamw_host":
        assert {p.device.type for group in through.optimizer.param_groups for p in group["params"]} == {"cpu"}
        assert {p.dtype for _, p in through.trained.parameters() if p.ndim > 1} == {torch.bfloat16}
