"""The trainer process: micro-batches in, optimizer steps, checkpoints and versions out.

Must not know nodes, chunks or sockets, which are behind TrainerClient. After an optimizer step it saves, commits and publishes,
in this order, so that a crash at any point leaves a run that can go on.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from learner.client.port import TrainerClient
from learner.section import check_section
from learner.trainer.checkpoint import load_checkpoint, prune_checkpoints, save_checkpoint
from learner.trainer.device_weights import DeviceWeights
from learner.trainer.losses import merge_stats, policy_loss, report
from learner.trainer.model import completion_logprobs, load_model, served_tensors
from learner.trainer.packing import BadBatch, ForwardRow, Packer, check_group, rows_of
from learner.trainer.settings import TrainerConfig
from learner.trajectory import TRUNCATED, Group
from p2p.errors import ShoalError, UsageError
from p2p.version import Version


class TrainingDiverged(ShoalError):
    """Loss or gradient is not finite; the message names the step and its groups. The weights are as before the step."""


def learning_rate(config: TrainerConfig, step: int) -> float:
    """The learning rate of a step: a linear ramp, then constant. It depends on the step alone, so a resumed run has the same."""
    return config.lr * min(1.0, (step + 1) / max(config.lr_ramp, 1))


class PolicyTrainer:
    """Model, optimizer and the accumulated gradient of the step in progress.

        trainer.accumulate(groups)    # any number of times, as groups arrive
        metrics = trainer.step()      # what is left over, divide by the step's weight, clip, update

    The update is a function of the step's groups in their order, bit for bit: into how many calls of `accumulate` they
    are cut changes nothing (the forwards are cut by `learner.trainer.packing.Packer`, which sees only the sequence). What does
    change bits, by the rounding of float32 sums, about 1e-6 relative:

    - Another order of the same groups. Theirs is the order of arrival in the step's buffer (`Ledger.occupied`), so a
      run that is repeated, or a step that is taken again after a crash (`Ledger.restore` places the stalest first), may have
      another one. Whoever wants those bits too must replay the order.
    - Another number of threads, another processor or another build of torch: the kernels split their sums otherwise.
    - CUDA: the backward of gathers and embeddings adds in no fixed order there; torch.use_deterministic_algorithms
      picks kernels that do not.
    """

    def __init__(self, model: Any, config: TrainerConfig, *, reference: Any = None) -> None:
        self.model, self.config, self.reference = model, config, reference
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=config.lr, betas=tuple(config.betas), weight_decay=config.weight_decay, fused=True
        )
        self._reset()

    def _reset(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.weight, self.loss, self.stats, self.group_ids = 0.0, 0.0, dict[str, float](), list[int]()
        tokens, groups = self.config.micro_batch_tokens, self.config.micro_batch_groups
        self._busy, self._idle = Packer(tokens, groups), Packer(tokens, groups)

    def accumulate(self, groups: Sequence[Group]) -> None:
        """Take `groups`: forward and backward, added to the step's gradient sum, of as much as makes whole forwards. What is
        left over waits for the next call or for `step`. ValueError and TrainingDiverged as from `policy_loss`, then
        or later."""
        for group in groups:
            self.group_ids.append(group.group_id)
            rows = rows_of(group, self.config.scale_advantages)
            # A sequence without advantage has no gradient: its forward is for the statistics and the loss weight only.
            busy = [r for r in rows if r.advantage != 0.0 or self.config.kl_coef]
            idle = [r for r in rows if r.advantage == 0.0 and not self.config.kl_coef]
            self._run(self._busy.add(busy), self._idle.add(idle))

    def flush(self) -> None:
        """Forward and backward of what `accumulate` left over: the step's groups are all here."""
        self._run(self._busy.flush(), self._idle.flush())

    def _run(self, busy: list[list[ForwardRow]], idle: list[list[ForwardRow]]) -> None:
        for pack in busy:
            self._forward(pack).backward()
        with torch.no_grad():
            for pack in idle:
                self._forward(pack)

    def _forward(self, pack: list[ForwardRow]) -> torch.Tensor:
        prompts = [r.trajectory.prompt_ids for r in pack]
        completions = [r.trajectory.completion_ids for r in pack]
        given = [r.trajectory.given for r in pack]
        temperature = self.config.temperature
        logprobs, mask, entropy = completion_logprobs(
            self.model,
            prompts,
            completions,
            given=given,
            temperature=temperature,
            entropy=True,
            share_prompts=self.config.share_prompts,
        )
        assert entropy is not None
        width = mask.shape[1]
        behaviour = torch.tensor(
            [[*r.trajectory.logprobs, *[0.0] * (width - len(r.trajectory.logprobs))] for r in pack],
            device=mask.device,
        )
        advantages = torch.tensor([r.advantage for r in pack], device=mask.device)
        reference = None
        if self.reference is not None and self.config.kl_coef:
            with torch.no_grad():
                reference, _, _ = completion_logprobs(
                    self.reference, prompts, completions, given=given, temperature=temperature
                )
        ids = sorted({r.group_id for r in pack})
        try:
            sums = policy_loss(logprobs, behaviour, advantages, mask, self.config, reference=reference)
        except ValueError as error:
            raise ValueError(f"groups {ids}: {error}") from error
        value = float(sums.loss.detach())
        if not math.isfinite(value):
            raise TrainingDiverged(f"loss is {value} over groups {ids}")
        self.loss, self.weight = self.loss + value, self.weight + sums.weight
        merge_stats(self.stats, {**sums.stats, "entropy": float(entropy.sum())})
        return sums.loss

    def step(self, step: int) -> dict[str, float]:
        """One optimizer update from everything accumulated since the last; metrics of the step. TrainingDiverged when
        the gradient is not finite, and then nothing has changed. ValueError when nothing was accumulated."""
        self.flush()
        if not self.weight:
            raise ValueError(f"step {step}: no tokens to train on")
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        gradients = [p.grad for p in parameters]
        if gradients:
            torch._foreach_mul_(gradients, 1.0 / self.weight)
        norm = float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
        if not math.isfinite(norm):
            raise TrainingDiverged(f"step {step}: gradient norm is {norm} over groups {self.group_ids}")
        if self.config.grad_clip and norm > self.config.grad_clip:
            torch._foreach_mul_(gradients, self.config.grad_clip / norm)
        lr = learning_rate(self.config, step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if gradients:
            self.optimizer.step()
        metrics = {"loss/mean": self.loss / self.weight, "optim/lr": lr, "optim/grad_norm": norm, **report(self.stats)}
        self._reset()
        return metrics


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


def run_trainer(client: TrainerClient, config: TrainerConfig) -> None:
    """Train to `config.steps`. Every error is raised, none is trained through: BadBatch, TrainingDiverged, UsageError.

    commit comes before publish, so that no node ever holds a version that a crash could take back, as long as
    checkpoint_every is 1; with a larger one, versions after the last commit are orphaned by a crash and the next epoch
    fences them out.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    model, _ = load_model(config.model, config.device)
    reference = None
    if config.kl_coef:
        reference, _ = load_model(config.model, config.device)
        reference.requires_grad_(False).eval()
    trainer = PolicyTrainer(model, config, reference=reference)

    start = client.resume()
    step = start.step
    if start.checkpoint is not None:
        saved = load_checkpoint(start.checkpoint, model, trainer.optimizer)
        if saved != step:
            raise UsageError(f"checkpoint {start.checkpoint} holds step {saved}, the run stands at step {step}")
    on_gpu = DeviceWeights(model, config.served_dtype) if next(model.parameters()).is_cuda else None
    client.publish(step, on_gpu or served_tensors(model, config.served_dtype))

    root = Path(config.checkpoint_dir)
    while step < config.steps:
        began = time.perf_counter()
        handed: list[int] = []
        try:
            groups, waited = consume(client, trainer, step, epoch=start.epoch, config=config, handed=handed)
            updating = time.perf_counter()
            metrics = trainer.step(step)
        except (BadBatch, TrainingDiverged) as error:
            client.discard(step, handed, str(error))
            raise
        metrics |= group_metrics(groups, step)
        step += 1
        stepped = time.perf_counter()
        if step % config.checkpoint_every == 0 or step == config.steps:
            folder = save_checkpoint(
                root, step, model, trainer.optimizer, epoch=start.epoch, config=config.model_dump()
            )
            client.commit(step, folder)
            prune_checkpoints(root, config.checkpoint_keep, step)
        committed = time.perf_counter()
        if client.due(step):
            client.publish(step, on_gpu or served_tensors(model, config.served_dtype))
        published = time.perf_counter()
        metrics |= {
            "time/wait_for_batch": waited,
            "time/train": stepped - began - waited,
            "time/update": stepped - updating,
            "time/commit": committed - stepped,
            "time/publish": published - committed,
            "time/step": published - began,
        }
        client.log(step, metrics)
    client.finish()


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
            trainer.accumulate(batch.groups)
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


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m learner.trainer.trainer RUN_DIR`: settings from RUN_DIR/trainer.json, the head's socket in RUN_DIR."""
    args = list(sys.argv[1:] if argv is None else argv)
    if len(args) != 1:
        print("usage: python -m learner.trainer.trainer RUN_DIR", file=sys.stderr)
        return 2
    from learner.client.client import LearnerClient

    run_dir = Path(args[0])
    # Of the process, so here: near-zero gradients otherwise slow AdamW several times over on CPUs.
    torch.set_flush_denormal(True)
    try:
        config = check_section(TrainerConfig, json.loads((run_dir / "trainer.json").read_text()), "trainer.json")
        run_trainer(LearnerClient.connect(run_dir), config)
    except UsageError as error:
        print(f"trainer: {error}", file=sys.stderr)
        return 2
    except ShoalError as error:
        print(f"trainer: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
