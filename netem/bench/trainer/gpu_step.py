"""A real trainer's steps on a GPU, in a process of its own: memory, times and bytes: `python -m netem.bench.trainer.gpu_step`.

Reads what to do from stdin, as JSON, and answers with one line. Memory on the device is what torch's allocator gave out at most
(`max_memory_allocated`), by moment, and what it held of the device at most (`max_memory_reserved`); on the host it is anonymous
memory, as `one_step` has it. Runs on a processor too, without the device's part: so it is tested.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from learner.client import messages
from learner.client.publication import Publications
from learner.trainer.adapter.adapted import AdaptedModel
from learner.trainer.checkpoints.writing import Checkpoints
from learner.trainer.forecast.sizes import shape_config
from learner.trainer.forward.layout import RowTokens, packed_tokens
from learner.trainer.freed import FreedMemory
from learner.trainer.opening import frozen_dtype
from learner.trainer.policy import PolicyTrainer
from learner.trainer.settings import TrainerConfig
from learner.trainer.trained import Trained, WholeModel
from netem.bench.trainer.either_tree import as_groups, make_rows
from netem.bench.trainer.one_step import NoHead, Peaks


class MomentPeaks:
    """Most memory on the device and on the host, and seconds, by moment."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self.device: dict[str, int] = {}
        self.reserved = 0
        """bytes of the device that torch's allocator held at most"""
        self.seconds: dict[str, list[float]] = {}
        self.host = Peaks()
        self.host.start()
        self._now, self._began = "load", time.perf_counter()

    def turn(self, moment: str) -> None:
        """What comes is `moment`."""
        if self._gpu:
            torch.cuda.synchronize()
            self.device[self._now] = max(self.device.get(self._now, 0), torch.cuda.max_memory_allocated())
            self.reserved = max(self.reserved, torch.cuda.max_memory_reserved())
            torch.cuda.reset_peak_memory_stats()
        self.host.look()
        now = time.perf_counter()
        self.seconds.setdefault(self._now, []).append(now - self._began)
        self.host.moment = self._now = moment
        self._began = now


def open_random(shape: str, device: torch.device, config: TrainerConfig) -> Trained:
    """A random model of a shape, made on the device, as the trainer opens one."""
    adapted = config.lora.rank > 0
    dtype = frozen_dtype(config) if adapted else torch.float32
    with torch.device(device):
        model: nn.Module = AutoModelForCausalLM.from_config(shape_config(shape), dtype=dtype, attn_implementation="sdpa").eval()
    if adapted:
        return AdaptedModel(model, config.lora, seed=0, served=config.served_dtype)
    return WholeModel(model, config.served_dtype)


def main() -> int:
    """Load, publish, then steps: train, save, publish."""
    told = json.load(sys.stdin)
    device = torch.device(told["device"])
    torch.manual_seed(0)
    torch.zeros(64, 64, device=device) @ torch.zeros(64, 64, device=device)
    watch = MomentPeaks(device)
    with tempfile.TemporaryDirectory(dir=told["folder"]) as where:
        config = TrainerConfig(model="", checkpoint_dir=where, device=told["device"], **told["settings"])
        trained = open_random(told["shape"], device, config)
        count = sum(parameter.numel() for parameter in trained.module.parameters())
        freed = FreedMemory(count)
        freed.begin()
        trainer = PolicyTrainer(trained, config)
        publications = Publications(NoHead(), Path(where), messages.Start(**told["start"]))
        (Path(where) / "versions").mkdir(exist_ok=True)
        checkpoints = Checkpoints(
            Path(where), trained, trainer.optimizer, lambda step, folder: None, epoch=0, config={}, keep=1, committed=0
        )
        watch.turn("first version")
        if told["publish"]:
            publications.publish(0, trained.weights())
        tokens, computed = [], []
        share = config.share_prompts
        for step in range(told["steps"]):
            watch.turn("between")
            groups = as_groups(make_rows(step, told["mix"], trained.module.config.vocab_size))
            tokens.append(sum(len(t.prompt_ids) + len(t.completion_ids) for g in groups for t in g.trajectories))
            # As few as a step's forwards can lay: a group that is cut in two lays its prompt twice.
            rows = [RowTokens(t.prompt_ids, t.completion_ids) for g in groups for t in g.trajectories]
            computed.append(packed_tokens(rows, share_prompts=share))
            watch.turn("forward and backward")
            trainer.accumulate(groups, step)
            trainer.flush()
            watch.turn("update")
            metrics = trainer.step(step)
            freed.after_step()
            if told["save"] and step == told["steps"] - 1:  # many of a large model would measure the disk
                watch.turn("snapshot")
                checkpoints.begin(step + 1)
            if told["publish"]:
                watch.turn("publish")
                publications.publish(step + 1, trained.weights())
            watch.turn("between")
            checkpoints.settle()
        watch.turn("end")
    watch.host.over = True
    print(json.dumps({
        "parameters": count, "device": watch.device, "seconds": watch.seconds, "host": watch.host.most, "steps_tokens": tokens,
        "kept": trainer.forward.kept, "layers": trainer.forward.layers, "loss": metrics["loss/mean"],
        "norm": metrics["optim/grad_norm"], "checkpoint": checkpoints.write_s, "stages": publications.stages,
        "reserved": watch.reserved, "computed": computed,
        "name": torch.cuda.get_device_name() if device.type == "cuda" else "the CPU",
    }))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
