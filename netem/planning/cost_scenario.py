"""A scenario of `shoal simulate`: a fleet with prices, a model, lengths, a learner, a policy. TOML in, frozen values out.

Strict: an unknown key is refused by name. Pure, but for reading the files that a scenario names. A **preset** is a scenario with
`[[systems]]` to compare (each sets some keys anew), what was `[[published]]` of them, and `[[assumptions]]`, which say where each
number is from. `[[cases]]` repeat all that with other keys. Must not know simulators.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from learner.section import Section, check_section, read_toml
from netem.planning.keys import check_keys
from netem.planning.priced_fleet import NodeKind, rows_of_csv
from netem.rollout_sim.fleet import MEMORY_SHARE, Served
from netem.rollout_sim.workload import Workload
from p2p.errors import UsageError

FOLDER = Path(__file__).parent / "presets"
"""Where the presets are."""

HINTS = {"fleet": "a scenario names its CSV so: [fleet], and below it file = \"FLEET.csv\""}
"""Key of a table -> what to write, for who wrote a value there. The fleet is what most will guess at first."""

Metric = Literal["saving", "efficiency", "throughput"]
PolicyName = Literal["shoal", "synchronous", "one-step-off", "echo2", "rlboost", "streamrl"]


class FleetSection(Section):
    """The nodes: rows here, or in a CSV."""

    file: str = ""
    """CSV beside the scenario, with a column for each key of `nodes` that is used."""
    nodes: list[NodeKind] = Field(default_factory=list)
    """Kinds of node."""


class LengthsSection(Section):
    """Lengths of completions in tokens: lognormal about each prompt's own mean."""

    median: float = Field(default=2600.0, ge=8)
    """Median length in tokens."""
    between: float = Field(default=0.8, ge=0, le=3)
    """Standard deviation of the prompts' mean log lengths."""
    within: float = Field(default=0.6, ge=0, le=3)
    """Standard deviation of the log lengths of one prompt's completions."""
    most: int = Field(default=20_000, ge=8)
    """Longest completion in tokens; longer ones are cut."""
    prompt: int = Field(default=300, ge=1)
    """Tokens of a prompt."""
    told: float = Field(default=0.5, ge=0, le=1)
    """Correlation of a prompt's mean log length with the feature of it that a length predictor sees."""


class LearnerSection(Section):
    """What the learner trains on and how long it takes, and its GPUs if it generates with them."""

    train_s: float = Field(default=230.0, gt=0)
    """Seconds of training for one step's groups, without waiting."""
    update_s: float = Field(default=6.0, ge=0)
    """Seconds from the last gradient to the version being handed out."""
    groups: int = Field(default=128, ge=1)
    """Groups of a step."""
    samples: int = Field(default=16, ge=1)
    """Completions of a group."""
    usd_per_hour: float = Field(default=0.0, ge=0)
    """Price of the learner's machine in $ an hour."""
    up_mbit: float = Field(default=1000.0, gt=0)
    """Uplink in Mbit/s."""
    gpu: str = ""
    """GPU of its local engines, which generate while it does not train. "" is no local engine."""
    gpus: int = Field(default=8, ge=1)
    """Number of those GPUs."""
    per_engine: int = Field(default=1, ge=1)
    """GPUs of one local engine."""
    memory_share: float = Field(default=MEMORY_SHARE, gt=0, le=1)
    """Share of those GPUs' memory that the local engines use for weights and KV: less where the trainer keeps some."""


class DeltaSection(Section):
    """What a version weighs, and how it gets to the nodes."""

    bytes: float = Field(default=0.0, ge=0)
    """Bytes of a version. 0 computes them from `density`."""
    density: float = Field(default=0.01, gt=0, le=1)
    """Share of the values that a step changes."""
    bytes_a_change: float = Field(default=2.0, gt=0)
    """Bytes that a changed value takes."""
    overhead: float = Field(default=1.1, ge=1)
    """Time of a dissemination over its fluid bound."""
    latency_s: float = Field(default=1.0, ge=0)
    """Seconds that are added to each dissemination."""
    install_s: float = Field(default=2.0, ge=0)
    """Seconds that a node takes to install a version."""
    relayed: bool = True
    """Nodes hand a version on while they receive it. Otherwise the learner sends it to each."""
    recompute: bool = True
    """Running sequences' keys and values are computed anew under a new version."""

    def size(self, parameters: float) -> float:
        return self.bytes or self.density * parameters * self.bytes_a_change


class PolicySection(Section):
    """How rollouts are run."""

    name: PolicyName = "shoal"
    """Which system."""
    staleness: int = Field(default=3, ge=0, le=64)
    """Bound S, in learner steps."""
    kappa: int = Field(default=0, ge=0, le=64)
    """Steps between publications. 0 follows the capacity model."""
    overlap: bool = True
    """Nodes generate while they receive a version."""
    migration: bool = True
    """A lost node's sequences go on elsewhere with their tokens."""
    local_engine: bool = True
    """The local engines generate while the nodes are under the capacity rule (needs `learner.gpu`)."""
    memory: bool = True
    """The controller of the local engines' turns remembers what each number of nodes needed."""
    turn_s: float = Field(default=0.0, ge=0)
    """With rlboost: a fixed turn of the local engines in seconds. 0 leaves it to the controller."""


