"""The trainer process: micro-batches in, optimizer steps, checkpoints and versions out.

Must not know nodes, chunks or sockets, which are behind TrainerClient. After an optimizer step it begins a checkpoint and a
publication; both go on beside the next step's forwards, and a crash at any point leaves a run that can go on.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from learner.client.port import BY_NODE, TrainerClient
from learner.model_folder import first_line
from learner.section import check_section
from learner.trainer.checkpoints.forms import is_sharded
from learner.trainer.checkpoints.writing import CheckpointFailed, Checkpoints
from learner.trainer.consuming import consume, group_metrics
from learner.trainer.freed import FreedMemory
from learner.trainer.model import load_model, pick_device
from learner.trainer.opening import open_trained
from learner.trainer.packing import BadBatch
from learner.trainer.policy import PolicyTrainer, TrainingDiverged
from learner.trainer.ranks.checkpoints import ShardedCheckpoints
from learner.trainer.ranks.client import RankedClient
from learner.trainer.ranks.port import RankFailed
from learner.trainer.ranks.sharding import ShardedModel, load_sharded, open_sharded
from learner.trainer.ranks.torch_ranks import TorchRanks, among_ranks, is_of_others, tell_as
from learner.trainer.reading import read_checkpoint
from learner.trainer.settings import TrainerConfig
from learner.trainer.trained import Trained
from p2p.errors import ShoalError, UsageError
from p2p.processes import die_with_parent

AFTER_OTHERS_S = 5.0
"""Seconds that a rank waits before it ends because another one did: so that what is told is what that one said."""


def run_trainer(client: TrainerClient, config: TrainerConfig, ranks: TorchRanks | None = None) -> None:
    """Train to `config.steps`. Every error is raised, none is trained through: BadBatch, TrainingDiverged, UsageError.

    A checkpoint is committed once it is on the disk. Versions that were published meanwhile are orphaned by a crash, and the
    next epoch fences them out (docs/design/recovery.md). With `checkpoint_beside` off and checkpoint_every = 1 a commit comes
    before its version, and no node ever holds one that a crash could take back. `ranks`: the processes that train together; each
    of them calls this.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    elif ranks is not None:  # a process more for each device of this machine: together they have its cores
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    torch.manual_seed(config.seed)
    trained, reference = _opened(config, ranks)
    freed = FreedMemory(sum(parameter.numel() for parameter in trained.module.parameters()))
    freed.begin()
    trainer = PolicyTrainer(trained, config, reference=reference, ranks=ranks)

    start = client.resume()
    step = start.step
    if start.checkpoint is not None:
        if isinstance(trained, ShardedModel) and start.checkpoint.is_dir() and not is_sharded(start.checkpoint):
            raise UsageError(f"checkpoint {start.checkpoint} was written by one process: resume with trainer.devices = 1")
        saved = read_checkpoint(start.checkpoint, trained, trainer.optimizer)
        if saved != step:
            raise UsageError(f"checkpoint {start.checkpoint} holds step {saved}, the run stands at step {step}")
    client.publish(step, trained.weights())

    checkpoints = (Checkpoints if ranks is None else ShardedCheckpoints)(
        Path(config.checkpoint_dir), trained, trainer.optimizer, client.commit,
        epoch=start.epoch, config=config.model_dump(), keep=config.checkpoint_keep, committed=step,
    )  # fmt: skip
    while step < config.steps:
        began, waited_before = time.perf_counter(), checkpoints.waited_s
        handed: list[int] = []
        try:
            groups, waited = consume(client, trainer, step, epoch=start.epoch, config=config, handed=handed)
            updating = time.perf_counter()
            checkpoints.make_room(step + 1, config.checkpoint_every)
            metrics = trainer.step(step)
        except (BadBatch, TrainingDiverged) as error:
            try:
                checkpoints.settle()  # of steps before this one, which were sound
            finally:
                client.discard(step, handed, str(error))
            raise
        freed.after_step()
        metrics |= group_metrics(groups, step)
        step += 1
        stepped, held_up = time.perf_counter(), checkpoints.waited_s - waited_before
        if step % config.checkpoint_interval == 0 or step == config.steps:
            checkpoints.begin(step)
            if not config.checkpoint_beside:
                checkpoints.settle()
        checkpoints.check()
        committed = time.perf_counter()
        if client.due(step):
            # Without staleness the next groups wait for this version, and what kept it from getting out must be told before.
            client.publish(step, trained.weights(), wait=not config.publish_beside or not config.max_staleness)
        published = time.perf_counter()
        metrics |= {
            "time/wait_for_batch": waited,
            "time/train": stepped - began - waited - held_up,
            "time/update": stepped - updating - held_up,
            "time/commit": committed - stepped + held_up,
            "time/publish": published - committed,
            "time/step": published - began,
            "time/checkpoint": checkpoints.write_s,
            "checkpoint/behind": float(step - checkpoints.committed),
        }
        client.log(step, metrics | {BY_NODE: trainer.by_node})
    checkpoints.settle()
    client.finish()


