"""Presets: settings by name, each the objective of a paper as far as our trainer has it. Pure; must not know the configuration.

A preset lies under the file and the flags: what is said there wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

PresetName = Literal[
    "", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "prime_rl", "tis", "icepop", "topr", "m2po", "gepo", "decoupled"
]
"""The presets; "" is none."""


@dataclass(frozen=True, slots=True)
class Preset:
    """The settings of one objective."""

    title: str
    paper: str
    """its number on arXiv; "" without one"""
    what: str
    """one sentence"""
    sets: Mapping[str, Any]
    """dotted key -> value"""
    lacks: tuple[str, ...]
    """what the paper does and this does not, one sentence each"""

    def table(self, objective: object = None) -> dict[str, Any]:
        """What it sets, as the tables of a configuration file. `objective` is the one that file or flags name, None without:
        beside another than its own it sets no options, which only its own takes."""
        tables: dict[str, Any] = {}
        other = objective not in (None, self.sets["trainer.objective"])
        for key, value in self.sets.items():
            section, _, name = key.rpartition(".")
            if not (other and name == "objective_options"):
                tables.setdefault(section, {})[name] = value
        return tables


_ASYNCHRONOUS = (
    "Completions may be up to rollout.max_staleness steps old; rollout.max_staleness = 0 is on-policy."
)
_SIZES = "It sets no learning rate, group sizes or lengths."

PRESETS: dict[PresetName, Preset] = {
    "grpo": Preset(
        "GRPO", "2402.03300",
        "Advantages relative to the group and divided by its standard deviation, the mean over each completion's tokens, and a "
        "KL penalty towards the base model.",
        {
            "rollout.equal_groups": "train", "trainer.objective": "grpo",
            "trainer.objective_options": {"clip_low": 0.2, "clip_high": 0.2}, "trainer.aggregate": "sequence",
            "trainer.scale_advantages": "group", "trainer.kl_coef": 0.04,
        },
        (
            "The reference model stays the base model: the iterative form, which renews it, is not there.",
            "Rewards are of whole answers: there is no reward for each step of an answer, and no reward model.",
            _ASYNCHRONOUS,
            f"{_SIZES} The paper's run has 64 completions a prompt, 1,024 a step, at most 1,024 tokens, and lr 1e-6.",
        ),
    ),
    "dr_grpo": Preset(
        "Dr. GRPO", "2503.20783",
        "GRPO without its two biases: advantages are not divided by the standard deviation, and losses are divided by a constant "
        "instead of each completion's length. No KL penalty.",
        {
            "rollout.equal_groups": "train", "trainer.objective": "grpo",
            "trainer.objective_options": {"clip_low": 0.2, "clip_high": 0.2}, "trainer.aggregate": "constant",
            "trainer.scale_advantages": "nothing", "trainer.kl_coef": 0.0,
        },
        (
            "The constant is rollout.max_new_tokens.",
            _ASYNCHRONOUS,
            _SIZES,
        ),
    ),
    "dapo": Preset(
        "DAPO", "2503.14476",
        "Clip-higher, dynamic sampling (groups of equal rewards are replaced), the mean over all tokens, and no KL penalty.",
        {
            "rollout.equal_groups": "drop", "trainer.objective": "grpo",
            "trainer.objective_options": {"clip_low": 0.2, "clip_high": 0.28}, "trainer.aggregate": "token",
            "trainer.scale_advantages": "group", "trainer.overlong": "mask", "trainer.kl_coef": 0.0,
        },
        (
            "Overlong filtering is on; soft overlong punishment is trainer.overlong_tokens, in the paper a fifth of the longest "
            "completion.",
            "The mean is over the tokens of the whole step; the paper's formula takes each group's.",
            "One optimizer update a step (trainer.minibatches); the paper takes 16.",
            _ASYNCHRONOUS,
            f"{_SIZES} The paper's run has 16 completions of each of 512 prompts, and lr 1e-6.",
        ),
    ),
    "gspo": Preset(
        "GSPO", "2507.18071",
        "One ratio for a whole completion, clipped very close to 1, and the mean over completions.",
        {
            "trainer.objective": "gspo", "trainer.aggregate": "sequence", "trainer.scale_advantages": "group",
            "trainer.kl_coef": 0.0,
        },
        ("One optimizer update a step (trainer.minibatches); the paper takes 4.", _ASYNCHRONOUS, _SIZES),
    ),
    "cispo": Preset(
        "CISPO, as ScaleRL has it", "2510.13786",
        "Clipped weights that let no token go, the mean over each group's tokens, and advantages divided by the deviation of the "
        "whole step's.",
        {
            "rollout.equal_groups": "drop", "trainer.objective": "cispo",
            "trainer.aggregate": "group", "trainer.scale_advantages": "batch", "trainer.kl_coef": 0.0,
        },
        ("Prompts that are always solved are drawn again.", _ASYNCHRONOUS, _SIZES),
    ),
    "prime_rl": Preset(
        "prime-rl's default", "",
        "Tokens whose probability moved by more than 0.3 are let go; advantages without standard deviation.",
        {
            "trainer.objective": "difference", "trainer.aggregate": "token",
            "trainer.scale_advantages": "nothing", "trainer.kl_coef": 0.0,
        },
        ("Its staleness bound is 8, which is rollout.max_staleness here.", _SIZES),
    ),
    "tis": Preset(
        "Truncated importance sampling", "",
        "A truncated weight for what the sampling policy did differently, and PPO's clip around the trainer's own policy (verl, "
        "slime, SkyRL).",
        {
            "trainer.objective": "decoupled", "trainer.aggregate": "token", "trainer.kl_coef": 0.0,
        },
        (_ASYNCHRONOUS, _SIZES),
    ),
    "icepop": Preset(
        "IcePop", "2510.18855",
        "Tokens are weighed by pi / mu, and let go where that is below 0.5 or above 5.",
        {
            "trainer.objective": "masked", "trainer.aggregate": "token", "trainer.kl_coef": 0.0,
        },
        (_ASYNCHRONOUS, _SIZES),
    ),
    "topr": Preset(
        "TOPR", "2503.14286",
        "Good answers count as they are, bad ones with a ratio of at most 1.",
        {
            "trainer.objective": "topr", "trainer.aggregate": "sequence", "trainer.kl_coef": 0.0,
        },
        ("Advantages are the group's; the paper has a constant baseline.", _ASYNCHRONOUS, _SIZES),
    ),
    "m2po": Preset(
        "M2PO", "2510.01161",
        "Tokens of largest log(r)^2 are let go until the mean of the others is at most 0.04.",
        {
            "trainer.objective": "m2po", "trainer.aggregate": "token",
            "trainer.scale_advantages": "group", "trainer.kl_coef": 0.0,
        },
        ("The mean is over the tokens of a forward, not of the step.", _ASYNCHRONOUS, _SIZES),
    ),
    "gepo": Preset(
        "GEPO", "2508.17850",
        "Each completion is weighed against what its group expects.",
        {
            "trainer.objective": "gepo", "trainer.aggregate": "sequence", "trainer.scale_advantages": "group",
            "trainer.kl_coef": 0.0,
        },
        (_ASYNCHRONOUS, _SIZES),
    ),
    "decoupled": Preset(
        "Decoupled PPO, as AReaL has it", "2505.24298",
        "PPO's clip around the trainer's policy at the start of the step, and a weight of at most 5 for the distance to mu.",
        {
            "trainer.objective": "decoupled", "trainer.objective_options": {"clip_low": 0.2, "clip_high": 0.2, "cap": 5.0},
            "trainer.aggregate": "token", "trainer.kl_coef": 0.0,
        },
        ("One optimizer update a step (trainer.minibatches); the paper takes 4.", _ASYNCHRONOUS, _SIZES),
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Applied:
    """What became of a preset under a file and flags."""

    sets: dict[str, Any]
    """dotted key -> value, as the preset has it"""
    replaced: dict[str, Any]
    """dotted key -> value that the file or a flag has instead"""


def applied(name: PresetName, values: Mapping[str, Any]) -> Applied:
    """`values`: the resolved configuration as tables."""
    sets, replaced = dict[str, Any](), dict[str, Any]()
    for key, value in PRESETS[name].sets.items():
        section, _, last = key.rpartition(".")
        found = values[section][last]
        (sets if found == value else replaced)[key] = found
    return Applied(sets, replaced)


def sentences(name: PresetName, values: Mapping[str, Any]) -> list[str]:
    """In words, for a person who reads a resolved configuration: none without a preset."""
    if not name:
        return []
    preset, found = PRESETS[name], applied(name, values)
    paper = f", arXiv {preset.paper}" if preset.paper else ""
    lines = [f"preset {name} ({preset.title}{paper}) sets {', '.join(found.sets) or 'nothing here'}"]
    if found.replaced:
        lines.append(f"instead of the preset's: {', '.join(found.replaced)}")
    return lines
