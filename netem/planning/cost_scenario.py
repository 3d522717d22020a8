"""A scenario of `shoal simulate`: a fleet with prices, a model, lengths, a learner, a policy. TOML in, frozen values out.

Strict: a key that is not known is refused by name. Pure but for reading the files that it names. A **preset** is a scenario with
`[[systems]]` to compare (each sets some keys anew), what was `[[published]]` of them, and `[[assumptions]]`: where each number
is from. `[[cases]]` repeat all that with other keys. Must not know simulators. """

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from learner.section import Section, check_section, read_toml
from netem.planning.priced_fleet import NodeKind, rows_of_csv
from netem.rollout_sim.fleet import MEMORY_SHARE, Served
from netem.rollout_sim.workload import Workload
from p2p.errors import UsageError

FOLDER = Path(__file__).parent / "presets"


class FleetSection(Section):
    file: str = ""
    """CSV, beside the scenario: kind, count, usd_per_hour and what else a row of `nodes` has"""
    nodes: list[NodeKind] = Field(default_factory=list)


class ModelSection(Section):
    name: str = "Qwen3-8B"
    parameters: float = Field(default=8.2e9, gt=0)
    kv_bytes: float = Field(default=147_456.0, gt=0)
    """of a token of context"""

    def served(self) -> Served:
        return Served(self.name, self.parameters, self.kv_bytes)


class LengthsSection(Section):
    """Of completions, in tokens: lognormal about each prompt's own mean."""

    median: float = Field(default=2600.0, ge=8)
    between: float = Field(default=0.8, ge=0, le=3)
    """standard deviation of the log lengths, of prompts"""
    within: float = Field(default=0.6, ge=0, le=3)
    """of one prompt's completions"""
    most: int = Field(default=20_000, ge=8)
    prompt: int = Field(default=300, ge=1)
    told: float = Field(default=0.5, ge=0, le=1)
    """correlation of a prompt's mean with what can be seen of the prompt"""


class LearnerSection(Section):
    train_s: float = Field(default=230.0, gt=0)
    """a step's groups, without waiting"""
    update_s: float = Field(default=6.0, ge=0)
    """from the last gradient to the version handed out"""
    groups: int = Field(default=128, ge=1)
    samples: int = Field(default=16, ge=1)
    usd_per_hour: float = Field(default=0.0, ge=0)
    up_mbit: float = Field(default=1000.0, gt=0)
    gpu: str = ""
    """of its own engines: it may generate with them ("seeding") while it does not train"""
    gpus: int = Field(default=8, ge=1)
    per_engine: int = Field(default=1, ge=1)
    """GPUs of one engine"""
    memory_share: float = Field(default=MEMORY_SHARE, gt=0, le=1)
    """of its GPUs' memory that its own engines use, weights and KV: less where the trainer keeps some"""


class DeltaSection(Section):
    bytes: float = Field(default=0.0, ge=0)
    """of a version; 0: by `density`"""
    density: float = Field(default=0.01, gt=0, le=1)
    """share of the values that a step changes"""
    bytes_a_change: float = Field(default=2.0, gt=0)
    overhead: float = Field(default=1.1, ge=1)
    """time of a dissemination over the fluid bound"""
    latency_s: float = Field(default=1.0, ge=0)
    install_s: float = Field(default=2.0, ge=0)
    relayed: bool = True
    """nodes hand a version on as they receive it; else the learner sends it to each"""
    recompute: bool = True
    """running sequences' KV is made anew under a new version"""

    def size(self, parameters: float) -> float:
        return self.bytes or self.density * parameters * self.bytes_a_change


class PolicySection(Section):
    name: Literal["shoal", "synchronous", "one-step-off", "echo2", "rlboost", "streamrl"] = "shoal"
    staleness: int = Field(default=3, ge=0, le=64)
    kappa: int = Field(default=0, ge=0, le=64)
    """steps between publications; 0: by the capacity model"""
    overlap: bool = True
    """nodes generate while they receive a version"""
    migration: bool = True
    """a lost node's sequences go on elsewhere with their tokens"""
    seeding: bool = True
    """the learner's own engines generate while the pool is under the rule (needs learner.gpu)"""
    memory: bool = True
    """the seeding controller remembers what each number of nodes needed"""
    seconds: float = Field(default=0.0, ge=0)
    """with rlboost: a fixed time of seeding instead of the controller's"""


class SimulatedActivationSection(Section):
    all: bool = False
    """everybody who is there is active, whatever it costs"""
    margin: float = Field(default=0.1, ge=0, le=10)
    release: float = Field(default=0.25, ge=0, le=10)
    dwell_s: float = Field(default=300.0, ge=0)
    explore_share: float = Field(default=0.05, ge=0, le=1)
    known: bool = True
    """rates of kinds are known beforehand to 10 %, from earlier runs; else each node is to be tried"""
    max_usd_per_hour: float = Field(default=0.0, ge=0)
    """of nodes; 0: no limit"""
    budget_usd: float = Field(default=0.0, ge=0)
    """of the run, learner aside; 0: no limit"""
    egress_usd_per_gb: float = Field(default=0.0, ge=0)
    """of what the learner sends"""
    every_s: float = Field(default=60.0, gt=0)
    """between decisions; a loss calls for one at once"""

    @model_validator(mode="after")
    def _marks(self) -> SimulatedActivationSection:
        if self.release < self.margin:
            raise ValueError(f"release {self.release:g} is under margin {self.margin:g}: nodes would come and go")
        return self


