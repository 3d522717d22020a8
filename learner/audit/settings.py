"""The table [audit] of a run's configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from learner.audit.sequential import FALSE_ALARM
from learner.section import Section


class AuditSection(Section):
    """Whether what nodes generate is what was asked for: some of it is scored again, under the very weights that it claims. Nodes
    in `standing.trusted` are not looked at, but for measuring how honest nodes of their kind round."""

    share: float = Field(default=0.02, ge=0, le=1)
    """Share of a proven node's completions that are scored again. Of a node that is not proven, or was doubted, all are. 0 turns
    audits off: `--audit 0` is short for it."""
    device: str = "cpu"
    """Device that scores, as torch names it: "cpu", "cuda", "cuda:1". It takes the memory of the model there."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type that it is scored in. bfloat16 takes half of the memory and tells less apart."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of the process that scores. It runs at a low priority."""
    calibration: str = ""
    """File of what honest nodes' deviations are, by engine, type and device, as an earlier run of the same model wrote it
    (audit-calibration.json in its directory). Kinds that it names are not measured anew. One of a run that drew at another
    rollout.temperature or rollout.top_p, or from a model of another size, is refused. "" goes on with what this run measured
    before, and measures on trusted nodes, and in bfloat16 itself."""
    false_alarm: float = Field(default=FALSE_ALARM, gt=0, le=0.01)
    """Chance that an honest node is ever called wrong in a run, however long that is."""
