"""What the demos train, as plain settings. Must import without torch."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from netem.demo.chat_model import KEPT, make_chat_model

CHAT = Path(__file__).parent / "chat"
"""Questions and reward function of the chat demo."""

LORA_LR = 10
"""An adapter's learning rate over the whole model's: what is usual."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """One demo: how its model is made (see `build_model`) and the learner's settings."""

    name: str
    steps: int
    model: dict[str, Any]
    learner: dict[str, Any] = field(default_factory=dict)
    about: str = ""
    """what a person is told at the start"""
    kept: Path | None = None
    """where the model is kept for the next demo; None: it is made anew in the run's directory"""
    capacity: int = 96
    spot: dict[str, Any] = field(default_factory=dict)
    """other settings of the rollout where nodes come and go"""
    spot_capacity: int = 256
    """So that the two or three nodes that are left at the worst moments are enough: with 96 the learner waited 45 % of its time
    then, and 6 % beside four or more."""

    @property
    def own_reward(self) -> bool:
        """Whether answers are scored by a reward function, whose value then says more than exact match."""
        return "reward" in self.learner["task"]

    def config(
        self, run_dir: Path, model: Path, steps: int, seed: int, spot: bool = False, *, lora: int = 0,
    ) -> dict[str, Any]:  # fmt: skip
        """The learner's configuration as a dictionary for `learner.config.build_config`. `lora`: rank of an adapter that is
        trained in place of every weight."""
        settings: dict[str, Any] = json.loads(json.dumps(self.learner))
        settings["rollout"] |= self.spot if spot else {}
        settings |= {"run_dir": str(run_dir), "model": str(model), "seed": seed}
        settings["trainer"] |= {"steps": steps, "seed": seed}
        if lora:
            settings["trainer"] |= {"lr": LORA_LR * settings["trainer"]["lr"], "lora": {"rank": lora}}
        settings["swarm"]["listen"] = ["/ip4/127.0.0.1/tcp/0"]
        settings["standing"] = {"trusted": ["*"]}  # all nodes are the demo's own: nothing is to be proven, or checked
        return settings


RECIPES = {
    # Right answers start near one in four and end near nine in ten. What is wrong near the end are neighbours that change places:
    # with the usual base of rotary positions most of their frequencies do not tell neighbours apart, and some seeds stayed near
    # one half (bench/demo.md). Chunks of 16 KiB, so that a delta of some 200 KiB is a dozen chunks and relaying is real.
    "reverse": Recipe(
        "reverse",
        steps=120,
        model={"kind": "demo", "target": 0.25, "rope_theta": 100.0},
        learner={
            "task": {"name": "reverse", "options": {"digits": 6}},
            "rollout": {"max_staleness": 2, "groups_per_step": 16, "samples": 16, "max_new_tokens": 8,
                        "micro_batch_groups": 8},
            "swarm": {"segment_bytes": 131072, "anchor_every": 20},
            "trainer": {"lr": 3e-4, "lr_schedule": "linear", "lr_min_ratio": 0.1, "threads": 1, "eval_size": 256,
                        "eval_every": 25},
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
    # A real chat model learns to answer short questions in one word. Few tokens an answer, and small steps: one takes some
    # twenty seconds of two quiet cores, and less as answers get short.
    "chat": Recipe(
        "chat",
        steps=40,
        model={"kind": "chat"},
        about="SmolLM2-135M-Instruct, a real chat model, learns to answer short questions in one word. It may take 10 to 15 "
              "minutes of two quiet cores, and 10 GB of memory.",
        kept=KEPT,
        learner={
            "task": {"data": str(CHAT / "questions.jsonl"), "reward": f"{CHAT / 'rewards.py'}:score",
                     "system_prompt": "Answer with one word or number.", "held_out": 0.12},
            "rollout": {"max_staleness": 1, "groups_per_step": 8, "samples": 16, "max_new_tokens": 12,
                        "micro_batch_groups": 1},
            "trainer": {"lr": 5e-5, "objective": "decoupled", "threads": 1, "micro_batch_tokens": 1024, "checkpoint_every": 10,
                        "activation_checkpointing": "off", "eval_size": 48, "eval_every": 20},
            "swarm": {},
        },
        capacity=48,
    ),
    # A game of several turns: digits by hints. A player who does not listen finds one secret in six. As many prompts a step as
    # there are secrets, so that each is sought about once in every step. At 0.685 nats a token the warm-up has just found what a
    # hint says of a guess, and before that rewards teach nothing: after 80 to 170 steps, by seed.
    "game": Recipe(
        "game",
        steps=150,
        model={"kind": "demo", "target": 1.0, "nats": 0.685, "steps": 400},
        learner={
            "task": {"name": "guess_digits", "options": {"digits": 3, "symbols": 3, "guesses": 5}},
            "rollout": {"max_staleness": 2, "groups_per_step": 27, "samples": 8, "max_new_tokens": 36,
                        "micro_batch_groups": 9},
            "swarm": {"segment_bytes": 131072, "anchor_every": 20},
            "trainer": {"lr": 1e-3, "threads": 1, "eval_size": 0, "checkpoint_every": 5},
        },
        capacity=320,  # episodes that wait for a hint make room for none, so a node may as well run a whole step at once
    ),
}  # fmt: skip


def build_model(folder: Path, recipe: Recipe, seed: int) -> None:
    """Make the recipe's model in `folder`. Imports torch: run it in a process of its own (`python -m
    netem.demo.recipes FOLDER RECIPE SEED`)."""
    if recipe.model["kind"] == "chat":
        make_chat_model(folder, say=partial(print, flush=True))
        return
    import torch

    from learner.tasks.registry import make_task
    from netem.demo.tiny_model import WARM_UP_STEPS, build_demo_model, build_random_model

    torch.set_num_threads(1)  # a second one gains nothing with models this small, and costs much where nodes run beside it
    task = make_task(recipe.learner["task"]["name"], seed, recipe.learner["task"]["options"])
    if recipe.model["kind"] == "demo":
        most = recipe.model.get("steps", WARM_UP_STEPS)
        ends = {"target": recipe.model["target"], "nats": recipe.model.get("nats", 0.0), "steps": most}
        shape = {"rope_theta": recipe.model["rope_theta"]} if "rope_theta" in recipe.model else {}
        build_demo_model(folder, task, seed=seed, **ends, **shape, say=partial(print, flush=True))
    else:
        build_random_model(folder, size=recipe.model["size"], characters="".join(task.characters()), seed=seed)


if __name__ == "__main__":
    build_model(Path(sys.argv[1]), RECIPES[sys.argv[2]], int(sys.argv[3]))
