"""trainer.optimizer = "adamw_8bit" with bitsandbytes as it is on the package index, on a CPU. Skipped without it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from learner.trainer.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from learner.trainer.model import load_model
from learner.trainer.optimizers.kinds import bytes_per_parameter
from learner.trainer.policy import PolicyTrainer
from learner.trainer.settings import TrainerConfig
from learner.trainer.trained import WholeModel
from netem.demo.tiny_model import build_random_model
from tests.support.trainer_twins import make_group

pytest.importorskip("bitsandbytes")


def trainer_in(folder: Path) -> PolicyTrainer:
    config = TrainerConfig(
        model=str(folder), checkpoint_dir="unused", device="cpu", max_new_tokens=8, lr_ramp=0, lr=1e-3, objective="topr",
        optimizer="adamw_8bit",
    )  # fmt: skip
    return PolicyTrainer(WholeModel(load_model(folder, "cpu").model), config)


def take(trainer: PolicyTrainer, step: int) -> dict[str, float]:
    rng = np.random.default_rng(0)
    trainer.accumulate([make_group(i, rng) for i in range(4)], step)
    return trainer.step(step)


def test_it_trains_in_8_bits_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    folder = build_random_model(tmp_path / "tiny", size="0.4m")
    through, resumed = trainer_in(folder), trainer_in(folder)
    losses = [take(through, step)["loss/mean"] for step in range(10)]
    assert losses[-1] < losses[0] - 0.2
    path = save_checkpoint(tmp_path, 10, through.trained, through.optimizer, epoch=1, config={})
    load_checkpoint(path, resumed.trained, resumed.optimizer)
    assert take(through, 10) == take(resumed, 10)
    for (name, a), (_, b) in zip(through.trained.named_state(), resumed.trained.named_state(), strict=True):
        assert torch.equal(a, b), name
    kept = {p: entry for p, entry in through.optimizer.state.items() if p.numel() >= 4096}
    assert kept and all(entry["state1"].dtype == entry["state2"].dtype == torch.uint8 for entry in kept.values())
    # The largest tensor's moments; the map from 8 bits to values is the same 2 KiB for any tensor.
    largest = max(kept, key=lambda p: p.numel())
    held = sum(kept[largest][key].nbytes for key in ("state1", "state2", "absmax1", "absmax2"))
    assert held / largest.numel() == pytest.approx(bytes_per_parameter("adamw_8bit").device - 8, abs=1e-3)