class SystemSection(Section):
    name: str
    role: Literal["baseline", "paper", "ours", "ablation"]
    set: dict[str, Any] = Field(default_factory=dict)


class PublishedSection(Section):
    what: str
    metric: Literal["saving", "efficiency", "throughput"]
    """saving: 1 - $/step of `of` over that of `against`; efficiency: steps a dollar of `of` over those of `against`, less 1;
    throughput: steps an hour of `of` over those of `against`, less 1"""
    low: float
    high: float
    case: str = ""
    of: str = "paper"
    against: str = "baseline"
    """a system's name, or a role that one system has"""
    within: float = Field(default=0.05, ge=0)


class AssumptionSection(Section):
    key: str
    kind: Literal["published", "derived", "assumed", "fitted"]
    why: str
    tries: list[float] = Field(default_factory=list)
    """other values, to see what hangs on it"""


class CaseSection(Section):
    name: str
    set: dict[str, Any] = Field(default_factory=dict)


class File(Section):
    name: str = ""
    what: str = ""
    detail: Literal["auto", "sequences", "groups"] = "auto"
    """auto: sequence by sequence up to AUTO_NODES nodes, group by group beyond"""
    steps: int = Field(default=40, ge=2, le=100_000)
    warm: int = Field(default=4, ge=1)
    """steps that are not counted"""
    seed: int = Field(default=0, ge=0)
    fleet: FleetSection = FleetSection()
    model: ModelSection = ModelSection()
    lengths: LengthsSection = LengthsSection()
    learner: LearnerSection = LearnerSection()
    delta: DeltaSection = DeltaSection()
    policy: PolicySection = PolicySection()
    activation: SimulatedActivationSection = SimulatedActivationSection()
    cases: list[CaseSection] = Field(default_factory=list)
    systems: list[SystemSection] = Field(default_factory=list)
    published: list[PublishedSection] = Field(default_factory=list)
    assumptions: list[AssumptionSection] = Field(default_factory=list)


@dataclass(frozen=True)
class CostScenario:
    """One setting, resolved: `file` with the CSV's rows in `rows`."""

    file: File
    rows: tuple[NodeKind, ...]
    folder: Path
    values: Mapping[str, Any]
    """as read, for `changed`"""
    source: str

    @property
    def name(self) -> str:
        return self.file.name or Path(self.source).stem

    @property
    def nodes(self) -> int:
        return sum(row.count for row in self.rows)

    @property
    def workload(self) -> Workload:
        lengths, learner = self.file.lengths, self.file.learner
        return Workload(
            self.name, lengths.median, lengths.between, lengths.within, lengths.most, lengths.prompt, lengths.told,
            learner.groups, learner.samples, learner.train_s, learner.update_s,
        )  # fmt: skip

    @property
    def delta_bytes(self) -> float:
        return self.file.delta.size(self.file.model.parameters)

    def changed(self, overrides: Mapping[str, Any]) -> CostScenario:
        """The same with other values: nested tables, lists replaced whole."""
        return build_scenario(_merged(self.values, overrides), self.source, self.folder)

    def with_value(self, key: str, value: Any) -> CostScenario:
        values = copy.deepcopy(dict(self.values))
        found: Any = values
        *path, last = key.split(".")
        for name in path:
            found = found[int(name)] if isinstance(found, list) else found.setdefault(name, {})
        found[int(last) if isinstance(found, list) else last] = value
        return build_scenario(values, self.source, self.folder)

    def value(self, key: str) -> Any:
        """What a dotted key stands at; None where it has none (a row of the fleet, say)."""
        found: Any = self.file
        for name in key.split("."):
            found = found[int(name)] if isinstance(found, list) and name.isdigit() else getattr(found, name, None)
        return found.model_dump() if isinstance(found, Section) else found


def load_scenario(path: str | Path) -> CostScenario:
    """UsageError, one line that names the key, for anything wrong."""
    path = Path(path)
    return build_scenario(read_toml(path, "scenario"), str(path), path.parent)


def load_preset(name: str) -> CostScenario:
    names = preset_names()
    if name not in names:
        raise UsageError(f"--preset: no preset {name!r}: {', '.join(names)}")
    return load_scenario(FOLDER / f"{name}.toml")


def preset_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def build_scenario(values: Mapping[str, Any], source: str, folder: Path) -> CostScenario:
    file = check_section(File, values, source)
    rows = [*(rows_of_csv(folder / file.fleet.file) if file.fleet.file else []), *file.fleet.nodes]
    if not rows and not file.learner.gpu:
        raise UsageError(f"{source}: fleet: no nodes, and the learner has no engine of its own (learner.gpu)")
    names = [row.kind for row in rows]
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice is not None:
        raise UsageError(f"{source}: fleet: two rows are called {twice!r}")
    if file.steps <= file.warm:
        raise UsageError(f"{source}: steps: {file.steps}, and the first {file.warm} are not counted")
    if file.learner.gpus % file.learner.per_engine:
        raise UsageError(f"{source}: learner.per_engine: {file.learner.gpus} GPUs are no whole number of engines")
    return CostScenario(file, tuple(rows), folder, values, source)


def _merged(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(values)
    for name, value in overrides.items():
        below = out.get(name)
        out[name] = _merged(below, value) if isinstance(value, Mapping) and isinstance(below, Mapping) else value
    return out