class _Opened(NamedTuple):
    trained: Trained
    reference: nn.Module | None


def _opened(config: TrainerConfig, ranks: TorchRanks | None) -> _Opened:
    """What is trained, and the base model that `kl_coef` compares with."""
    trained = open_trained(config).trained if ranks is None else open_sharded(config, ranks)
    if not config.kl_coef or trained.base is not None:
        return _Opened(trained, None)
    if ranks is not None:
        return _Opened(trained, load_sharded(config.model, ranks, pick_device(config.device), trained=False))
    reference, _ = load_model(config.model, config.device)
    return _Opened(trained, reference.requires_grad_(False).eval())


def joined_ranks(config: TrainerConfig) -> TorchRanks | None:
    """The processes that torchrun started with this one; None: it is alone."""
    if not among_ranks():
        return None
    die_with_parent()
    for kind in (TrainingDiverged, BadBatch, CheckpointFailed):
        tell_as(kind)
    device = pick_device(config.device)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and torch.cuda.device_count() < here):
        found = f"torch can use {torch.cuda.device_count()} GPUs here"
        raise UsageError(f"trainer.devices = {here}: {found}; set fewer, or trainer.device")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return TorchRanks(device)


def client_of(own: TrainerClient | None, ranks: TorchRanks | None) -> TrainerClient:
    """The client that this process trains with; `own`: its connection to the head, which of several ranks the first has."""
    if ranks is not None:
        return RankedClient(own, ranks)
    assert own is not None
    return own


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
    rank = int(os.environ.get("RANK", "0"))
    try:
        config = check_section(TrainerConfig, json.loads((run_dir / "trainer.json").read_text()), "trainer.json")
        ranks = joined_ranks(config)
        own: TrainerClient | None = LearnerClient.connect(run_dir) if rank == 0 else None
        run_trainer(client_of(own, ranks), config, ranks)
        if ranks is not None:
            ranks.close()  # a process that ends with its group's threads at work may abort
    except UsageError as error:
        return _ended(2, str(error), rank)
    except ShoalError as error:
        return _ended(1, f"{type(error).__name__}: {error}", rank, late=isinstance(error, RankFailed))
    except RuntimeError as error:
        if not among_ranks() or not is_of_others(error):
            raise
        return _ended(1, f"another rank is gone, or silent: {first_line(error)}", rank, late=True)
    return 0


def _ended(status: int, what: str, rank: int, *, late: bool = False) -> int:
    """Errors that all ranks have are told by the first; `late`: it only follows from another rank's."""
    if rank or late:
        time.sleep(AFTER_OTHERS_S)  # ended by then, where another one ended before
        what = f"rank {rank}: {what}"
    print(f"trainer: {what}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
