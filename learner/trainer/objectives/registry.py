"""Objectives by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from learner.section import check_section
from learner.trainer.objectives.cispo import Cispo
from learner.trainer.objectives.decoupled import Decoupled
from learner.trainer.objectives.difference import Difference
from learner.trainer.objectives.gepo import Gepo
from learner.trainer.objectives.grpo import Grpo
from learner.trainer.objectives.gspo import Gspo
from learner.trainer.objectives.m2po import M2po
from learner.trainer.objectives.masked import Masked
from learner.trainer.objectives.port import Objective
from learner.trainer.objectives.topr import Topr
from p2p.errors import UsageError
from p2p.verbs import nearest

OBJECTIVES: dict[str, type[Objective]] = {
    "grpo": Grpo, "gspo": Gspo, "cispo": Cispo, "difference": Difference, "decoupled": Decoupled, "masked": Masked, "topr": Topr,
    "m2po": M2po, "gepo": Gepo,
}  # fmt: skip
"""What `trainer.objective` may be."""


def make_objective(name: str, options: Mapping[str, Any]) -> Objective:
    """The objective called `name` with these settings. UsageError, a line for each mistake, for an unknown name or setting."""
    kind = OBJECTIVES.get(name)
    if kind is None:
        known = nearest(name, OBJECTIVES) or "; known: " + ", ".join(OBJECTIVES)
        raise UsageError(f"unknown objective {name!r}{known}")
    return check_section(kind, dict(options), f"objective {name}")
