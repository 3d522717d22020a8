"""What a model takes in training, counted in a process of its own: the head's must not import torch. Thin shell."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from learner.preflight.devices import ANSWER_S
from learner.preflight.needs import computes_in_bfloat16, frozen_type
from learner.trainer.forecast.facts import REFUSED, ModelCosts
from learner.trainer.settings import TrainerSection
from p2p.errors import ShoalError, UsageError
from p2p.processes import child_environment, python_command


class NotCounted(ShoalError):
    """It is not known what the model takes; the message says why."""


def count_costs(folder: Path, trainer: TrainerSection, *, gpu: bool) -> ModelCosts:
    """Of the model in `folder` with forward passes of `trainer.micro_batch_tokens`. Takes the seconds that torch needs to be
    imported. NotCounted where that fails, UsageError where a setting does not fit the model."""
    bfloat16 = computes_in_bfloat16(trainer, gpu=gpu)
    asked = {
        "model": str(folder), "tokens": trainer.micro_batch_tokens, "checkpointing": trainer.activation_checkpointing,
        "bfloat16": bfloat16, "gpu": gpu, "lora": trainer.lora.model_dump(),
        "frozen": frozen_type(trainer, bfloat16=bfloat16),
    }  # fmt: skip
    try:
        told = subprocess.run(
            python_command("learner.trainer.forecast.count"), input=json.dumps(asked), capture_output=True, text=True,
            timeout=ANSWER_S, env=child_environment(), check=True,
        )  # fmt: skip
        answer = json.loads(told.stdout.splitlines()[-1])
        if REFUSED in answer:
            raise UsageError(*answer[REFUSED])
        costs = ModelCosts(**answer)
    except subprocess.CalledProcessError as failed:
        last = (failed.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise NotCounted(last[:200]) from None
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError, TypeError) as failed:
        raise NotCounted(f"{type(failed).__name__}: {str(failed)[:200]}") from None
    if costs.unknown:
        raise NotCounted(costs.unknown)
    return costs
