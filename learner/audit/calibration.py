"""What honest nodes' statistics are, by kind of engine, type and device; measured on trusted nodes, and kept as JSON. Pure.

The means must be upper bounds for honest nodes, or the tests' promise does not hold. So a measured mean is raised by four
standard errors and by MARGIN. Must not know how a node was measured, or files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from learner.audit.sequential import (
    FAR,
    LOGPROB_SCALE,
    NEAR,
    NOISE_SCALES,
    HonestMeans,
    NodeTest,
    grossness,
    logit_differences,
)
from p2p.errors import UsageError

MARGIN = 1.5
"""Factor on a measured mean that hardly depends on the prompts."""

PROMPT_MARGIN = 10.0
"""Factor on the means that do: on prompts with several times the entropy, a bfloat16 node's log probabilities were off
5.6 times as much, and 9 times as many tokens were near an edge (bench/audit.md). Nobody knows what will be asked."""

NOISE_MARGIN = 2.0
"""The same for noise of logits and for what it lacks: kinds of node are further apart than that."""

OTHER_KIND = 1.5
"""Factor on how often a token is far, and on the noise of logits, for a node of a kind that nobody measured, beside the others.
Between transformers and vLLM on processors there is a tenth of difference (bench/audit.md). GPUs were not measured; elsewhere
transformers, vLLM and two GPUs drew 98 % of the same tokens (Token-DiFR)."""

STRETCH, STRETCHES, STRETCH_SPREADS = 128, 8, 4.0
"""Tokens in a row that are as loud or as exact as their prompt has it, so many stretches of them at the least (shorter ones where
there are few tokens), and how many standard deviations of such stretches' means an honest node may be off. A node's first tokens
may all be of one prompt: one of 222 honest nodes was called wrong by 140 tokens of a loud one (bench/audit.md)."""

LEAST_SHARE = 1e-3
"""Means of noise, and of what it lacks, are never taken for less."""

LEAST_TOWARD = 0.15
"""The mean of products with a suspect's differences is never taken for less. Rounding is a function of the context, and so is
what other weights do: they agree by chance for all tokens of one prompt at once, whose mean had a standard deviation of some 0.1
where that of all was zero (bench/audit.md). With 0.06, as measured token by token, an honest node was all but caught."""

LEAST = HonestMeans(far=2e-4, near=5e-4, gross=1e-5, off=1e-3, bias=5e-4)
"""Means are never taken for less: no sample is long enough to tell."""


@dataclass(frozen=True, slots=True, order=True)
class NodeArithmetic:
    """What decides how a node rounds."""

    engine: str
    dtype: str
    device: str

    def __str__(self) -> str:
        return f"{self.engine}/{self.dtype}/{self.device}"


def measure(
    distance: np.ndarray, claimed: np.ndarray, recomputed: np.ndarray, shift: np.ndarray,
    suspected: Mapping[str, np.ndarray] | None = None, *, repeated: np.ndarray | None = None,
) -> HonestMeans:  # fmt: skip
    """From tokens of nodes that are known to be honest. `suspected`: of some suspects (see `NodeTest`) what these tokens' log
    probabilities are under their weights; without them nothing is bet on suspects. `repeated`, bool: those that came in the same
    context before, whose log probabilities say nothing new. UsageError without tokens."""
    n = len(distance)
    if not n:
        raise UsageError("a calibration needs tokens of trusted nodes")
    if repeated is not None and not repeated.all():
        claimed, recomputed = claimed[~repeated], recomputed[~repeated]
        suspected = {name: values[~repeated] for name, values in (suspected or {}).items()}
    signed = np.clip((claimed - recomputed) / LOGPROB_SCALE, -1, 1) * LOGPROB_SCALE

    def share(beyond: np.ndarray, margin: float) -> float:
        rate = float(beyond.mean())
        return margin * (rate + 4 * math.sqrt(max(rate, 1 / n) / n))

    def mean(values: np.ndarray) -> float:
        return PROMPT_MARGIN * (abs(float(values.mean())) + 4 * float(values.std()) / math.sqrt(len(values)))

    logits = logit_differences(claimed, recomputed)
    logits = np.abs(logits[~np.isnan(logits)])
    shares = [np.minimum(logits / scale, 1.0) for scale in NOISE_SCALES]
    level = float(logits.mean()) if len(logits) else 0.0
    products = [_toward(level, claimed, recomputed, values) for values in (suspected or {}).values()]
    return HonestMeans(
        far=max(LEAST.far, share(distance > FAR, MARGIN)), near=max(LEAST.near, share(distance > NEAR, PROMPT_MARGIN)),
        gross=max(LEAST.gross, mean(grossness(distance, shift))),
        off=max(LEAST.off, mean(np.abs(signed))), bias=max(LEAST.bias, mean(signed)),
        noise=tuple(map(_most, shares)), quiet=tuple(_most(1.0 - x) for x in shares),
        level=level, toward=min(1.0, max(products, default=1.0)),
    )  # fmt: skip


def read_arithmetic(text: str) -> NodeArithmetic:
    """From "engine/dtype/device", as nodes say it; what is not of that form is of no known kind."""
    parts = text.split("/")
    return NodeArithmetic(*parts) if len(parts) == 3 and all(parts) else NodeArithmetic("unknown", "unknown", "unknown")


def _toward(level: float, claimed: np.ndarray, recomputed: np.ndarray, suspected: np.ndarray) -> float:
    """What the mean of the products with one suspect's differences is taken for; 1 says nothing."""
    test = NodeTest(HonestMeans(level=level), suspects=("",))
    values = 2 * test.toward("", claimed, recomputed, suspected) - 1
    values = values[~np.isnan(values)]
    if not len(values):
        return 1.0
    return max(LEAST_TOWARD, MARGIN * (abs(float(values.mean())) + 4 * float(values.std()) / math.sqrt(len(values))))


