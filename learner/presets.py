"""Presets: settings by name, each the objective of a paper as far as our trainer has it. Pure; must not know the configuration.

A preset lies under the file and the flags: what is said there wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

PresetName = Literal["", "grpo", "dr_grpo", "dapo"]
"""The presets; "" is none."""


@dataclass(frozen=True, slots=True)
class Preset:
    """The settings of one objective."""

    title: str
    paper: str
    """its number on arXiv"""
    what: str
    """one sentence"""
    sets: Mapping[str, Any]
    """dotted key -> value"""
    lacks: tuple[str, ...]
    """what the paper does and this does not, one sentence each"""

    def table(self) -> dict[str, Any]:
        """What it sets, as the tables of a configuration file."""
        tables: dict[str, Any] = {}
        for key, value in self.sets.items():
            section, _, name = key.rpartition(".")
            tables.setdefault(section, {})[name] = value
        return tables


_ASYNCHRONOUS = (
    "Completions may be up to rollout.max_staleness steps old, and a token's ratio to the policy that sampled it is cut at "
    "trainer.tis_cap; rollout.max_staleness = 0 is on-policy."
)
_SIZES = "It sets no learning rate, group sizes or lengths."

PRESETS: dict[PresetName, Preset] = {
    "grpo": Preset(
        "GRPO", "2402.03300",
        "Advantages relative to the group and divided by its standard deviation, the mean over each completion's tokens, and a "
        "KL penalty towards the base model.",
        {
            "rollout.equal_groups": "train", "trainer.clip_low": 0.2, "trainer.clip_high": 0.2, "trainer.proximal": "behaviour",
            "trainer.aggregate": "sequence", "trainer.scale_advantages": True, "trainer.kl_coef": 0.04,
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
            "rollout.equal_groups": "train", "trainer.clip_low": 0.2, "trainer.clip_high": 0.2, "trainer.proximal": "behaviour",
            "trainer.aggregate": "constant", "trainer.scale_advantages": False, "trainer.kl_coef": 0.0,
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
            "rollout.equal_groups": "drop", "trainer.clip_low": 0.2, "trainer.clip_high": 0.28, "trainer.proximal": "behaviour",
            "trainer.aggregate": "token", "trainer.scale_advantages": True, "trainer.kl_coef": 0.0,
        },
        (
            "Overlong reward shaping and overlong filtering are not there: a completion that is cut off is scored as it stands.",
            "The mean is over the tokens of the whole step; the paper's formula takes each group's.",
            "One optimizer step a batch; the paper takes 16.",
            _ASYNCHRONOUS,
            f"{_SIZES} The paper's run has 16 completions of each of 512 prompts, and lr 1e-6.",
        ),
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
    lines = [f"preset {name} ({preset.title}, arXiv {preset.paper}) sets {', '.join(found.sets) or 'nothing here'}"]
    if found.replaced:
        lines.append(f"instead of the preset's: {', '.join(found.replaced)}")
    return lines
