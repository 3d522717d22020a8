"""What honest nodes' statistics are, by kind of engine, type and device; measured on trusted nodes, and kept as JSON. Pure.

Which bounds a node is held to, and when a kind is measured. What bounds follow from tokens is in `measuring`. Must not know how a
node was measured, or files.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from learner.audit.bets import NOISE_SCALES, HonestMeans
from learner.audit.measuring import LEAST, STRETCH, measure
from p2p.errors import UsageError

OTHER_KIND = 1.5
"""Factor on how often a token is far, and on the noise of logits, for a node of a kind that nobody measured, beside the others.
Between transformers and vLLM on processors there is a tenth of difference (bench/audit.md). GPUs were not measured; elsewhere
transformers, vLLM and two GPUs drew 98 % of the same tokens (Token-DiFR)."""


RULE = 1
"""Number of the rule by which bounds are measured. Those of another one are measured anew: without prompts they were narrower,
and honest nodes were called wrong."""


class DrawnAt(NamedTuple):
    """How a run's nodes draw, and from what: honest deviations hang on it. A lower temperature makes more of each nat, where a
    nucleus ends draws are off, and a larger model rounds more often."""

    temperature: float = 1.0
    top_p: float = 1.0
    model: str = ""
    """which, by its size, in words; "" where nobody said it, and then nothing is compared"""


WHOLE = DrawnAt()
"""From the whole distribution, as it is: what a run does unless told otherwise."""


@dataclass(frozen=True, slots=True, order=True)
class NodeArithmetic:
    """What decides how a node rounds."""

    engine: str
    dtype: str
    device: str

    def __str__(self) -> str:
        return f"{self.engine}/{self.dtype}/{self.device}"


def read_arithmetic(text: str) -> NodeArithmetic:
    """From "engine/dtype/device", as nodes say it; what is not of that form is of no known kind."""
    parts = text.split("/")
    return NodeArithmetic(*parts) if len(parts) == 3 and all(parts) else NodeArithmetic("unknown", "unknown", "unknown")


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


def to_json(means: Mapping[NodeArithmetic, HonestMeans], drawn: DrawnAt) -> str:
    """To be kept."""
    kinds = {str(kind): asdict(m) for kind, m in sorted(means.items())}
    return json.dumps({"rule": RULE, **drawn._asdict(), "kinds": kinds}, indent=1)


def from_json(text: str, drawn: DrawnAt) -> dict[NodeArithmetic, HonestMeans]:
    """What `to_json` made in a run that draws alike. UsageError for anything else, and for what was measured by another rule."""
    try:
        found = json.loads(text)
        if found.get("rule") != RULE:
            raise UsageError("this is no calibration of audits, or one of another release: its bounds are measured otherwise "
                             "now, so a run has to measure them anew")  # fmt: skip
        then = DrawnAt(float(found["temperature"]), float(found["top_p"]), str(found.get("model", "")))
        kinds = {NodeArithmetic(*kind.split("/")): _means(m) for kind, m in found["kinds"].items()}
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError) as error:
        raise UsageError(f"this is no calibration of audits: {error}") from None
    if then.model and drawn.model and then.model != drawn.model:
        raise UsageError(
            f"it was measured on {then.model:.100}, and this model is {drawn.model}, which rounds otherwise: honest nodes would "
            "be called wrong, or cheats not found"
        )
    if then[:2] != drawn[:2]:
        raise UsageError(
            f"it was measured where nodes draw at temperature {then.temperature:g} and top_p {then.top_p:g}, and here they draw "
            f"at {drawn.temperature:g} and {drawn.top_p:g}: honest nodes would be called wrong, or cheats not found"
        )
    return kinds


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
"""Tokens of trusted nodes from which a kind is measured, of which no more than STRETCH of a prompt count: 32 prompts at the
least. Measured on three prompts, a kind called 7 of 223 honest nodes wrong in simulations (bench/audit.md)."""

PLENTY = 32_768
"""Tokens of trusted nodes after which a kind is measured, of however few prompts they are, and not looked at any more unless
they are of few."""

MOST_OF_FEW = 4 * PLENTY
"""Tokens after which it is not looked at any more then either."""


class _Measured(NamedTuple):
    """With how many tokens a kind was measured last."""

    counted: int
    tokens: int


@dataclass
class _TokensOfPrompts:
    """How many tokens there are of how many prompts."""

    all: int = 0
    counted: int = 0
    """of a prompt no more than STRETCH"""
    _of: Counter[float] = field(default_factory=Counter)

    def add(self, prompts: np.ndarray) -> None:
        for prompt, tokens in Counter(prompts.tolist()).items():
            before = self._of[prompt]
            self._of[prompt] += tokens
            self.all += tokens
            self.counted += min(before + tokens, STRETCH) - min(before, STRETCH)


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
    drawn: DrawnAt = WHOLE
    """how nodes draw. Which tokens are in a nucleus (a top_p below 1) is rounding as well, so a draw that is grossly off may be
    honest then, and nothing is bet on it"""
    _seen: dict[NodeArithmetic, list[list[np.ndarray]]] = field(default_factory=dict, init=False, repr=False)
    """distances, claimed and recomputed log probabilities, and shifts of trusted nodes, which tokens are repeated, and of what
    prompts they are"""
    _tokens: dict[NodeArithmetic, _TokensOfPrompts] = field(default_factory=dict, init=False, repr=False)
    _own: set[NodeArithmetic] = field(default_factory=set, init=False, repr=False)
    """kinds of which the auditor made some of the tokens"""
    _measured_at: dict[NodeArithmetic, _Measured] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(
        cls, text: str, changed: Callable[[str], None], measured: Mapping[NodeArithmetic, HonestMeans] = MappingProxyType({}),
        *, exact: bool = True, drawn: DrawnAt = WHOLE,
    ) -> Calibration:  # fmt: skip
        """With what a file gives, and what the run itself `measured` in an earlier life. UsageError when the file is none of
        `to_json` from a run that draws alike."""
        given, own = _not_shipped(from_json(text, drawn) if text else {}), _not_shipped(measured)
        shipped = {kind: m for kind, m in SHIPPED.items() if exact or kind.dtype != "float32"}
        return cls(
            {**shipped, **own, **given}, frozenset(given), changed, exact=exact, measured=frozenset(own) - frozenset(given),
            drawn=drawn,
        )  # fmt: skip

    def honest(self, kind: NodeArithmetic) -> HonestMeans:
        """What a node of this kind, by its own word, is held to. Of one that nobody measured: what other engines have with its
        type and device, else the widest of all that is known."""
        found = self._honest(kind)
        return replace(found, gross=1.0) if self.drawn.top_p < 1 else found

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
        few = self.counted(kind) < ENOUGH
        return kind not in self.given and self.tokens(kind) < (MOST_OF_FEW if few else PLENTY)

    def stands(self, kind: NodeArithmetic) -> bool:
        """Whether there are bounds for this very kind that no measurement in bfloat16 would move: given, measured in this
        life, or those that are shipped for float32."""
        return kind in self.given or kind in self._measured_at or (kind in SHIPPED and kind.dtype != "bfloat16")

    def tokens(self, kind: NodeArithmetic) -> int:
        """Of this kind, that were added."""
        return self._tokens.get(kind, _TokensOfPrompts()).all

    def counted(self, kind: NodeArithmetic) -> int:
        """The same, but of a prompt no more than STRETCH."""
        return self._tokens.get(kind, _TokensOfPrompts()).counted

    def wants_own(self, kind: NodeArithmetic) -> bool:
        """Whether the auditor should make tokens itself as a node of this kind: where nothing was given, and neither it nor
        trusted nodes gave ENOUGH. Not one that rounds itself."""
        return self.exact and kind not in self.given and kind not in self._measured_at and self.wants(kind)

    def add(
        self, kind: NodeArithmetic, distance: np.ndarray, claimed: np.ndarray, recomputed: np.ndarray, shift: np.ndarray,
        *, prompts: np.ndarray, repeated: np.ndarray | None = None, own: bool = False,
    ) -> None:  # fmt: skip
        """Tokens of a trusted node, or the auditor's `own`. The kind is measured once there are ENOUGH, or PLENTY of few prompts,
        and each time that they have doubled. `prompts` and `repeated`: as for `measure`. How exact a kind may be the
        auditor's own tokens do not say: other processors round less, and other prompts are rounded less."""
        if not self.wants(kind) or not len(distance):
            return
        columns = self._seen.setdefault(kind, [[], [], [], [], [], []])
        repeated = np.zeros(len(distance), bool) if repeated is None else repeated
        if own:
            self._own.add(kind)
        for column, values in zip(columns, (distance, claimed, recomputed, shift, repeated, prompts), strict=True):
            column.append(values)
        self._tokens.setdefault(kind, _TokensOfPrompts()).add(prompts)
        counted, tokens, before = self.counted(kind), self.tokens(kind), self._measured_at.get(kind, _Measured(0, 0))
        if counted >= max(ENOUGH, 2 * before.counted) or tokens >= max(PLENTY, 2 * before.tokens):
            self._measured_at[kind] = _Measured(counted, tokens)
            distances, said, found, shifts, again, of = map(np.concatenate, columns)
            means = measure(distances, said, found, shifts, repeated=again, prompts=of)
            self.means[kind] = replace(means, quiet=_ANY) if kind in self._own else means
            self.measured |= {kind}
            told = {k: m for k, m in self.means.items() if k in self.measured or k in self.given}
            self.changed(to_json(told, self.drawn))
        if not self.wants(kind):
            del self._seen[kind]


_ANY = HonestMeans().quiet
"""Nodes that may be as exact as they like."""


def _not_shipped(means: Mapping[NodeArithmetic, HonestMeans]) -> dict[NodeArithmetic, HonestMeans]:
    """Without what was only shipped: files had it beside what was measured."""
    return {kind: m for kind, m in means.items() if SHIPPED.get(kind) != m}


def _means(row: Any) -> HonestMeans:
    values: dict[str, Any] = {name: tuple(map(float, v)) if isinstance(v, list) else float(v) for name, v in row.items()}
    made = HonestMeans(**values)
    if not len(made.noise) == len(made.quiet) == len(NOISE_SCALES):
        raise ValueError(f"noise is kept at {len(NOISE_SCALES)} scales")
    above_zero = (made.far, made.near, made.gross, made.off, made.toward, *made.noise, *made.quiet)
    if not all(x > 0 and math.isfinite(x) for x in above_zero):
        raise ValueError("each mean is a number above 0")
    if not all(x >= 0 and math.isfinite(x) for x in (made.bias, made.level)):
        raise ValueError("bias and level are numbers, 0 at the least")
    return made
