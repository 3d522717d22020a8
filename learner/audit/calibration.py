"""What honest nodes' statistics are, by kind of engine, type and device; measured on trusted nodes, and kept as JSON. Pure.

The means must be upper bounds for honest nodes, or the tests' promise does not hold. So a measured mean is raised by four
standard errors and by MARGIN. Must not know how a node was measured, or files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np

from learner.audit.sequential import FAR, LOGPROB_SCALE, NEAR, HonestMeans
from p2p.errors import UsageError

MARGIN = 1.5
"""Factor on every measured mean: prompts change what entropy, and with it rounding, comes to."""

LEAST = HonestMeans(far=2e-4, near=5e-4, off=1e-3, bias=5e-4)
"""Means are never taken for less: no sample is long enough to tell."""


@dataclass(frozen=True, slots=True, order=True)
class NodeArithmetic:
    """What decides how a node rounds."""

    engine: str
    dtype: str
    device: str

    def __str__(self) -> str:
        return f"{self.engine}/{self.dtype}/{self.device}"


def measure(distance: np.ndarray, claimed: np.ndarray, recomputed: np.ndarray) -> HonestMeans:
    """From tokens of nodes that are known to be honest. UsageError without tokens."""
    n = len(distance)
    if not n:
        raise UsageError("a calibration needs tokens of trusted nodes")
    signed = np.clip((claimed - recomputed) / LOGPROB_SCALE, -1, 1) * LOGPROB_SCALE

    def share(beyond: float) -> float:
        rate = float((distance > beyond).mean())
        return MARGIN * (rate + 4 * math.sqrt(max(rate, 1 / n) / n))

    def mean(values: np.ndarray) -> float:
        return MARGIN * (abs(float(values.mean())) + 4 * float(values.std()) / math.sqrt(n))

    return HonestMeans(
        far=max(LEAST.far, share(FAR)), near=max(LEAST.near, share(NEAR)), off=max(LEAST.off, mean(np.abs(signed))),
        bias=max(LEAST.bias, mean(signed)),
    )  # fmt: skip


def widest(means: Mapping[NodeArithmetic, HonestMeans]) -> HonestMeans:
    """For a node of a kind that was never measured: the most that any kind has. What no kind was measured for has HonestMeans'
    defaults."""
    if not means:
        return HonestMeans()
    columns = [asdict(m) for m in means.values()]
    return HonestMeans(**{name: max(column[name] for column in columns) for name in columns[0]})


def to_json(means: Mapping[NodeArithmetic, HonestMeans]) -> str:
    """To be kept."""
    return json.dumps({str(kind): asdict(m) for kind, m in sorted(means.items())}, indent=1)


def from_json(text: str) -> dict[NodeArithmetic, HonestMeans]:
    """What `to_json` made. UsageError for anything else."""
    try:
        rows = json.loads(text)
        return {NodeArithmetic(*kind.split("/")): HonestMeans(**m) for kind, m in rows.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"this is no calibration of audits: {error}") from None
