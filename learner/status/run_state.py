"""A run's state as every view of it reads it: typed and read-only.

It is made from the plain values that `Head.status()` gives, which /status serves and summary.json keeps. Terminal, report and
whatever page comes later are views of it: what two of them need is worked out here, once. Values that are missing (a young run,
an older summary) have defaults, and a stranger's texts are cleaned. Must not know how it is shown or where the values came from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import Field, ValidationError, model_validator

from learner.status.audited import AuditState, CaughtState
from learner.status.evaluated import EvalPoint
from learner.status.sample_rows import Part, Plain, SampleRow
from learner.status.steps import StepRow, busy_share, pace, parts_of
from learner.status.words import by_name, short_peer
from p2p.errors import UsageError

PEER_ID = re.compile(r"\b12D3KooW[0-9A-Za-z]{20,60}")
"""A peer id inside a text."""

class NodeRow(Part):
    """One node as the learner knows it."""

    name: Plain = ""
    peer: Plain = ""
    alive: bool = False
    """its link is up"""
    ready: bool = False
    """an engine of its serves a version"""
    draining: bool = False
    updating: bool = False
    rests: Plain = ""
    """why it takes no work for now although it is there"""
    limits: Plain = ""
    """what its owner allows it"""
    activity: Plain = "active"
    """active, warm or asleep: what the pool wants of it"""
    version: Plain = ""
    digest_ok: bool = False
    tokens: int = 0
    """accepted by the learner"""
    tokens_per_s: float = 0.0
    bytes_from_learner: int = 0
    bytes_from_peers: int = 0
    pause_s: float | None = None
    """what the last version's installation cost those who waited for its tokens"""
    usd: float = 0.0
    usd_per_hour: float = 0.0
    why: Plain = ""
    """it is in its state"""
    why_active: Plain = ""
    """why it generates, or last did"""
    reason: Plain = ""
    """why it is gone"""

    @property
    def state(self) -> str:
        """One word: gone, leaving, resting, starting, or what the pool wants of it: active, warm, asleep."""
        if not self.alive:
            return "gone"
        if self.draining:
            return "leaving"
        if self.rests:
            return "resting"
        return self.activity if self.ready or self.activity == "asleep" else "starting"

    @property
    def generates(self) -> bool:
        return self.state == "active"


class TrajectoryCounts(Part):
    """Trajectories by what became of them."""

    reserved: int = 0
    consumed: int = 0
    outstanding: int = 0
    lost: int = 0
    aborted: dict[str, int] = Field(default_factory=dict)
    """reason -> how many"""


class PoolState(Part):
    """What the learner needs, who makes it, and what it costs."""

    nodes: int = 0
    active: int = 0
    supply_tokens_per_s: float = 0.0
    required_tokens_per_s: float = 0.0
    usd_per_hour: float = 0.0
    spent_usd: float = 0.0
    usd_per_step: float = 0.0
    usd_per_mtok: float = 0.0
    budget_usd: float = 0.0
    blocked: Plain = ""
    advice: Plain = ""
    asked: Plain = ""
    changes: tuple[Plain, ...] = ()

    @property
    def priced(self) -> bool:
        """Whether anything costs anything."""
        return bool(self.spent_usd or self.usd_per_hour)


class CutTally(Part):
    """What was aborted or truncated because enough others were done."""

    surplus_sequences: int = 0
    surplus_groups: int = 0
    surplus_tokens: int = 0
    truncated: int = 0
    cut_mean_length: float | None = None
    kept_mean_length: float | None = None


class LocalEngineState(Part):
    """The learner's local engine, where it has one."""

    there: bool = False
    generates: bool = False
    last: dict[str, Any] = Field(default_factory=dict)
    """its metrics of the last step"""


class RunEvent(Part):
    """What was logged: joins, leaves, refusals, decisions."""

    time: float = 0.0
    """Unix time"""
    level: Plain = "info"
    """info, warning or error"""
    text: Plain = ""

    @property
    def brief(self) -> str:
        """The text with peer ids cut short, for where there is little room."""
        return PEER_ID.sub(lambda found: short_peer(found[0]), self.text)


class FirstAndLast(NamedTuple):
    """Means over the first tenth of a run's steps and over the last."""

    first: float
    last: float


