"""A trainer without a network, alone or under torchrun: `python -m tests.support.ranks_run FOLDER MODEL KINDS [RESUMED_STEP]`.

KINDS: {name: settings}, trained one after the other. What rank 0 published last (weights.npz) and logged (logs.json) goes to
FOLDER/NAME, its checkpoints below it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from learner.client.port import AnnouncedSource, ResumeInfo, Weights
from learner.trainer.ranks.torch_ranks import TorchRanks
from learner.trainer.settings import TrainerConfig
from learner.trainer.trainer import client_of, joined_ranks, run_trainer
from learner.trajectory import Group
from p2p.weights.state import FlatState
from tests.support.trainer_twins import FakeClient, make_group


def groups_of(step: int) -> list[Group]:
    """A step's groups as a function of the step alone."""
    rng = np.random.default_rng(step)
    return [make_group(10 * step + i, rng, size=6) for i in range(5)]


class SourceClient(FakeClient):
    """Takes weights that come segment by segment, too."""

    def publish(self, step: int, tensors: Weights, *, wait: bool = False) -> None:
        if isinstance(tensors, Mapping):
            return super().publish(step, tensors)
        layout = tensors.layout
        state = FlatState.in_memory(layout)
        tensors.forget()
        if isinstance(tensors, AnnouncedSource):
            tensors.begin(layout.segments(1 << 16))
        for segment in layout.segments(1 << 16):
            found = tensors.take(segment)
            if isinstance(found, np.ndarray):
                state.words(segment)[...] = found
            else:
                raise AssertionError("what was forgotten is given whole")
        super().publish(step, {t.name: (t.dtype, state.tensor(t.name)) for t in layout.tensors})


def main() -> None:
    folder, model, kinds, *resumed = sys.argv[1:]
    ranks = None
    for name, settings in json.loads(kinds).items():
        ranks = train(Path(folder) / name, model, settings, [int(step) for step in resumed], ranks)
    if ranks is not None:
        ranks.close()  # a process that ends with its group's threads at work may abort


def train(out: Path, model: str, settings: dict[str, Any], resumed: list[int], ranks: TorchRanks | None) -> TorchRanks | None:
    """One run, with the ranks of the one before; the ranks."""
    out.mkdir(parents=True, exist_ok=True)
    start = ResumeInfo(1, resumed[0], out / "checkpoints" / f"step_{resumed[0]}") if resumed else ResumeInfo(1, 0, None)
    config = TrainerConfig(
        model=model, checkpoint_dir=str(out / "checkpoints"), device="cpu", threads=1, max_new_tokens=8, max_staleness=100,
        micro_batch_tokens=128, served_dtype="float32", **settings,
    )  # fmt: skip
    ranks = ranks or joined_ranks(config)
    own = SourceClient(groups_of, cuts=3, start=start) if ranks is None or ranks.rank == 0 else None
    run_trainer(client_of(own, ranks), config, ranks)
    if own is not None:
        np.savez(out / "weights.npz", **{name: bits for name, (_, bits) in own.published[config.steps].items()})
        (out / "logs.json").write_text(json.dumps(own.logs))
    return ranks


if __name__ == "__main__":
    main()
