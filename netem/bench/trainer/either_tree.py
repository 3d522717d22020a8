"""A trainer that steps when it is told, of this tree or of an older one: `python either_tree.py`, with the tree on PYTHONPATH.

Imports nothing of Shoal by a name that only one tree has, except behind `_OLD`: the tree before the packed forward (1832404).
Reads one JSON object a line: the model first, then a step each. Answers each with one line.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import resource
import sys
import time
from typing import Any

import numpy as np

_OLD = importlib.util.find_spec("learner.batch") is not None


def make_rows(seed: int, mix: dict[str, Any], vocabulary: int) -> list[dict[str, Any]]:
    """Groups of random tokens: log-normal lengths of prompts and completions, rewards that differ within each group."""
    rng = np.random.default_rng(seed)

    def length(mean: float, most: int) -> int:
        sigma = mix["sigma"]
        return int(np.clip(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma), 1, most))

    groups = []
    for number in range(mix["groups"]):
        prompt = tuple(int(t) for t in rng.integers(0, vocabulary, length(mix["prompt"], mix["most"])))
        rows = []
        for n in range(mix["samples"]):
            completion = tuple(int(t) for t in rng.integers(0, vocabulary, length(mix["completion"], mix["most"])))
            flat = number < mix["flat"]
            rows.append({"prompt": prompt, "completion": completion, "reward": 1.0 if flat else float(n % 2)})
        groups.append({"rows": rows})
    return groups


def as_groups(rows: list[dict[str, Any]]) -> list[Any]:
    """The same as this tree's `Group`s. Each token's behaviour log probability is that of a model that knows nothing."""
    trajectory = importlib.import_module("learner.trajectory")
    span = importlib.import_module("p2p.protocol.rollout").Span
    version = importlib.import_module("p2p.version").Version(0, 0)
    groups = []
    for number, group in enumerate(rows):
        made = []
        for row in group["rows"]:
            count = len(row["completion"])
            made.append(trajectory.Trajectory(
                prompt_ids=row["prompt"], completion_ids=row["completion"], logprobs=(-10.0,) * count,
                spans=(span(start=0, stop=count, version=version),), reward=row["reward"], finish="stop", node="n", seed=0,
            ))  # fmt: skip
        groups.append(trajectory.Group(number, number, tuple(made)))
    return groups


def make_trainer(told: dict[str, Any]) -> Any:
    """This tree's PolicyTrainer over a random model of the shape."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(told["threads"])
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    config = AutoConfig.for_model(told["kind"], **told["values"])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
    settings: dict[str, Any] = {"model": "", "checkpoint_dir": "", **told["settings"]}
    if _OLD:
        settings = {"task": "reverse", **{k: v for k, v in settings.items() if k not in told["new"]}}
        trainer = importlib.import_module("learner.trainer")
        return trainer.PolicyTrainer(model, importlib.import_module("learner.trainer_config").TrainerConfig(**settings))
    config_class = importlib.import_module("learner.trainer.settings").TrainerConfig
    return importlib.import_module("learner.trainer.policy").PolicyTrainer(model, config_class(**settings))


def main() -> int:
    """Until stdin ends."""
    told = json.loads(sys.stdin.readline())
    trainer = make_trainer(told)
    freed = None
    if not _OLD and importlib.util.find_spec("learner.trainer.freed"):  # what the trainer's own process does with its memory
        size = sum(parameter.numel() for parameter in trainer.trained.module.parameters())
        freed = importlib.import_module("learner.trainer.freed").FreedMemory(size)
        freed.begin()
    print(json.dumps({"pid": os.getpid(), "old": _OLD}), flush=True)
    for number, line in enumerate(sys.stdin):
        asked = json.loads(line)
        groups = as_groups(make_rows(asked["seed"], asked["mix"], told["values"]["vocab_size"]))
        before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        trainer.accumulate(groups)
        metrics = trainer.step(number)
        if freed is not None:
            freed.after_step()
        after, ended = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        print(json.dumps({
            "seconds": ended - began, "cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
            "peak": after.ru_maxrss << 10, "loss": metrics["loss/mean"], "norm": metrics["optim/grad_norm"],
            "rows": sum(len(g.trajectories) for g in groups),
            "tokens": sum(len(t.prompt_ids) + len(t.completion_ids) for g in groups for t in g.trajectories),
        }), flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