class SimulatedActivationSection(Section):
    """Which nodes are active, as [activation] of a learner's configuration."""

    all: bool = False
    """Every node that is there is active, whatever it costs."""
    margin: float = Field(default=0.1, ge=0, le=10)
    """Capacity beyond the need that is kept active, as a share of the need."""
    release: float = Field(default=0.25, ge=0, le=10)
    """A node is let go only when the others make this share more than the need."""
    dwell_s: float = Field(default=300.0, ge=0)
    """Seconds for which a reason to let a node go must hold."""
    explore_share: float = Field(default=0.05, ge=0, le=1)
    """Share of the spending that may go to nodes whose speed is not known."""
    known: bool = True
    """Rates of kinds are known beforehand to 10 %, from earlier runs. Otherwise each node has to be tried."""
    max_usd_per_hour: float = Field(default=0.0, ge=0)
    """Most $ an hour for nodes. 0 is no limit."""
    budget_usd: float = Field(default=0.0, ge=0)
    """Most $ for the nodes of the whole run. 0 is no limit."""
    egress_usd_per_gb: float = Field(default=0.0, ge=0)
    """Price in $ of 10^9 bytes that the learner sends."""
    every_s: float = Field(default=60.0, gt=0)
    """Seconds between decisions. A loss calls for one at once."""

    @model_validator(mode="after")
    def _marks(self) -> SimulatedActivationSection:
        if self.release < self.margin:
            raise ValueError(f"release {self.release:g} is under margin {self.margin:g}: nodes would come and go")
        return self


class CaseSection(Section):
    """A variant of a preset, for which all systems are run."""

    name: str
    """Name, for tables."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Keys of the scenario that it sets anew."""


class SystemSection(CaseSection):
    """A system that a preset compares."""

    role: Literal["baseline", "paper", "ours", "ablation"]
    """What it is in the comparison."""


class PublishedSection(Section):
    """A number that a paper reports."""

    what: str
    """What the number is."""
    metric: Metric
    """"saving": 1 less $ a step of `of` over that of `against`. "efficiency": steps a $ of `of` over those of `against`, less 1.
    "throughput": steps an hour of `of` over those of `against`, less 1."""
    low: float
    """Lowest published value."""
    high: float
    """Highest published value."""
    case: str = ""
    """The case that it was published for. "" is all."""
    of: str = "paper"
    """The system that it is about: a name, or a role that one system has."""
    against: str = "baseline"
    """The system that it is compared with, likewise."""
    within: float = Field(default=0.05, ge=0)
    """How far off the simulated value may be to count as the same."""


class AssumptionSection(Section):
    """Where a number of a preset is from."""

    key: str
    """The dotted key that it stands at."""
    kind: Literal["published", "derived", "assumed", "fitted"]
    """How it was come by."""
    why: str
    """The source or the reason."""
    tries: list[float] = Field(default_factory=list)
    """Other values that are run as well, to see what hangs on it."""


class File(Section):
    """A scenario's file."""

    name: str = ""
    """Name. "" is the file's."""
    what: str = ""
    """One line on what is compared."""
    detail: Literal["auto", "sequences", "groups"] = "auto"
    """Simulator: sequence by sequence, or group by group. "auto" takes groups beyond `netem.planning.runner.AUTO_NODES` nodes."""
    steps: int = Field(default=40, ge=2, le=100_000)
    """Learner steps."""
    warm: int = Field(default=4, ge=1)
    """Steps at the beginning that are not counted."""
    seed: int = Field(default=0, ge=0)
    """Seed of lengths, comings and goings."""
    fleet: FleetSection = FleetSection()
    model: Served = Served()
    """The model that is served and trained."""
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
    """as read from the file, for `changed`"""
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
            name=self.name, **lengths.model_dump(), groups=learner.groups, samples=learner.samples, train_s=learner.train_s,
            update_s=learner.update_s,
        )  # fmt: skip

    @property
    def delta_bytes(self) -> float:
        return self.file.delta.size(self.file.model.parameters)

    def changed(self, overrides: Mapping[str, Any]) -> CostScenario:
        """The same scenario with other values. Tables are merged, lists replaced whole. UsageError for wrong values."""
        return build_scenario(_merged(self.values, overrides), self.source, self.folder)

    def with_value(self, key: str, value: Any) -> CostScenario:
        """The same scenario with one dotted key set; a number in the key is a place in a list."""
        values = copy.deepcopy(dict(self.values))
        found: Any = values
        *path, last = key.split(".")
        for name in path:
            found = found[int(name)] if isinstance(found, list) else found.setdefault(name, {})
        found[int(last) if isinstance(found, list) else last] = value
        return build_scenario(values, self.source, self.folder)

    def value(self, key: str) -> Any:
        """The value at a dotted key; None where there is none (a row that the fleet does not have, say)."""
        found: Any = self.file
        for name in key.split("."):
            found = found[int(name)] if isinstance(found, list) and name.isdigit() else getattr(found, name, None)
        return found.model_dump() if isinstance(found, Section) else found


def load_scenario(path: str | Path) -> CostScenario:
    """Read a scenario's file. UsageError, one line that names the key, for anything wrong."""
    path = Path(path)
    return build_scenario(read_toml(path, "scenario"), str(path), path.parent)


def load_preset(name: str) -> CostScenario:
    """The preset of that name. UsageError, which lists them, for another name."""
    names = preset_names()
    if name not in names:
        raise UsageError(f"--preset: no preset {name!r}: {', '.join(names)}")
    return load_scenario(FOLDER / f"{name}.toml")


def preset_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def build_scenario(values: Mapping[str, Any], source: str, folder: Path) -> CostScenario:
    """A scenario from plain values; files that it names are in `folder`. UsageError names `source` and the wrong key."""
    check_keys(File, values, source, HINTS)
    file = check_section(File, values, source)
    rows = [*(rows_of_csv(folder / file.fleet.file) if file.fleet.file else []), *file.fleet.nodes]
    if not rows and not file.learner.gpu:
        raise UsageError(f"{source}: fleet: no nodes, and the learner has no local engine (learner.gpu)")
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
