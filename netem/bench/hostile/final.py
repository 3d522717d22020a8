"""`python -m netem.bench.hostile.final MODEL CHECKPOINT SEED`: how often the policy of a checkpoint is right, by itself: no node
answers here. Prints one JSON object: `sampled` and `greedy`, shares of right answers to held-out problems."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from safetensors.torch import load_file

from learner.tasks.prompting import decode_completion, encode_prompt
from learner.tasks.registry import make_task
from learner.trainer.model import load_model
from netem.bench.staleness.sampler import Sampler
from netem.demo.recipes import RECIPES

PROBLEMS, SAMPLES = 256, 8
"""Held-out problems, and answers to each: the share of right ones is known to 1.1 points (one standard error)."""


def final_reward(model: Path, checkpoint: Path, seed: int) -> dict[str, float]:
    """Exact match, sampled at temperature 1 and greedy."""
    torch.set_num_threads(1)
    recipe: dict[str, Any] = RECIPES["reverse"].learner
    task = make_task(recipe["task"]["name"], seed, recipe["task"]["options"])
    loaded = load_model(model, "cpu")
    state = load_file(checkpoint / "model.safetensors")
    with torch.no_grad():
        for name, parameter in loaded.model.named_parameters():
            parameter.copy_(state[name])
    sampler, most = Sampler(loaded.model), recipe["rollout"]["max_new_tokens"]
    problems = [task.held_out(i) for i in range(PROBLEMS)]
    prompts = [encode_prompt(loaded.tokenizer, p) for p in problems]
    draws = torch.rand(PROBLEMS * SAMPLES, most, generator=torch.Generator().manual_seed(seed))

    def right(made: Any, each: int) -> float:
        rows = zip((p for p in problems for _ in range(each)), made.ids, strict=True)
        return fmean(task.score(p, decode_completion(loaded.tokenizer, ids)).exact for p, ids in rows)

    return {"sampled": right(sampler(prompts, SAMPLES, most, draws), SAMPLES), "greedy": right(sampler(prompts, 1, most), 1)}


if __name__ == "__main__":
    print(json.dumps(final_reward(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))))
