"""docs/objectives.md, made from the objectives' own docstrings and fields. Pure; must not know the configuration."""

from __future__ import annotations

import inspect
import json
from typing import Any, get_args

from pydantic_core import PydanticUndefined

from learner.trainer.objectives.registry import OBJECTIVES

INTRO = """\
# Objectives

<!-- Made by `shoal config objectives`, from learner/trainer/objectives. -->

`trainer.objective` names the loss of a token, `trainer.objective_options` sets what it takes:

    [trainer]
    objective = "cispo"
    objective_options = { high = 3.0 }

pi is the trainer's policy, mu the one that sampled the token (older weights, another engine), pi_prox the trainer's at the
start of the step, r = pi / mu, A the advantage, sg(x) is x without gradient. Log ratios are cut at 20 nats. What the losses of
tokens are averaged over is `trainer.aggregate`, what A is made of `trainer.baseline` and `trainer.scale_advantages`; a KL penalty
(`trainer.kl_coef`) and an entropy bonus (`trainer.entropy_coef`) are added to each. `shoal config presets` shows papers' settings
by name. Each loss and its gradient is tested against a plain fp64 program of its formula (`tests/unit/test_objectives.py`).

The metrics say what an objective does: the share of tokens it lets go (`clip_ratio/low_mean`, `clip_ratio/high_mean`), their mean
weight (`objective/weight_mean`), the effective sample size (`off_policy/effective`), and how far pi is from mu by the age of the
tokens (`mismatch_kl/age_*`).
"""


def objectives_markdown() -> str:
    """The whole page."""
    lines = [INTRO]
    for row in objective_rows():
        paper = row["paper"]
        source = f" ([arXiv {paper}](https://arxiv.org/abs/{paper}))" if paper[:4].isdigit() else f" ({paper})"
        lines += [f"## {row['name']}{source}", "", row["what"], ""]
        if not row["nucleus"]:
            lines += ["It needs `rollout.top_p` = 1.", ""]
        lines += ["| Key | Type | Default | What it is |", "|---|---|---|---|"]
        lines += [f"| `{o['key']}` | {o['type']} | `{o['default']}` | {o['what']} |" for o in row["options"]]
        lines.append("")
    return "\n".join(lines)


def objective_rows() -> list[dict[str, Any]]:
    """The same for programs, a row for each objective."""
    return [
        {
            "name": name, "paper": kind.paper, "nucleus": kind.nucleus, "what": inspect.getdoc(kind) or "",
            "options": [
                {
                    "key": key, "type": _type(field.annotation), "default": json.dumps(field.default),
                    "what": " ".join((field.description or "").split()),
                }
                for key, field in kind.model_fields.items()
                if field.default is not PydanticUndefined
            ],
        }
        for name, kind in OBJECTIVES.items()
    ]  # fmt: skip


def _type(annotation: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string"}
    return names.get(annotation) or ", ".join(f"`{json.dumps(value)}`" for value in get_args(annotation))
