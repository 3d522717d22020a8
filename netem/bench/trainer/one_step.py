"""A real trainer's step in a process of its own, its memory at each moment: `python -m netem.bench.trainer.one_step`.

Reads what to do from stdin, as JSON, and answers with one line. Anonymous memory (RssAnon) is what counts, looked at every few
milliseconds by a thread: files that are mapped are the system's to drop.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from learner.client import messages
from learner.client.connection import HeadConnection
from learner.client.publication import Publications
from learner.trainer.checkpoints.checkpoint import save_checkpoint
from learner.trainer.forecast.sizes import shape_config
from learner.trainer.freed import FreedMemory
from learner.trainer.policy import PolicyTrainer
from learner.trainer.settings import TrainerConfig
from learner.trainer.trained import WholeModel
from netem.bench.trainer.either_tree import as_groups, make_rows

LOOK_S = 0.004
"""Seconds between two looks: shorter than any moment in which much is taken, since pages are made at some GB a second."""


class NoHead(HeadConnection):
    """Takes what is published and keeps nothing."""

    def __init__(self) -> None:
        pass

    def tell(self, message: object) -> None:
        """Nothing."""

    def ask(self, request: object, expect: type[Any]) -> Any:
        """What a head would answer."""
        return messages.Begun(mid=b"\0" * 32, chunk_bytes=1 << 20) if expect is messages.Begun else messages.Ok()


def anonymous() -> int:
    """Bytes of this process, without files."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))


class Peaks(threading.Thread):
    """Most anonymous memory by moment, above what there was at the start."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.base = anonymous()
        self.moment, self.over = "load", False
        self.most: dict[str, int] = {}

    def run(self) -> None:
        while not self.over:
            self.look()
            time.sleep(LOOK_S)

    def look(self) -> None:
        """Now."""
        now, moment = anonymous() - self.base, self.moment
        self.most[moment] = max(self.most.get(moment, 0), now)


def main() -> int:
    """One run: load, publish, train, save, publish, train again."""
    told = json.load(sys.stdin)
    torch.set_num_threads(told["threads"])
    torch.set_flush_denormal(True)
    torch.zeros(64, 64) @ torch.zeros(64, 64)  # what the libraries take is not the model's
    peaks = Peaks()
    peaks.start()
    model = AutoModelForCausalLM.from_config(shape_config(told["shape"]), dtype=torch.float32, attn_implementation="sdpa").eval()
    freed = FreedMemory(sum(parameter.numel() for parameter in model.parameters()))
    freed.begin()  # when the trainer does
    with tempfile.TemporaryDirectory(dir=told["folder"]) as folder:
        config = TrainerConfig(model="", checkpoint_dir=folder, **told["settings"])
        trained = WholeModel(model, config.served_dtype)
        trainer = PolicyTrainer(trained, config)
        start = messages.Start(**told["start"])
        publications = Publications(NoHead(), Path(folder), start)
        (Path(folder) / "versions").mkdir(exist_ok=True)
        peaks.moment = "train"
        for step in range(told["before"]):
            trainer.accumulate(_groups(step + told["steps"], told["mix"], model.config.vocab_size))
            trainer.step(step)
            freed.after_step()
        peaks.moment = "publish"
        publications.publish(0, trained.weights())
        for step in range(told["steps"]):
            groups = _groups(step, told["mix"], model.config.vocab_size)
            peaks.moment, began = "train", time.perf_counter()
            trainer.accumulate(groups)
            trainer.step(step)
            freed.after_step()
            peaks.look()
            seconds = time.perf_counter() - began
            peaks.moment = "save"
            save_checkpoint(Path(folder), step + 1, trained, trainer.optimizer, epoch=0, config={})
            peaks.moment = "publish"
            publications.publish(step + 1, trained.weights())
    peaks.over = True
    print(json.dumps({
        "base": peaks.base, "seconds": seconds, "most": peaks.most, "kept": trainer.forward.kept,
        "layers": trainer.forward.layers,
        "tokens": sum(len(t.prompt_ids) + len(t.completion_ids) for g in groups for t in g.trajectories),
    }))  # fmt: skip
    return 0


def _groups(seed: int, mix: dict[str, Any], vocabulary: int) -> list[Any]:
    return as_groups(make_rows(seed, mix, vocabulary))


if __name__ == "__main__":
    sys.exit(main())
