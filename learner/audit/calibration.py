"""What honest nodes' statistics are, by kind of engine, type and device; measured on trusted nodes, and kept as JSON. Pure.

The means must be upper bounds for honest nodes, or the tests' promise does not hold. So a measured mean is raised by four
standard errors and by MARGIN. Must not know how a node was measured, or files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType

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


def read_arithmetic(text: str) -> NodeArithmetic:
    """From "engine/dtype/device", as nodes say it; what is not of that form is of no known kind."""
    parts = text.split("/")
    return NodeArithmetic(*parts) if len(parts) == 3 and all(parts) else NodeArithmetic("unknown", "unknown", "unknown")


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


SHIPPED: Mapping[NodeArithmetic, HonestMeans] = MappingProxyType({
    NodeArithmetic("transformers", "float32", "cpu"): LEAST,
    NodeArithmetic("transformers", "bfloat16", "cpu"): HonestMeans(),
})
"""What kinds have that a run has not measured itself. Float32 is measured: no deviation of it came near LEAST (bench/audit.md).
That of bfloat16 is chosen: several times what was measured on one small model, since a larger one rounds more."""

ENOUGH = 4_096
"""Tokens of trusted nodes from which a kind is measured."""

PLENTY = 32_768
"""Tokens of trusted nodes after which a kind is not looked at any more."""


@dataclass
class Calibration:
    """What honest nodes are held to, by kind: as given, as measured here, else as shipped. `changed(text)` hears of all of it, as
    `to_json` has it, when a kind was measured."""

    means: dict[NodeArithmetic, HonestMeans] = field(default_factory=lambda: dict(SHIPPED))
    given: frozenset[NodeArithmetic] = frozenset()
    """kinds that are not measured anew"""
    changed: Callable[[str], None] = lambda text: None
    _seen: dict[NodeArithmetic, list[list[np.ndarray]]] = field(default_factory=dict, init=False, repr=False)
    """distances, claimed and recomputed log probabilities of trusted nodes"""
    _tokens: dict[NodeArithmetic, int] = field(default_factory=dict, init=False, repr=False)
    _measured_at: dict[NodeArithmetic, int] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, text: str, changed: Callable[[str], None]) -> Calibration:
        """With what a file gives. UsageError when it is none of `to_json`."""
        given = from_json(text) if text else {}
        return cls({**SHIPPED, **given}, frozenset(given), changed)

    def honest(self, kind: NodeArithmetic) -> HonestMeans:
        """What a node of this kind, by its own word, is held to: of one that nobody measured, the widest of those known."""
        known = self.means.get(kind)
        return known if known is not None else widest(self.means)

    def wants(self, kind: NodeArithmetic) -> bool:
        """Whether tokens of trusted nodes of this kind would tell more."""
        return kind not in self.given and self._tokens.get(kind, 0) < PLENTY

    def add(self, kind: NodeArithmetic, distance: np.ndarray, claimed: np.ndarray, recomputed: np.ndarray) -> None:
        """Tokens of a trusted node. The kind is measured once there are ENOUGH, each time that they have doubled, and with PLENTY
        for the last time."""
        if not self.wants(kind) or not len(distance):
            return
        columns = self._seen.setdefault(kind, [[], [], []])
        for column, values in zip(columns, (distance, claimed, recomputed), strict=True):
            column.append(values)
        self._tokens[kind] = tokens = self._tokens.get(kind, 0) + len(distance)
        if tokens >= max(ENOUGH, 2 * self._measured_at.get(kind, 0)) or tokens >= PLENTY:
            self._measured_at[kind] = tokens
            self.means[kind] = measure(*(np.concatenate(column) for column in columns))
            self.changed(to_json(self.means))
        if tokens >= PLENTY:
            del self._seen[kind]