def _most(shares: np.ndarray) -> float:
    """What the mean of such shares, in the order of the tokens, is taken for: at most 1, which says nothing."""
    n = len(shares)
    if not n:
        return 1.0
    spread, mean = max(float(shares.std()), 1 / math.sqrt(n)), float(shares.mean())
    all_in_all = NOISE_MARGIN * (mean + 4 * spread / math.sqrt(n))  # a sample without a single event may hide 1 in n
    length = min(STRETCH, n // STRETCHES)
    if not length:
        return min(1.0, max(LEAST_SHARE, all_in_all))
    stretches = shares[: n // length * length].reshape(-1, length).mean(axis=1)
    return min(1.0, max(LEAST_SHARE, all_in_all, mean + STRETCH_SPREADS * float(stretches.std(ddof=1))))


def widest(means: Mapping[NodeArithmetic, HonestMeans], louder: float = OTHER_KIND) -> HonestMeans:
    """For a node of a kind that was never measured: the most that any kind has, and `louder` times as much of what no factor for
    other prompts is in. What no kind was measured for has HonestMeans' defaults."""
    if not means:
        return HonestMeans()
    columns = [asdict(m) for m in means.values()]

    def most(values: list[Any]) -> Any:
        return tuple(map(max, zip(*values, strict=True))) if isinstance(values[0], tuple) else max(values)

    found = HonestMeans(**{name: most([column[name] for column in columns]) for name in columns[0]})
    far, gross = (min(1.0, louder * share) for share in (found.far, found.gross))
    return replace(found, far=far, gross=gross, noise=tuple(min(1.0, louder * share) for share in found.noise))


def to_json(means: Mapping[NodeArithmetic, HonestMeans]) -> str:
    """To be kept."""
    return json.dumps({str(kind): asdict(m) for kind, m in sorted(means.items())}, indent=1)


def from_json(text: str) -> dict[NodeArithmetic, HonestMeans]:
    """What `to_json` made. UsageError for anything else."""
    try:
        rows = json.loads(text)
        return {NodeArithmetic(*kind.split("/")): _means(m) for kind, m in rows.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"this is no calibration of audits: {error}") from None


FLOAT32 = replace(LEAST, noise=(1.0, 0.1, 0.01, 2e-3, 1e-3))
"""What is shipped for float32 on a processor. Its noise of logits is 1e-7 to 1e-5 nats (bench/audit.md): the bounds are ten times
what 1e-5 nats are."""

SHIPPED: Mapping[NodeArithmetic, HonestMeans] = MappingProxyType({
    NodeArithmetic("transformers", "float32", "cpu"): FLOAT32,
    NodeArithmetic("vllm", "float32", "cpu"): FLOAT32,
    NodeArithmetic("transformers", "bfloat16", "cpu"): HonestMeans(far=5e-3, near=0.25, gross=1e-4, off=0.12, bias=0.02),
})
"""What kinds have that a run has not measured itself. Float32 is measured: no deviation of it came near LEAST (bench/audit.md).
That of bfloat16 is chosen: some four times what an honest node of SmolLM2-135M has (further than NEAR 0.064, off 0.034 nats),
fifty times what one of a small model with little entropy has. Narrower bounds would expel honest nodes of real models. They hold
until a kind of this type was measured, which an auditor in float32 does itself."""

ENOUGH = 4_096
"""Tokens of trusted nodes from which a kind is measured."""

PLENTY = 32_768
"""Tokens of trusted nodes after which a kind is not looked at any more."""


@dataclass
class Calibration:
    """What honest nodes are held to, by kind: as given, as measured here or in an earlier life of the run, else as shipped.
    `changed(text)` hears of what is given or measured, as `to_json` has it, when a kind was measured. What is shipped is not in
    it: that was measured on nobody's nodes, and must not pass for it in the run that is given this text."""

    means: dict[NodeArithmetic, HonestMeans] = field(default_factory=lambda: dict(SHIPPED))
    given: frozenset[NodeArithmetic] = frozenset()
    """kinds that are not measured anew"""
    changed: Callable[[str], None] = lambda text: None
    exact: bool = True
    """whether the auditor computes in float32: else its own rounding is in all that it finds, and what is shipped for float32
    does not hold"""
    measured: frozenset[NodeArithmetic] = frozenset()
    """kinds that were measured, and are measured anew"""
    nucleus: bool = False
    """whether nodes draw from a nucleus (a top_p below 1): which tokens are in it is rounding as well, so a draw that is grossly
    off may be honest, and nothing is bet on it"""
    _seen: dict[NodeArithmetic, list[list[np.ndarray]]] = field(default_factory=dict, init=False, repr=False)
    """distances, claimed and recomputed log probabilities, and shifts of trusted nodes, and which tokens are repeated"""
    _tokens: dict[NodeArithmetic, int] = field(default_factory=dict, init=False, repr=False)
    _own: set[NodeArithmetic] = field(default_factory=set, init=False, repr=False)
    """kinds of which the auditor made some of the tokens"""
    _measured_at: dict[NodeArithmetic, int] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(
        cls, text: str, changed: Callable[[str], None], measured: Mapping[NodeArithmetic, HonestMeans] = MappingProxyType({}),
        *, exact: bool = True, nucleus: bool = False,
    ) -> Calibration:  # fmt: skip
        """With what a file gives, and what the run itself `measured` in an earlier life. UsageError when the file is none of
        `to_json`."""
        given, own = _not_shipped(from_json(text) if text else {}), _not_shipped(measured)
        shipped = {kind: m for kind, m in SHIPPED.items() if exact or kind.dtype != "float32"}
        return cls(
            {**shipped, **own, **given}, frozenset(given), changed, exact=exact, measured=frozenset(own) - frozenset(given),
            nucleus=nucleus,
        )  # fmt: skip

    def honest(self, kind: NodeArithmetic) -> HonestMeans:
        """What a node of this kind, by its own word, is held to. Of one that nobody measured: what other engines have with its
        type and device, else the widest of all that is known."""
        found = self._honest(kind)
        return replace(found, gross=1.0) if self.nucleus else found

    def _honest(self, kind: NodeArithmetic) -> HonestMeans:
        bounds = self.means
        found = self.measured | self.given
        if any(known.dtype == "bfloat16" for known in found):  # what is shipped for want of a measurement is no more needed
            bounds = {k: m for k, m in bounds.items() if k in found or k.dtype != "bfloat16"}
        known = bounds.get(kind)
        if known is not None:
            return known
        alike = {k: m for k, m in bounds.items() if (k.dtype, k.device) == (kind.dtype, kind.device)}
        return replace(widest(alike, louder=1.0), quiet=_ANY) if alike else widest(bounds)

    def wants(self, kind: NodeArithmetic) -> bool:
        """Whether tokens of trusted nodes of this kind would tell more."""
        return kind not in self.given and self._tokens.get(kind, 0) < PLENTY

    def stands(self, kind: NodeArithmetic) -> bool:
        """Whether there are bounds for this very kind that no measurement in bfloat16 would move: given, measured with ENOUGH
        tokens in this life, or those that are shipped for float32."""
        return kind in self.given or self.tokens(kind) >= ENOUGH or (kind in SHIPPED and kind.dtype != "bfloat16")

    def tokens(self, kind: NodeArithmetic) -> int:
        """Of this kind, that were added."""
        return self._tokens.get(kind, 0)

    def wants_own(self, kind: NodeArithmetic) -> int:
        """Tokens that the auditor should make itself as a node of this kind: where nothing was given, and neither it nor trusted
        nodes gave ENOUGH. None of an auditor that rounds itself."""
        return max(0, ENOUGH - self.tokens(kind)) if self.exact and kind not in self.given else 0

    def add(
        self, kind: NodeArithmetic, distance: np.ndarray, claimed: np.ndarray, recomputed: np.ndarray, shift: np.ndarray,
        *, repeated: np.ndarray | None = None, own: bool = False,
    ) -> None:  # fmt: skip
        """Tokens of a trusted node, or the auditor's `own`. The kind is measured once there are ENOUGH, each time that they have
        doubled, and with PLENTY for the last time. `repeated`: as for `measure`. How exact a kind may be the auditor's own tokens
        do not say: other processors round less, and other prompts are rounded less."""
        if not self.wants(kind) or not len(distance):
            return
        columns = self._seen.setdefault(kind, [[], [], [], [], []])
        repeated = np.zeros(len(distance), bool) if repeated is None else repeated
        if own:
            self._own.add(kind)
        for column, values in zip(columns, (distance, claimed, recomputed, shift, repeated), strict=True):
            column.append(values)
        self._tokens[kind] = tokens = self._tokens.get(kind, 0) + len(distance)
        if tokens >= max(ENOUGH, 2 * self._measured_at.get(kind, 0)) or tokens >= PLENTY:
            self._measured_at[kind] = tokens
            distances, said, found, shifts, again = map(np.concatenate, columns)
            means = measure(distances, said, found, shifts, repeated=again)
            self.means[kind] = replace(means, quiet=_ANY) if kind in self._own else means
            self.measured |= {kind}
            self.changed(to_json({k: m for k, m in self.means.items() if k in self.measured or k in self.given}))
        if tokens >= PLENTY:
            del self._seen[kind]


_ANY = HonestMeans().quiet
"""Nodes that may be as exact as they like."""


def _not_shipped(means: Mapping[NodeArithmetic, HonestMeans]) -> dict[NodeArithmetic, HonestMeans]:
    """Without what was only shipped: files had it beside what was measured."""
    return {kind: m for kind, m in means.items() if SHIPPED.get(kind) != m}


def _means(row: Any) -> HonestMeans:
    values: dict[str, Any] = {name: tuple(map(float, v)) if isinstance(v, list) else float(v) for name, v in row.items()}
    short = {name: len(NOISE_SCALES) - len(values[name]) for name in ("noise", "quiet") if name in values}
    if set(short.values()) == {1}:  # of a release that had one scale less: the last one says nothing
        values |= {name: (*values[name], 1.0) for name in short}
    made = HonestMeans(**values)
    if not len(made.noise) == len(made.quiet) == len(NOISE_SCALES):
        raise ValueError(f"noise is kept at {len(NOISE_SCALES)} scales")
    above_zero = (made.far, made.near, made.gross, made.off, made.toward, *made.noise, *made.quiet)
    if not all(x > 0 and math.isfinite(x) for x in above_zero):
        raise ValueError("each mean is a number above 0")
    if not all(x >= 0 and math.isfinite(x) for x in (made.bias, made.level)):
        raise ValueError("bias and level are numbers, 0 at the least")
    return made
