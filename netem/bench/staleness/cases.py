"""What one run of the study is: objective, staleness, seed, task, and what is changed beside them. Pure; must not know torch.

A case has a key that says all of it, so that a study that was stopped goes on with what is missing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from p2p.errors import UsageError

STALENESS = (0, 1, 3, 6, 11, 16, 32)
"""Steps. 6 and 11 are ECHO-2's last good one and its collapse, 1 to 3 and about 10 StaleFlow's."""

WAVES = ((0, 16), (32,))
"""What is run first, and next: a study that is stopped early has the ends."""

SEEDS = (0, 1, 2, 3, 4)
"""Of the study. One more is kept unseen (`netem.bench.staleness.parts`)."""

STEPS, GROUPS, SAMPLES, LR = 120, 8, 16, 3e-4
"""Of one run: the demo's, with half of its groups."""

WARM_UP_TARGET = 0.25
"""Share of right answers at which the supervised start ends. The demo's own 0.1 leaves some seeds with a start from which nothing
is learned at any staleness; that would be measured here in place of staleness."""

TASKS: dict[str, dict[str, Any]] = {
    "reverse": {"options": {"digits": 6}, "most": 8},
    "add": {"options": {"digits": 2}, "most": 5},
    "mixed": {"options": {}, "most": 12},
    "sort": {"options": {}, "most": 8},
    "chat": {"options": {}, "most": 12},
}
"""The tasks: options, and most tokens of an answer. "chat" is the chat demo's questions, for its real model
(`netem.bench.staleness.chat`). "mixed" and "sort" are this bench's own
(`netem.bench.staleness.own_tasks`)."""

OBJECTIVES: dict[str, dict[str, Any]] = {
    "grpo": {"objective": "grpo"},
    "grpo-keep": {"objective": "grpo", "objective_options": {"beyond": "keep"}},
    "tis": {"objective": "decoupled"},
    "prime_rl": {"objective": "difference", "scale_advantages": "nothing"},
    "cispo": {"objective": "cispo", "aggregate": "group", "scale_advantages": "batch"},
    "gspo": {"objective": "gspo", "aggregate": "sequence"},
    "topr": {"objective": "topr", "aggregate": "sequence"},
    "m2po": {"objective": "m2po"},
    "icepop": {"objective": "masked"},
    "gepo": {"objective": "gepo", "aggregate": "sequence"},
}
"""Trainer settings by name: those of the presets of these names (`learner.presets`), without what the presets do to rollouts, and
"grpo" as `trainer.objective` has it without a preset (clip-higher, mean over tokens, no KL penalty, gradient dropped beyond the
cap) and with the capped weight kept."""

MATRIX = ("grpo", "grpo-keep", "tis", "prime_rl", "cispo", "gspo", "topr", "m2po")
"""The objectives of the study's matrix."""


def _square_root(staleness: int) -> float:
    return 1 / math.sqrt(1 + staleness)


def _quarter_power(staleness: int) -> float:
    return (1 + staleness) ** -0.25


LR_RULES: dict[str, Callable[[int], float]] = {
    "constant": lambda staleness: 1.0, "sqrt": _square_root, "fourth": _quarter_power,
}  # fmt: skip
"""What the learning rate is multiplied by, by name, of the staleness: 1, (1 + S)^-1/2 or (1 + S)^-1/4."""


@dataclass(frozen=True, slots=True)
class Case:
    """One run. Everything that its numbers depend on, with the commit."""

    objective: str
    staleness: int
    seed: int
    task: str = "reverse"
    steps: int = STEPS
    groups: int = GROUPS
    samples: int = SAMPLES
    lr: float = LR
    lr_rule: str = "constant"
    trainer: Mapping[str, Any] = field(default_factory=dict)
    """settings of the trainer beside the objective's"""
    options: Mapping[str, Any] = field(default_factory=dict)
    """of the objective, beside its own"""
    equal_groups: str = "train"
    """as `rollout.equal_groups`"""
    extra_groups: int = 0
    """groups that are begun beyond `groups`; the first to end are kept (`netem.bench.staleness.arrivals`)"""
    cut_share: float = 0.0
    """share of a step's sequences that is still running when the others are cut where they are"""

    @property
    def key(self) -> str:
        """All of it as text, without what is as usual."""
        usual = asdict(Case(self.objective, self.staleness, self.seed))
        return json.dumps({k: v for k, v in asdict(self).items() if k in ("objective", "staleness", "seed") or v != usual[k]})

    @property
    def label(self) -> str:
        """What is compared: all but staleness and seed."""
        others = json.loads(replace(self, staleness=0, seed=0).key)
        for name in ("objective", "staleness", "seed"):
            others.pop(name)
        words = [f"{k}={v}" if not isinstance(v, dict) else ",".join(f"{a}={b}" for a, b in v.items()) for k, v in others.items()]
        return " ".join([self.objective, *words])

    @property
    def learning_rate(self) -> float:
        return self.lr * LR_RULES[self.lr_rule](self.staleness)

    def trainer_settings(self) -> dict[str, Any]:
        """Keyword arguments of `TrainerConfig`, beside the model and its folder."""
        own = dict(OBJECTIVES[self.objective])
        options = {**own.pop("objective_options", {}), **self.options}
        return {
            "steps": self.steps, "lr": self.learning_rate, "max_staleness": self.staleness, "seed": self.seed, "threads": 1,
            "device": "cpu", "max_new_tokens": TASKS[self.task]["most"], "micro_batch_groups": self.groups,
            "objective_options": options, **own, **self.trainer,
        }  # fmt: skip


def check_names(what: str, names: Iterable[str], known: Iterable[str]) -> list[str]:
    """The names, or UsageError that says which there are."""
    found, there = list(names), list(known)
    for name in found:
        if name not in there:
            raise UsageError(f"{what}: {name!r} is none of {', '.join(there)}")
    return found


def matrix(base: Case, objectives: Iterable[str], staleness: Iterable[int], seeds: Iterable[int]) -> list[Case]:
    """`base` with each of these, in an order in which a part of it is useful: seed after seed in each of the WAVES, then the
    rest."""
    objectives, staleness, seeds = list(objectives), list(staleness), list(seeds)
    early = [[s for s in staleness if s in wave] for wave in WAVES]
    late = [s for s in staleness if not any(s in wave for wave in WAVES)]
    return [
        replace(base, objective=o, staleness=s, seed=seed)
        for some in (*early, late) for seed in seeds for o in objectives for s in some
    ]  # fmt: skip
