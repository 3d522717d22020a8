"""One rank of `shoal bench ranks`: `python -m netem.bench.ranks.child FOLDER MODEL STEPS`, under torchrun for several.

It takes optimizer steps over random tokens, then publishes and saves, and writes what memory that took to FOLDER/rank-N.json.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from learner.trainer.checkpoints.checkpoint import save_checkpoint
from learner.trainer.freed import APART_FROM, FreedMemory
from learner.trainer.opening import open_trained
from learner.trainer.policy import PolicyTrainer
from learner.trainer.ranks.checkpoint import save_sharded
from learner.trainer.ranks.sharding import ShardedModel, open_sharded
from learner.trainer.settings import TrainerConfig
from learner.trainer.trainer import joined_ranks
from learner.trajectory import Group, Trajectory
from p2p.limits import DEFAULT_SEGMENT
from p2p.protocol.rollout import Span
from p2p.version import Version

TOKENS = 24
"""Tokens of a completion: so few that weights and optimizer are what is seen."""


def resident() -> int:
    """Bytes of this process's memory now."""
    return _status("VmRSS")


def peak() -> int:
    """The most of them since `forget_peak`."""
    return _status("VmHWM")


def forget_peak() -> None:
    """Have the kernel count anew."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _group(number: int, rng: np.random.Generator) -> Group:
    prompt = tuple(int(x) for x in rng.integers(3, 48, 8))
    rows = []
    for i in range(4):
        ids = tuple(int(x) for x in rng.integers(3, 48, TOKENS))
        rows.append(
            Trajectory(
                prompt_ids=prompt, completion_ids=ids, logprobs=(-3.0,) * TOKENS, spans=(Span(Version(1, 0), 0, TOKENS),),
                reward=float(i % 2), finish="stop", node="n", seed=i,
            )
        )  # fmt: skip
    return Group(number, number, tuple(rows))


def main() -> None:
    """One rank: FOLDER MODEL STEPS; rank 0 prints what each of them took."""
    folder, model, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    freed = FreedMemory(APART_FROM)
    freed.begin()
    config = TrainerConfig(
        model=model, checkpoint_dir=str(folder), device="cpu", steps=steps, max_new_tokens=TOKENS, micro_batch_tokens=256
    )  # fmt: skip
    ranks = joined_ranks(config)
    gc.collect()
    before = resident()
    forget_peak()
    trained = open_sharded(config, ranks) if ranks is not None else open_trained(config).trained
    loading, held = peak() - before, 0
    trainer = PolicyTrainer(trained, config, ranks=ranks)
    rng = np.random.default_rng(0)
    for step in range(steps):
        if step == 1:  # the optimizer's state is there from here on
            forget_peak()
        trainer.accumulate([_group(4 * step + i, rng) for i in range(4)], step)
        trainer.step(step)
        freed.after_step()
    training, sent = peak() - before, 0
    held = sum(p.numel() * p.element_size() for _, p in trained.parameters())
    held += sum(t.numel() * t.element_size() for state in trainer.optimizer.state.values() for t in state.values())
    forget_peak()
    first = 0
    for publication in range(2):
        weights, at = trained.weights(), ranks.sent if ranks is not None else 0
        if not isinstance(weights, Mapping) and (ranks is None or ranks.rank == 0):
            segments = weights.layout.segments(DEFAULT_SEGMENT)
            if publication == 0:
                weights.forget()
            weights.begin(segments)  # type: ignore[attr-defined]
            for segment in segments:
                weights.take(segment)
            weights.dismiss()  # type: ignore[attr-defined]
        elif not isinstance(weights, Mapping):
            weights.serve()  # type: ignore[attr-defined]
        first, sent = sent, (ranks.sent - at if ranks is not None else 0)
        if publication == 0:
            trainer.accumulate([_group(4 * steps + i, rng) for i in range(4)], steps)
            trainer.step(steps)
            freed.after_step()
    publishing = peak() - before
    forget_peak()
    if isinstance(trained, ShardedModel):
        save_sharded(folder / "checkpoints", steps, trained, trainer.optimizer, epoch=1, config={})
    else:
        save_checkpoint(folder / "checkpoints", steps, trained, trainer.optimizer, epoch=1, config={})
    saving = peak() - before
    found = {
        "loading": loading, "training": training, "publishing": publishing, "saving": saving, "held": held,
        "parameters": sum(p.numel() for _, p in trained.parameters()), "sent_first": first, "sent_delta": sent,
    }  # fmt: skip
    rank = ranks.rank if ranks is not None else 0
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
