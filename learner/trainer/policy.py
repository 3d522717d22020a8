"""Model, optimizer and the gradient of the step in progress. Must not know checkpoints, versions' publication or the network."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgpack
import torch
from torch import nn

from learner.trainer.by_node import by_node, of_step
from learner.trainer.forecast.forecast import room_to_keep
from learner.trainer.forward.forward import INSIDE, TokenForward, can_checkpoint
from learner.trainer.forward.layout import RowTokens
from learner.trainer.forward.saved import free_bytes, layers_to_keep
from learner.trainer.freed import FreedMemory
from learner.trainer.losses import RowFacts, merge_stats, policy_loss, report, weight_of
from learner.trainer.matrices import keep_in_bfloat16
from learner.trainer.minibatches import HeldGroup, HeldGroups, check_rows
from learner.trainer.objectives.port import SampledTokens
from learner.trainer.objectives.registry import make_objective
from learner.trainer.optimizers.make import make_optimizer
from learner.trainer.optimizers.schedule import learning_rate
from learner.trainer.packing import ForwardRow, Packer, row_tokens, rows_of, sampled_logprobs, token_steps
from learner.trainer.ranks.port import OneProcess, Ranks, shared_norm
from learner.trainer.ranks.rounds import Rounds
from learner.trainer.settings import CHECKPOINT_FROM, TrainerConfig
from learner.trainer.trained import Trained, WholeModel
from learner.trajectory import Group
from p2p.errors import ShoalError, UsageError

log = logging.getLogger("shoal.trainer")


class TrainingDiverged(ShoalError):
    """Loss or gradient is not finite; the message names the step and its groups. The weights are as before the update that found
    it: with `trainer.minibatches` = 1 as before the step."""


class PolicyTrainer:
    """Model, optimizer and the accumulated gradient of the step in progress.

        trainer.accumulate(groups)    # any number of times, as groups arrive
        metrics = trainer.step()      # what is left over, divide by the step's weight, clip, update

    With `config.minibatches` > 1 the gradients wait for `step`, which updates after each minibatch of the groups; as they arrive,
    the log probabilities before the first update (pi_prox) are computed, where the objective reads them.

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

    def __init__(
        self, trained: Trained | nn.Module, config: TrainerConfig, *, reference: nn.Module | None = None,
        ranks: Ranks | None = None,
    ) -> None:  # fmt: skip
        """`ranks`: the processes among which the step's forwards are divided; each of them is given all of its groups."""
        self.ranks = ranks or OneProcess()
        self.trained = WholeModel(trained, config.served_dtype) if isinstance(trained, nn.Module) else trained
        self.config = config
        model = self.trained.module
        self.forward = token_forward(model, config)
        self._reference = None if reference is None else reference_forward(reference, config)
        self.objective = make_objective(config.objective, config.objective_options)
        self.optimizer = make_optimizer(self.trained.parameters(), config, model, bfloat16=in_bfloat16(model, config))
        self._told_of_a_long_row = False
        self.by_node: dict[str, list[float]] = {}
        """of the last step: node -> [tokens, sum of their mismatch in nats]"""
        self._reset()

    def _reset(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.weight, self.loss, self.stats, self.group_ids = 0.0, 0.0, dict[str, float](), list[int]()
        self._squares, self._rows, self._now = 0.0, 0, 0
        self._divisors, self._norms = 0.0, list[float]()
        config = self.config
        self._packer = Packer(
            config.micro_batch_tokens, config.micro_batch_groups, bool(self.forward.reason), config.share_prompts
        )
        self._rounds = Rounds(self._packer, self.ranks.rank, self.ranks.count)
        self._held = HeldGroups(config.minibatches)

    def accumulate(self, groups: Sequence[Group], step: int | None = None) -> None:
        """Take `groups` of this step: forward and backward, added to the step's gradient sum, of as much as makes whole forwards.
        What is left over waits for the next call or for `step`; with several updates a step, all backwards do. ValueError and
        TrainingDiverged as from `policy_loss`, then or later. Without `step` the newest token counts as of now, in the statistics
        by age."""
        newest = max((span.version.step for g in groups for t in g.trajectories for span in t.spans), default=0)
        self._now = max(self._now, newest if step is None else step)
        for group in groups:
            self.group_ids.append(group.group_id)
            rows = rows_of(group, self.config, self.objective)
            self._squares += math.fsum(row.advantage**2 for row in rows)
            self._rows += len(rows)
            # A completion without advantage has no gradient, unless something beside the advantage has one.
            held = HeldGroup(weight_of(rows, self.config.aggregate), [r for r in rows if r.advantage != 0.0 or self._every_row])
            if self.config.minibatches == 1:
                self._train_on(held)
            else:
                self._hold(held)

    def flush(self) -> None:
        """Forward and backward of what `accumulate` left over: the step's groups are all here."""
        mine = self._rounds.flush(self._packer.flush())
        if self.config.minibatches == 1:
            self._run(mine)
        else:
            self._look_ahead(mine)
            self._held.tell(self.ranks)

    def _train_on(self, group: HeldGroup) -> None:
        self.weight += group.weight
        self._run(self._rounds.add(self._packer.add(group.rows)))

    def _hold(self, group: HeldGroup) -> None:
        check_rows(group.rows)  # here, since the groups of a step that is not begun can still be given back
        self._held.add(group)
        if self.objective.reads_proximal:
            self._look_ahead(self._rounds.add(self._packer.add(group.rows)))

    @torch.no_grad()
    def _look_ahead(self, packs: Iterable[list[ForwardRow]]) -> None:
        """pi_prox of these rows: no update of the step was made yet."""
        for pack in packs:
            found = self.forward(row_tokens(pack) or [NO_ROW], temperature=self.config.temperature)
            if pack:
                self._held.before(pack, found.logprobs)

    @property
    def _every_row(self) -> bool:
        return bool(self.config.kl_coef or self.config.entropy_coef or self.objective.every_row)

    def _run(self, packs: Iterable[list[ForwardRow]]) -> None:
        for pack in packs:
            tokens, budget = self._packer.tokens(pack), self._packer.budget
            if pack and tokens > budget and not self._told_of_a_long_row:
                self._told_of_a_long_row = True
                log.warning(
                    "group %d has a completion of %d tokens with its prompt, more than trainer.micro_batch_tokens = %d: such "
                    "a row goes alone and takes more memory than that (said once)", pack[0].group_id, tokens, budget,
                )  # fmt: skip
            failed, loss = None, torch.zeros(())
            try:
                loss = self._forward(pack) if pack else self._idle()
            except (ValueError, TrainingDiverged) as error:
                failed = error
            self.ranks.agree(failed)  # before the backward, in which they wait for each other
            loss.backward()

    def _idle(self) -> torch.Tensor:
        """The forward of a rank without rows: the others gather this one's part of the model, and sum its gradient."""
        found = self.forward([NO_ROW], temperature=self.config.temperature)
        if self.config.kl_coef:
            self._of_the_base([NO_ROW])
        return 0.0 * (found.logprobs.sum() + found.entropy.sum())

    def _forward(self, pack: list[ForwardRow]) -> torch.Tensor:
        rows, temperature = row_tokens(pack), self.config.temperature
        found = self.forward(rows, temperature=temperature, entropy_gradient=bool(self.config.entropy_coef))
        entropy = found.entropy if self.config.entropy_coef else found.entropy.detach()
        reference = self._of_the_base(rows) if self.config.kl_coef else None
        ids = sorted({r.group_id for r in pack})
        sampled, facts = sampled_tokens(pack, found.logprobs, self._now, self._held.proximal(pack))
        try:
            sums = policy_loss(sampled, self.objective, self.config, facts, reference=reference, entropy=entropy)
        except ValueError as error:
            raise ValueError(f"groups {ids}: {error}") from error
        value = float(sums.loss.detach())
        if not math.isfinite(value):
            raise TrainingDiverged(f"loss is {value} over groups {ids}")
        self.loss = self.loss + value
        merge_stats(self.stats, sums.stats)
        merge_stats(self.stats, by_node(pack, sampled.log_ratio))
        return sums.loss

    def _of_the_base(self, rows: list[RowTokens]) -> torch.Tensor | None:
        """Log probabilities under the model that the run began with; None where there is none."""
        if self._reference is None and self.trained.base is None:
            return None
        with torch.no_grad():
            if self._reference is not None:
                return self._reference(rows, temperature=self.config.temperature).logprobs
            assert self.trained.base is not None
            with self.trained.base():
                return self.forward(rows, temperature=self.config.temperature).logprobs

    def step(self, step: int) -> dict[str, float]:
        """The step's optimizer updates, `config.minibatches` of them, from everything accumulated since the last; metrics of the
        step. TrainingDiverged when a gradient is not finite, and then its update has not been made. ValueError when nothing was
        accumulated."""
        self.flush()
        if not self.group_ids:
            raise ValueError(f"step {step}: no tokens to train on")
        scaled = self.config.scale_advantages == "batch" and self._squares
        scale = math.sqrt(self._squares / self._rows) if scaled else 1.0
        lr = learning_rate(self.config, step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self.config.minibatches == 1:
            self._update(step, scale)
        for minibatch in self._held.minibatches():
            for held in minibatch:
                self._train_on(held)
            self._run(self._rounds.flush(self._packer.flush()))
            self._update(step, scale)
        self._add_up()
        self.by_node = of_step(self.stats)
        norm = math.fsum(self._norms) / len(self._norms)
        metrics = {"loss/mean": self.loss / self._divisors, "optim/lr": lr, "optim/grad_norm": norm, **report(self.stats)}
        self._reset()
        return metrics

    def _update(self, step: int, scale: float) -> None:
        """One optimizer update from the gradient as it is accumulated now, which is gone then."""
        divisor = (self.weight or 1.0) * scale  # 0 where every completion was masked: then there is no gradient
        parameters = [p for _, p in self.trained.parameters() if p.grad is not None]
        gradients = [p.grad for p in parameters]
        if gradients:
            torch._foreach_mul_(gradients, 1.0 / divisor)
        norm = shared_norm(self.ranks, float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0)
        if not math.isfinite(norm):
            raise TrainingDiverged(f"step {step}: gradient norm is {norm} over groups {self.group_ids}")
        if self.config.grad_clip and norm > self.config.grad_clip:
            torch._foreach_mul_(gradients, self.config.grad_clip / norm)
        if gradients:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._divisors += divisor
        self._norms.append(norm)
        self.weight = 0.0

    def _add_up(self) -> None:
        """Loss and statistics over all ranks."""
        if self.ranks.count > 1:
            told = [msgpack.unpackb(data) for data in self.ranks.all_told(msgpack.packb([self.loss, self.stats]))]
            self.loss, self.stats = math.fsum(loss for loss, _ in told), {}
            for _, stats in told:
                merge_stats(self.stats, stats)


NO_ROW = RowTokens((0,), (0,))
"""What a rank without rows runs: one token that predicts one."""


def token_forward(model: nn.Module, config: TrainerConfig) -> TokenForward:
    """The model as the settings have it run. UsageError where `activation_checkpointing` is "on" and the model cannot."""
    size, device = sum(p.numel() for p in model.parameters()), next(model.parameters()).device
    wanted = config.activation_checkpointing
    checkpoint = wanted == "on" or (wanted == "auto" and size >= CHECKPOINT_FROM)
    if checkpoint and not can_checkpoint(model):
        what = f"the model ({type(model).__name__}) has no layers that transformers can run again in the backward pass"
        if wanted == "on":
            raise UsageError(f'trainer.activation_checkpointing = "on": {what}; use "off"')
        log.warning("activations are not checkpointed, which takes more memory: %s", what)
        checkpoint = False
    forward = TokenForward(
        model,
        share_prompts=config.share_prompts,
        checkpoint_layers=checkpoint,
        bfloat16=in_bfloat16(model, config),
        give_back=FreedMemory(size, device.type == "cpu").at_peak,
    )
    # Ranks must run the same layers again, whatever memory each finds: a layer is gathered from all of them.
    if checkpoint and wanted == "auto" and getattr(config, "devices", 1) == 1:
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        room = room_to_keep(free_bytes(device), trained)
        forward.kept = layers_to_keep(forward, config.micro_batch_tokens, room) if trained else 0
        log.info("%d of %d layers are run again in the backward pass", forward.layers - forward.kept, forward.layers)
    return forward


def reference_forward(model: nn.Module, config: TrainerConfig) -> TokenForward:
    """The frozen model that KL is measured from. Where computing is in bfloat16 its matrices are kept in it, for half the memory:
    projections are rounded to it there anyway, and models mostly come in it, so that nothing is lost."""
    forward = token_forward(model, config)
    if in_bfloat16(model, config) and not hasattr(model, INSIDE):
        keep_in_bfloat16(model, model.parameters())
    return forward


def in_bfloat16(model: nn.Module, config: TrainerConfig) -> bool:
    """Whether the model computes in bfloat16."""
    return config.compute_dtype == "bfloat16" or (config.compute_dtype == "auto" and next(model.parameters()).is_cuda)


class Flat(NamedTuple):
    """A forward's sampled tokens, and what its rows are besides."""

    sampled: SampledTokens
    facts: RowFacts


def sampled_tokens(
    pack: Sequence[ForwardRow], logprobs: torch.Tensor, step: int, proximal: torch.Tensor | None = None
) -> Flat:
    """`logprobs` [N]: the trainer's log probabilities of the rows' sampled tokens, row after row, in training of `step`.
    `proximal` [N]: the same before the step's first update; None where none was made yet."""
    device = logprobs.device
    counts = torch.tensor([row.trajectory.sampled_tokens for row in pack], device=device)
    numbers = torch.repeat_interleave(torch.arange(len(pack), device=device), counts)
    behaviour = torch.tensor([value for row in pack for value in sampled_logprobs(row.trajectory)], device=device)
    steps = torch.tensor([step for row in pack for step in token_steps(row.trajectory)], device=device)
    floats = torch.tensor([[row.advantage, row.group.constant, row.group.tokens] for row in pack], device=device)
    return Flat(
        SampledTokens(
            logprobs=logprobs, behaviour=behaviour, proximal=logprobs.detach() if proximal is None else proximal, row=numbers,
            lengths=counts.to(logprobs.dtype), advantages=floats[:, 0], group_constants=floats[:, 1],
        ),
        RowFacts(floats[:, 2], (step - steps).clamp(min=0)),
    )  # fmt: skip
