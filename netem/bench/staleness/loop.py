"""One run: a trainer and its sampler in one process, with exact ages. Must not know the other runs or how results are kept.

Step s trains on what version max(0, s - S) made: a queue of S + 1 batches, of which the newest is by the newest weights.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from learner.tasks.port import Task
from learner.tasks.registry import make_task
from learner.trainer.model import load_model
from learner.trainer.policy import PolicyTrainer, TrainingDiverged
from learner.trainer.settings import TrainerConfig
from netem.bench.staleness.cases import TASKS, WARM_UP_TARGET, Case
from netem.bench.staleness.chat import HELD_OUT as CHAT_HELD_OUT
from netem.bench.staleness.chat import ChatTask
from netem.bench.staleness.own_tasks import MixedTask, SortTask
from netem.bench.staleness.rollouts import DrawnBatch, RolloutSource
from netem.bench.staleness.sampler import Sampler
from netem.demo.chat_model import make_chat_model
from netem.demo.tiny_model import build_demo_model
from p2p.errors import UsageError
from p2p.files import take_lock

HELD_OUT = 256
"""Held-out problems of an evaluation."""

EVERY = 60
"""Steps between two evaluations."""

OTHER_S = 3600.0
"""Seconds to wait while another process makes the same start: ten of a quiet core, and a study may have little of one."""

OF_STEP = {
    "kl": "mismatch_kl/mean", "low": "clip_ratio/low_mean", "high": "clip_ratio/high_mean", "effective": "off_policy/effective",
    "weight": "objective/weight_mean", "norm": "optim/grad_norm",
}  # fmt: skip
"""What is kept of each step's metrics."""


def study_task(name: str, seed: int) -> Task:
    """A task of the study."""
    own: dict[str, Callable[[int], Task]] = {"mixed": MixedTask, "sort": SortTask, "chat": ChatTask}
    return own[name](seed) if name in own else make_task(name, seed, TASKS[name]["options"])


def warm_model(folder: Path, task: str, seed: int) -> Path:
    """The start of this seed's runs, made once in `folder`. All that it depends on is said here, so that the demo's own start may
    change."""
    folder.mkdir(parents=True, exist_ok=True)
    if task == "chat":  # the model as it is: it has been trained by others
        return make_chat_model(folder / "chat")
    where = folder / f"{task}-{seed}"
    with open(folder / f"{task}-{seed}.lock", "wb") as lock:
        if not take_lock(lock.fileno(), wait_s=OTHER_S):
            raise UsageError(f"another process has been making {where} for {OTHER_S:.0f} s")
        if not where.exists():
            half = folder / f"{task}-{seed}.half"
            shutil.rmtree(half, ignore_errors=True)  # what a killed study left
            build_demo_model(
                half, study_task(task, seed), seed=seed, target=WARM_UP_TARGET, steps=400, batch=64, lr=2e-3, ramp=20
            )  # fmt: skip
            os.replace(half, where)
    return where


def run_case(case: Case, model: Path) -> dict[str, Any]:
    """The run's numbers, as plain values: by version what its samples came to, by step the trainer's metrics, evaluations."""
    torch.set_num_threads(1)
    began = time.process_time()
    loaded = load_model(model, "cpu")
    settings = case.trainer_settings()
    trainer = PolicyTrainer(loaded.model, TrainerConfig(model=str(model), checkpoint_dir="", **settings))
    sampler = Sampler(loaded.model)
    rollouts = RolloutSource(case, study_task(case.task, case.seed), loaded.tokenizer, sampler)
    queue = deque(rollouts.batch(0) for _ in range(case.staleness + 1))
    made, steps = [queue[0]], list[dict[str, float]]()
    problems = CHAT_HELD_OUT if case.task == "chat" else HELD_OUT
    held_out = {0: rollouts.held_out(problems)}
    diverged = ""
    for step in range(case.steps):
        batch = queue.popleft()
        assert {g.oldest.step for g in batch.groups} == {max(0, step - case.staleness)}
        try:
            trainer.accumulate(batch.groups, step)
            metrics = trainer.step(step)
        except TrainingDiverged as error:
            diverged = str(error)[:200]
            break
        steps.append({name: round(metrics[key], 6) for name, key in OF_STEP.items() if key in metrics})
        sampler.load(loaded.model)
        queue.append(rollouts.batch(step + 1))
        made.append(queue[-1])
        if (step + 1) % EVERY == 0 or step + 1 == case.steps:
            held_out[step + 1] = rollouts.held_out(problems)
    return {
        **_columns(made), "steps": {n: [s.get(n) for s in steps] for n in OF_STEP}, "held_out": held_out, "diverged": diverged,
        "lr": case.learning_rate, "start": _digest(model), "cpu_s": round(time.process_time() - began, 2),
    }  # fmt: skip


def _columns(made: list[DrawnBatch]) -> dict[str, list[float]]:
    names = ("exact", "reward", "length", "drawn", "kept_length", "cut")
    return {name: [round(getattr(batch, name), 5) for batch in made] for name in names}


def _digest(model: Path) -> str:
    """Of the weights that the run began with: whether two studies had the same start."""
    return hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()[:12]
