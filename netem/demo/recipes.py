"""What the demos train, as plain settings. Must import without torch."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Recipe:
    """One demo: how its model is made (see `build_model`) and the learner's settings."""

    name: str
    steps: int
    model: dict[str, Any]
    learner: dict[str, Any] = field(default_factory=dict)
    capacity: int = 96
    spot: dict[str, Any] = field(default_factory=dict)
    """other settings of the rollout where nodes come and go"""
    spot_capacity: int = 256
    """So that the two or three nodes that are left at the worst moments are enough: with 96 the learner waited 45 % of its time
    then, and 6 % beside four or more."""

    def config(self, run_dir: Path, model: Path, steps: int, seed: int, spot: bool = False) -> dict[str, Any]:
        """The learner's configuration as a dictionary for `learner.config.build_config`."""
        settings: dict[str, Any] = json.loads(json.dumps(self.learner))
        settings["rollout"] |= self.spot if spot else {}
        settings |= {"run_dir": str(run_dir), "model": str(model), "seed": seed}
        settings["trainer"] |= {"steps": steps, "seed": seed}
        settings["swarm"]["listen"] = ["/ip4/127.0.0.1/tcp/0"]
        return settings


RECIPES = {
    # Right answers start near one in ten and end near nine in ten. Chunks of 16 KiB, so that a delta of some 200 KiB is
    # a dozen chunks and relaying is real.
    "reverse": Recipe(
        "reverse",
        steps=120,
        model={"kind": "demo", "target": 0.1},
        learner={
            "task": {"name": "reverse", "options": {"digits": 6}},
            "rollout": {"max_staleness": 2, "groups_per_step": 16, "samples": 16, "max_new_tokens": 8,
                        "micro_batch_groups": 8},
            "swarm": {"segment_bytes": 131072, "anchor_every": 20},
            "trainer": {"lr": 3e-4, "threads": 1, "eval_size": 256, "eval_every": 25},
        },
        # Nodes share two cores with the learner: larger steps leave it more to do for each decoding step of theirs.
        spot={"groups_per_step": 32, "max_staleness": 3},
    ),
    # About 19 M random parameters at a post-training learning rate: what matters is the density of its deltas.
    "sparse": Recipe(
        "sparse",
        steps=4,
        model={"kind": "random", "size": "20m"},
        learner={
            "task": {"name": "reverse", "options": {"digits": 6}},
            "rollout": {"max_staleness": 2, "groups_per_step": 4, "samples": 4, "max_new_tokens": 8,
                        "micro_batch_groups": 4},
            "swarm": {"segment_bytes": 2097152, "anchor_every": 20},
            "trainer": {"lr": 1e-6, "lr_ramp": 0, "threads": 1, "eval_size": 0},
        },
        capacity=16,
    ),
}  # fmt: skip


def build_model(folder: Path, recipe: Recipe, seed: int) -> None:
    """Make the recipe's model in `folder`. Imports torch: run it in a process of its own (`python -m
    netem.demo.recipes FOLDER RECIPE SEED`)."""
    import torch

    from learner.tasks.registry import make_task
    from netem.demo.tiny_model import build_demo_model, build_random_model

    torch.set_num_threads(2)
    task = make_task(recipe.learner["task"]["name"], seed, recipe.learner["task"]["options"])
    if recipe.model["kind"] == "demo":
        build_demo_model(folder, task, seed=seed, target=recipe.model["target"], say=partial(print, flush=True))
    else:
        build_random_model(folder, size=recipe.model["size"], characters="".join(task.characters()), seed=seed)


if __name__ == "__main__":
    build_model(Path(sys.argv[1]), RECIPES[sys.argv[2]], int(sys.argv[3]))
