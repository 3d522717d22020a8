"""The groups of one step, as they arrive: checked, trained on, counted. Must not know optimizers, checkpoints or sockets."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from learner.client.port import TrainerClient
from learner.trainer.packing import BadBatch, check_group
from learner.trainer.policy import PolicyTrainer, TrainingDiverged
from learner.trainer.settings import TrainerConfig
from learner.trajectory import TRUNCATED, Group
from p2p.version import Version


class Consumed(NamedTuple):
    """The groups of one step."""

    groups: list[Group]
    waited_s: float
    """seconds spent waiting for them"""


def consume(
    client: TrainerClient, trainer: PolicyTrainer, step: int, epoch: int, config: TrainerConfig, handed: list[int]
) -> Consumed:
    """Forward and backward over the step's micro-batches as they come. `handed` gets the ids of all groups that came, also when
    an exception ends it.

    BadBatch when a group breaks the staleness bound or comes twice, when a micro-batch is of another step, or when the
    stream ends before its last one.
    """
    groups: list[Group] = []
    seen: set[int] = set()
    waited, complete = 0.0, False
    waiting = time.perf_counter()
    for batch in client.batches(step):
        waited += time.perf_counter() - waiting
        if batch.step != step:
            raise BadBatch(f"step {step}: got a micro-batch of step {batch.step}")
        handed.extend({g.group_id for g in batch.groups} - set(handed))
        for group in batch.groups:
            check_group(group, Version(epoch, step), config.max_staleness)
            if group.group_id in seen:
                raise BadBatch(f"step {step}, group {group.group_id}: came twice")
            seen.add(group.group_id)
        try:
            trainer.accumulate(batch.groups, step)
            if batch.last:
                trainer.flush()
        except (ValueError, TrainingDiverged) as error:
            kind = TrainingDiverged if isinstance(error, TrainingDiverged) else BadBatch
            raise kind(f"step {step}: {error}") from error
        groups.extend(batch.groups)
        if batch.last:
            complete = True
            if batch.total and batch.total != len(groups):
                raise BadBatch(f"step {step}: {len(groups)} groups came of {batch.total}")
            break
        waiting = time.perf_counter()
    if not complete:
        raise BadBatch(f"step {step}: the stream of micro-batches ended after {len(groups)} groups, before its last")
    return Consumed(groups, waited)


def group_metrics(groups: Sequence[Group], step: int) -> dict[str, float]:
    """Rewards, lengths and ages of the step's groups. Lengths and `perf/tokens` count sampled tokens, not what an environment
    gave."""
    trajectories = [t for g in groups for t in g.trajectories]
    rewards = torch.tensor([reward for g in groups for reward in g.rewards], dtype=torch.float64)
    lengths = [t.sampled_tokens for t in trajectories]
    ages = [step - min(s.version.step for s in t.spans) for t in trajectories]
    flat = sum(g.equal for g in groups)
    n = len(trajectories)
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(correction=0)),
        "frac_reward_zero_std": flat / len(groups),
        "exact/mean": sum(t.exact for t in trajectories) / n,
        "completions/mean_length": sum(lengths) / n,
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": sum(t.finish != "stop" for t in trajectories) / n,
        "completions/truncated_ratio": sum(t.finish == TRUNCATED for t in trajectories) / n,
        "off_policy/mean": sum(ages) / n,
        "off_policy/max": float(max(ages)),
        "perf/tokens": float(sum(lengths)),
    }