class UnscoredState(Part):
    """Groups whose reward could not be had."""

    groups: int = 0
    """in this life"""
    last: Plain = ""
    """why the newest could not"""


class EvaluationNow(Part):
    """An evaluation under way."""

    name: Plain = ""
    version: Plain = ""
    sequences: int = 0
    """that have ended"""
    of: int = 0


class NamedEvaluation(NamedTuple):
    """What one evaluation found so far."""

    name: str
    """"" is the default one, of held-out problems"""
    points: tuple[EvalPoint, ...]
    """by step; at least one"""


class EndpointState(Part):
    """What the endpoint did in this life."""

    url: Plain = ""
    now: int = 0
    """requests that are sampled now"""
    answered: int = 0
    refused: int = 0
    left: int = 0
    """requests whose client left before it had its answer"""


class PairRow(Part):
    """How two nodes are linked."""

    one: Plain = ""
    other: Plain = ""
    kind: Plain = ""
    """relayed: they have no link, and what they have comes to each other through others"""
    why: Plain = ""
    """why there is no better one"""


class RunState(Part):
    """All that the views show of a run."""

    run: Plain = ""
    epoch: int = 0
    finished: bool = False
    left: bool = False
    """its learner is gone before the last step: what is here was read from the run's files, all else is not known"""
    step: int = 0
    steps: int = 0
    seconds: float = 0.0
    version: Plain = ""
    versions_published: int = 0
    limits: Plain = ""
    """of the learner itself, in words"""
    checkpoint: Plain = ""
    """of the last commit, in the run's directory; "" where the trainer has not said"""
    nodes: tuple[NodeRow, ...] = ()
    """those who are there first, then by name"""
    pairs: tuple[PairRow, ...] = ()
    """how nodes are linked with each other, those without a link first"""
    turned_away: int = 0
    """connections and channels that were closed before anything was read, since too many came"""
    max_staleness: int = 0
    max_staleness_seen: int = 0
    trajectories: TrajectoryCounts = TrajectoryCounts()
    pool: PoolState = PoolState()
    redundancy: CutTally = CutTally()
    local_engine: LocalEngineState | None = None
    endpoint: EndpointState | None = None
    learner_egress_bytes: int = 0
    peer_bytes: int = 0
    delta_bytes_mean: float = 0.0
    delta_density_mean: float = 0.0
    anchor_bytes: int = 0
    learner_egress_ratio: float = 0.0
    metrics: dict[str, Any] = Field(default_factory=dict)
    """the newest line of metrics.jsonl"""
    recent: tuple[StepRow, ...] = ()
    """the newest steps, one by one"""
    curve: tuple[StepRow, ...] = ()
    """the whole run, neighbouring steps as one where they are many"""
    held_out: tuple[StepRow, ...] | None = None
    """where held-out problems were answered, each at its own step; None in an older summary"""
    evaluated: dict[Plain, tuple[EvalPoint, ...]] = Field(default_factory=dict)
    """results of evaluations by name and step, the default one's under "" """
    evaluations: tuple[EvaluationNow, ...] = ()
    """those that run now"""
    unscored: UnscoredState = UnscoredState()
    audits: AuditState = AuditState()
    caught: CaughtState = CaughtState()
    reports: tuple[Plain, ...] = ()
    """refusals, and what nodes report of each other"""
    events: tuple[RunEvent, ...] = ()
    samples: tuple[SampleRow, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _in_order(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        values = dict(values)
        nodes = [n for n in values.get("nodes") or () if isinstance(n, Mapping)]
        values["nodes"] = sorted(nodes, key=lambda n: (not n.get("alive"), by_name(str(n.get("name", "")))))
        values["local_engine"] = values.get("local_engine") or None
        for key in ("recent", "curve", *(("held_out",) if values.get("held_out") is not None else ())):
            rows = [r for r in values.get(key) or () if isinstance(r, Mapping) and "step" in r]
            values[key] = [{f: v for f, v in row.items() if f in StepRow._fields} for row in rows]
        found = values.get("evaluated") if isinstance(values.get("evaluated"), Mapping) else {}
        values["evaluated"] = {
            name: [{f: v for f, v in p.items() if f in EvalPoint._fields} for p in points if isinstance(p, Mapping)]
            for name, points in (found or {}).items() if isinstance(points, list)
        }  # fmt: skip
        values["evaluations"] = [e for e in values.get("evaluations") or () if isinstance(e, Mapping)]
        return values

    @classmethod
    def of(cls, status: Mapping[str, Any]) -> RunState:
        """The state that these plain values say. UsageError when they are of another program, or of another Shoal."""
        try:
            return cls.model_validate(status)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise UsageError(f"the run's status cannot be read: {where}: {first['msg']}") from None

    @property
    def done(self) -> int:
        """Steps that were taken. `step` is the last that was committed, which may be some before."""
        return max(self.step, self.last.step if self.last else 0)

    @property
    def in_this_life(self) -> str:
        """What stands behind seconds and bytes where they do not count the lives before a --resume; "" in a run's first life."""
        return f" in this life (epoch {self.epoch})" if self.epoch > 1 else ""

    @property
    def alive(self) -> int:
        """Nodes that are there."""
        return sum(node.alive for node in self.nodes)

    @property
    def generating(self) -> int:
        """Nodes that make tokens, or would if they had work."""
        return sum(node.generates for node in self.nodes)

    @property
    def priced(self) -> bool:
        return self.pool.priced or any(node.usd or node.usd_per_hour for node in self.nodes)

    @property
    def last(self) -> StepRow | None:
        """The newest step that was trained; None before the first."""
        return next((row for row in reversed(self.recent) if row.step and row.reward is not None), None)

    @property
    def _typical(self) -> list[StepRow]:
        """Recent steps; without the run's first, which waits until a node is there, once there are others."""
        rows = [row for row in self.recent if row.took_s is not None]
        return rows[1:] if rows and rows[0].step == 1 and len(rows) > 1 else rows

    @property
    def busy(self) -> float | None:
        """The share of recent steps' time in which the learner did not wait."""
        return busy_share(self._typical)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens trained on in a second of recent steps."""
        return pace(self._typical)

    @property
    def step_s(self) -> float | None:
        """Seconds of a recent step in the mean."""
        took = [row.took_s for row in self._typical if row.took_s is not None]
        return sum(took) / len(took) if took else None

    @property
    def left_s(self) -> float | None:
        """Seconds until the last step at the recent pace; None when that is not known, or the run is over."""
        return None if self.step_s is None or self.finished or self.left else max(0, self.steps - self.done) * self.step_s

    @property
    def evals(self) -> tuple[StepRow, ...]:
        """Where held-out problems were answered."""
        return tuple(row for row in (self.curve if self.held_out is None else self.held_out) if row.held_out is not None)

    @property
    def named_evals(self) -> tuple[NamedEvaluation, ...]:
        """What the evaluations with a name found so far, by name."""
        return tuple(NamedEvaluation(name, points) for name, points in sorted(self.evaluated.items()) if name and points)

    @property
    def parts(self) -> dict[str, float]:
        """The parts of the last step's rewards."""
        return parts_of(self.metrics)

    def first_and_last(self, field: str) -> FirstAndLast | None:
        """A field of the steps, over the run's first and last tenth; None when it is not there."""
        return _ends([v for row in self.curve if (v := getattr(row, field)) is not None])

    def part_first_and_last(self) -> dict[str, FirstAndLast]:
        """The same of each part of the reward."""
        names = list(dict.fromkeys(name for row in self.curve for name in row.parts or ()))
        of = {name: _ends([row.parts[name] for row in self.curve if row.parts and name in row.parts]) for name in names}
        return {name: found for name, found in of.items() if found is not None}

    @property
    def faults(self) -> tuple[str, ...]:
        """What a run must never show, as sentences."""
        found = []
        if self.trajectories.lost:
            found.append(f"{self.trajectories.lost} trajectories were lost")
        if self.max_staleness_seen > self.max_staleness:
            found.append(f"staleness {self.max_staleness_seen} was trained on, over the bound of {self.max_staleness}")
        if self.finished:
            found += [
                f"{n.name} ended with weights of another digest"
                for n in self.nodes if n.alive and n.ready and n.version == self.version and not n.digest_ok
            ]  # fmt: skip
        return tuple(found)


def _ends(values: list[float]) -> FirstAndLast | None:
    tenth = max(1, len(values) // 10)
    return FirstAndLast(sum(values[:tenth]) / tenth, sum(values[-tenth:]) / tenth) if values else None
