"""The learner's configuration: TOML file, then dotted flags, strict. Must import without torch.

The string under each field is its description: `shoal config docs` makes docs/configuration.md of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from learner.audit.settings import AuditSection
from learner.dispatch.dispatcher import Strategies
from learner.economy.local_rollout import FLOOR_S
from learner.economy.price_keys import wrong_price_key
from learner.endpoint.settings import EndpointSection
from learner.environments.settings import EnvironmentSection
from learner.evaluation.settings import EvalSection, EvalTask, eval_findings
from learner.layers import Layer, read_flags, stack
from learner.presets import PRESETS, PresetName, sentences
from learner.requests.settings import RequestsSection
from learner.rewards.settings import RewardSettings
from learner.section import MAX_SEED, MIN_SEED, Finding, Section, Seed, dump_toml, read_toml
from learner.standing.settings import StandingSection
from learner.tasks.settings import TaskSettings
from learner.tracking.settings import TrackingSection
from learner.trainer.objectives.registry import OBJECTIVES
from learner.trainer.settings import TrainerConfig, TrainerSection
from p2p.errors import UsageError
from p2p.limits import DEFAULT_SEGMENT, MAX_CHUNK, MAX_SEGMENT, MAX_SEGMENT_CHUNKS
from p2p.protocol.prices import MAX_PRICE

__all__ = [
    "LearnerConfig", "LocalEngineSection", "ReadConfig", "TrainerSection", "build_config", "dump_toml", "load_config",
    "read_config", "resolved",
]  # fmt: skip


class TaskSection(RewardSettings, TaskSettings):
    """Where prompts come from, and how answers are scored."""


class RolloutSection(Section):
    """What is generated for a step, how old it may be, and what becomes of stragglers."""

    max_staleness: int = Field(default=2, ge=0, le=64)
    """Learner steps between the oldest token of a completion and the step that trains on it. 0 is on-policy."""
    groups_per_step: int = Field(default=16, ge=0)
    """Groups that an optimizer step trains on. A group is the completions of one prompt. 0: nothing is generated for training; a
    trainer of yours (`external_trainer`) samples through the endpoint what it wants to."""
    samples: int = Field(default=16, ge=1)
    """Completions of a group."""
    max_new_tokens: int = Field(default=64, ge=1)
    """Most tokens of a completion."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus of the sampling: the most likely tokens that have this probability together. Below 1 it needs
    `trainer.objective` "decoupled", "masked" or "topr"."""
    micro_batch_groups: int = Field(default=4, ge=1)
    """Groups that the trainer is handed at a time. It begins with them while other groups of the step are still generated."""
    stall_s: float = Field(default=120.0, ge=1)
    """Seconds that a node with work may go without making a token before others get its work."""
    on_update: Literal["continue", "finish"] = "continue"
    """What becomes of a running completion when its node gets newer weights. "continue": it goes on under the newer weights,
    with its keys and values computed anew. "finish": it ends under the weights that it began with, and the node takes nothing
    new until then."""
    finish_s: float = Field(default=60.0, gt=0, le=3600)
    """With `on_update = "finish"`: seconds that a node may hold a version back. What has not ended by then goes on under newer
    weights, on any node."""
    equal_groups: Literal["train", "drop"] = "train"
    """Groups in which every completion got the same reward teach nothing: their advantages are zero. "drop" generates other
    groups in their place (dynamic sampling, DAPO, arXiv 2503.14476). Steps then cost more, and favour prompts of middling
    difficulty. Rewards count here as they are trained on, `trainer.overlong_tokens` included."""
    extra_groups: int = Field(default=0, ge=0)
    """Groups beyond `groups_per_step` that may be reserved for a step. Those that end first fill the step; the others are
    aborted, and their prompts are drawn again. This, `extra_samples` and `truncate_stuck_s` favour short completions: the metrics
    redundancy/kept_mean_length and redundancy/cut_mean_length show by how much."""
    extra_samples: int = Field(default=0, ge=0)
    """Completions beyond `samples` that are begun for a group. Those that end first fill the group; the others are aborted."""
    publish_every: int = Field(default=0, ge=0, le=64)
    """Optimizer steps between two published versions, at most `max_staleness` + 1. 0 publishes as often as the nodes can be
    brought a version."""
    truncate_stuck_s: float = Field(default=0.0, ge=0)
    """Truncate completions that alone have kept the trainer waiting for this many seconds, and train on them with the finish
    reason "truncated". 0 never does."""


class ActivationSection(Section):
    """Which of the nodes that cost something generate, and what may be spent. Nodes that cost nothing always generate."""

    margin: float = Field(default=0.1, ge=0, le=10)
    """Capacity beyond what the learner needs that is kept active, as a share of what it needs."""
    release: float = Field(default=0.25, ge=0, le=10)
    """A node is let go only when the others make this share more than the learner needs, for `dwell_s`."""
    dwell_s: float = Field(default=60.0, ge=0)
    """Seconds for which a reason to let a node go must hold. It keeps nodes from coming and going with every estimate."""
    explore_share: float = Field(default=0.05, ge=0, le=1)
    """Share of the hourly spending that may go to nodes whose speed is not known yet."""
    most_usd_per_hour: float = Field(default=100.0, ge=0)
    """Highest price in $ an hour that a node may ask for itself. Dearer nodes are not used, unless `prices` names them."""
    most_usd_per_gb: float = Field(default=1.0, ge=0)
    """Highest price in $ a GB (10^9 bytes that leave the node) that a node may ask for itself; clouds take about 0.1."""
    max_usd_per_hour: float = Field(default=0.0, ge=0)
    """Most $ an hour for all nodes together. 0 is no limit."""
    budget_usd: float = Field(default=0.0, ge=0)
    """Most $ for the whole run, over all restarts. Once it is spent nothing more is generated. 0 is no limit."""
    prices: dict[str, list[float]] = Field(default_factory=dict)
    """Prices by "ticket:NAME" (* and ? as in a shell) or "peer:PEERID", instead of what nodes say of themselves; a peer's own
    counts before its ticket's, then the first that fits. A price is [$ an hour], [$ an hour, $ an hour idle] or [$ an hour,
    $ an hour idle, $ a GB that leaves the node]. Prices are self-reported otherwise: set those of nodes that you do not trust."""
    ask_command: list[str] = Field(default_factory=list)
    """Command and arguments that are run when more nodes would be worth their price, with SHOAL_MORE, SHOAL_WHY, SHOAL_RUN and
    SHOAL_TICKET in the environment."""
    ask_url: str = ""
    """URL that is told the same by POST, as JSON."""
    ask_every_s: float = Field(default=300.0, ge=1)
    """Least seconds between two such calls."""
    learner_usd_per_hour: float = Field(default=0.0, ge=0)
    """What the learner's own machine costs in $ an hour, for the bill."""


class LocalEngineSection(Section):
    """The local engine: it generates on the trainer's device at the beginning of a step while the nodes are too few, and alone
    when there is no node. Trainer and engine take turns."""

    engine: Literal["", "transformers", "vllm", "fake"] = ""
    """Which engine, as `shoal node --engine`. "" is none."""
    engine_python: str = ""
    """Python of the environment that the engine runs in. "" is the learner's own."""
    engine_set: dict[str, Any] = Field(default_factory=dict)
    """Further settings of the engine, as `shoal node --engine-set`. It keeps its memory in the trainer's turn: leave room."""
    device: str = "auto"
    """Device of the engine, as `shoal node --device`."""
    dtype: str = "auto"
    """Type that the engine computes in, as `shoal node --dtype`."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of the engine."""
    capacity: int = Field(default=64, ge=1)
    """Sequences that the engine decodes at once."""
    floor_s: float = Field(default=FLOOR_S, ge=0)
    """Shortest turn in seconds; a shorter one is not worth the switch. A turn is at least so long while the nodes are too few,
    and none otherwise (RLBoost, arXiv 2510.19225)."""
    most_s: float = Field(default=0.0, ge=0)
    """Longest turn in seconds. 0 is no limit."""


class SwarmSection(Section):
    """How the learner is reached, and how versions are cut and chained."""

    listen: list[str] = Field(default_factory=lambda: ["/ip4/0.0.0.0/tcp/0"], min_length=1)
    """Multiaddrs to listen on. Port 0 is chosen once and kept with the run, so that tickets stay good."""
    announce: list[str] = Field(default_factory=list)
    """Addresses that tickets name instead of those found: a public address, a forwarded port."""
    max_up_mbit: float = Field(default=0.0, ge=0, le=1e9)
    """Mbit/s that leave the learner's machine for the swarm at most, on the wire: at least 0.1. 0 is no limit. `shoal limit`
    changes it while the learner runs."""
    uplink_mbit: float = Field(default=0.0, ge=0, le=1e9)
    """Mbit/s that the learner's uplink carries: versions leave at that pace from the first one on. 0: it is found out, which
    takes the first few versions, and kept with the run for its next start. No limit: `max_up_mbit` is one."""
    segment_bytes: int = Field(default=DEFAULT_SEGMENT, ge=1024, le=MAX_SEGMENT)
    """Bytes of a segment, the unit in which a version is encoded and installed."""
    chunk_bytes: int = Field(default=0, ge=0, le=MAX_CHUNK)
    """Bytes of a chunk, the unit in which a segment travels: at least 1024. 0 fits it to each version's size."""
    anchor_every: int = Field(default=20, ge=1)
    """Publications between two anchors (whole states). It bounds how many deltas a node that joins has to fetch."""
    squash_every: int = Field(default=5, ge=0)
    """Publications that a cumulative delta spans. It shortens the chain to a newer version, and keeps one more state in the
    trainer's memory. 0 or 1 makes none."""


class StatusSection(Section):
    """The status page, and what is kept of what the model writes."""

    port: int = Field(default=0, ge=0, le=65535)
    """Port of /status and /metrics on the loopback interface. 0 is 7462, or where that is taken any free one: the log and
    status.json name it. Any other port that is taken is an error."""
    samples_per_step: int = Field(default=4, ge=0, le=64)
    """Completions of each committed step that are written to samples.jsonl, drawn by the run's `seed` and the step. 0 writes
    none."""


MOST_EVALS = 32
"""Evaluations of a run at the most: each asks for hundreds of sequences at once."""


class LearnerConfig(Section):
    """Everything a run is made of. Saved, resolved, as config.toml in the run directory."""

    moved: ClassVar[Mapping[str, str]] = {
        "trainer.clip_low": "trainer.objective_options.clip_low", "trainer.clip_high": "trainer.objective_options.clip_high",
        "trainer.tis_cap": "trainer.objective_options.cap",
        "trainer.proximal": 'trainer.objective: "decoupled" for "trainer", "grpo" for "behaviour"',
    }  # fmt: skip

    run_dir: str
    """Directory of the run: journal, checkpoints, keys, logs."""
    model: str
    """Local folder or hub id of a Hugging Face causal language model."""
    seed: Seed = 0
    """Seed of the run: the order of prompts, and the seeds of all sampling."""
    preset: PresetName = ""
    """Settings by name: GRPO, Dr. GRPO, DAPO, GSPO and others as far as the trainer has them (`shoal config presets` shows what
    each sets). Keys of the file and flags win over them."""
    external_trainer: bool = False
    """Wait for a trainer of yours (`learner.client.client`) instead of starting ours."""
    task: TaskSection = TaskSection()
    rollout: RolloutSection = RolloutSection()
    environment: EnvironmentSection = EnvironmentSection()
    dispatch: Strategies = Strategies()
    activation: ActivationSection = ActivationSection()
    standing: StandingSection = StandingSection()
    audit: AuditSection = AuditSection()
    local_engine: LocalEngineSection = LocalEngineSection()
    requests: RequestsSection = RequestsSection()
    swarm: SwarmSection = SwarmSection()
    status: StatusSection = StatusSection()
    tracking: TrackingSection = TrackingSection()
    endpoint: EndpointSection = EndpointSection()
    trainer: TrainerSection = TrainerSection()
    eval: list[EvalSection] = Field(default_factory=list, max_length=MOST_EVALS)
    """Evaluations beside the default one."""

    @property
    def own_score(self) -> bool:
        """Whether the task scores its answers itself: neither reward functions nor an environment do."""
        return not self.task.reward and not self.environment.name

    def trainer_config(self) -> TrainerConfig:
        """What the trainer process is told."""
        return TrainerConfig(
            **self.trainer.model_dump(),
            model=self.model,
            checkpoint_dir=str(Path(self.run_dir) / "checkpoints"),
            max_staleness=self.rollout.max_staleness,
            temperature=self.rollout.temperature,
            max_new_tokens=self.rollout.max_new_tokens,
            micro_batch_groups=self.rollout.micro_batch_groups,
        )


@dataclass(frozen=True, slots=True)
class ReadConfig:
    """Settings as they were read, also where some are wrong."""

    config: LearnerConfig
    """wrong keys have their defaults in it, and `run_dir` and `model` are "" where they are missing"""
    problems: tuple[str, ...]
    """what is wrong, one line each"""
    wrong: frozenset[str]
    """keys whose values are wrong or missing"""


def load_config(file: str | Path, overrides: Sequence[str] = ()) -> LearnerConfig:
    """Read a TOML file and apply `--section.key value` flags. UsageError, one line for each thing that is wrong."""
    return _sound(read_config(file, overrides))


def read_config(file: str | Path, overrides: Sequence[str] = (), other_flags: Collection[str] = ()) -> ReadConfig:
    """As `load_config`, but what is wrong comes with the settings. UsageError only for a file or flags that cannot be read.
    `other_flags` are the command line's flags that are no settings, for suggestions."""
    path = Path(file)
    layers = [Layer(str(path), read_toml(path, "config file")), read_flags(LearnerConfig, overrides, other_flags)]
    return _read(layers, str(path), other_flags)


def build_config(values: dict[str, Any], source: str) -> LearnerConfig:
    """Check a dictionary of settings. UsageError, one line for each wrong key."""
    return _sound(_read([Layer(source, values)], source))


def resolved(config: LearnerConfig) -> str:
    """The configuration with all defaults as TOML, headed by what its preset did."""
    values = config.model_dump(exclude_none=True)
    return "".join(f"# {line}\n" for line in sentences(config.preset, values)) + dump_toml(values)


def _sound(read: ReadConfig) -> LearnerConfig:
    if read.problems:
        raise UsageError(*read.problems)
    return read.config


def _read(layers: Sequence[Layer], source: str, other_flags: Collection[str] = ()) -> ReadConfig:
    name = next((layer.values["preset"] for layer in reversed(layers) if "preset" in layer.values), "")
    preset = next((one for key, one in PRESETS.items() if key == name), None)
    found = stack(
        LearnerConfig, layers, {"run_dir": "", "model": ""}, below=preset.table(_objective(layers)) if preset else {},
        source=source, other_flags=other_flags,
    )  # fmt: skip
    told = [p for p in _contradictions(found.section) if not found.wrong.intersection(p.keys)]
    options = {key for p in told for key in p.keys if len(p.keys) == 1}  # wrong by itself
    return ReadConfig(found.section, (*found.problems, *(p.what for p in told)), found.wrong | options)


def _objective(layers: Sequence[Layer]) -> object:
    """What file and flags say that `trainer.objective` is; None where they say nothing of it."""
    tables = [layer.values.get("trainer") for layer in reversed(layers)]
    return next((table["objective"] for table in tables if isinstance(table, Mapping) and "objective" in table), None)


def _contradictions(config: LearnerConfig) -> Iterator[Finding]:
    """Values that are right by themselves and not together."""
    tables = [("local_engine.engine_set", config.local_engine.engine_set), ("environment.options", config.environment.options)]
    played = {"task", *(f"eval.{i}.task" for i, one in enumerate(config.eval) if one.environment)}
    for where, task in _tasks(config):
        tables += [(f"{where}.options", task.options), (f"{where}.template_options", task.template_options)]
        yield from _task_findings(where, task, scored=bool(task.reward or (where in played and config.environment.name)))
    if config.environment.name and config.task.reward:
        yield Finding(
            "task.reward and environment.name are both set: an environment rewards its episodes itself; leave one of them out",
            ("task.reward", "environment.name"),
        )
    for i, one in enumerate(config.eval):
        if one.environment and not config.environment.name:
            yield Finding(f"eval.{i}.environment: environment.name is empty: there is none to play in", ("environment.name",))
        elif one.environment and one.task is not None and one.task.reward:
            what = f"eval.{i}.environment and eval.{i}.task.reward are both set: an environment rewards its episodes itself"
            yield Finding(what, ("eval",))
    for key, options in tables:
        for what in _not_plain(key, options):
            yield Finding(what, (key,))
    yield from eval_findings(config.eval)
    rollout, swarm = config.rollout, config.swarm
    if rollout.top_p < 1 and not OBJECTIVES[config.trainer.objective].nucleus and not config.external_trainer:
        yield Finding(
            f"rollout.top_p = {rollout.top_p:g} does not go with trainer.objective = \"{config.trainer.objective}\": nodes "
            "report log probabilities within the nucleus, the trainer's are over all tokens, so bad answers would lose their "
            "gradient; set rollout.top_p = 1 or trainer.objective = \"decoupled\"",
            ("rollout.top_p", "trainer.objective"),
        )
    if rollout.publish_every > rollout.max_staleness + 1:
        yield Finding(
            f"rollout.publish_every = {rollout.publish_every}: with rollout.max_staleness = {rollout.max_staleness} the learner "
            f"would wait for a version that it has not published; at most {rollout.max_staleness + 1}",
            ("rollout.publish_every", "rollout.max_staleness"),
        )
    if not rollout.groups_per_step and not config.external_trainer:
        yield Finding(
            "rollout.groups_per_step = 0 leaves the trainer without anything to train on: it is for one of yours, that samples "
            "through the endpoint (external_trainer = true)",
            ("rollout.groups_per_step", "external_trainer"),
        )
    elif not rollout.groups_per_step and not config.endpoint.listen:
        yield Finding(
            "rollout.groups_per_step = 0 without endpoint.listen: nothing can sample in this run: your trainer does so through "
            'the endpoint; set endpoint.listen = "127.0.0.1:0"',
            ("rollout.groups_per_step", "external_trainer", "endpoint.listen"),
        )
    if not rollout.groups_per_step and config.local_engine.engine:
        yield Finding(
            "rollout.groups_per_step = 0 and local_engine.engine are both set: the local engine generates what the trainer waits "
            "for, and it waits for nothing; leave the local engine out, and start a node on this machine",
            ("rollout.groups_per_step", "local_engine.engine"),
        )
    for name, prices in config.activation.prices.items():
        if not 1 <= len(prices) <= 3 or not all(0 <= price <= MAX_PRICE for price in prices):
            yield Finding(f"activation.prices: {name!r} is to have one to three prices from 0 to {MAX_PRICE:g}")
        if (wrong := wrong_price_key(name)) is not None:
            yield Finding(f"activation.prices: {name!r} {wrong}")
    if 0 < swarm.chunk_bytes < 1024:
        yield Finding(f"swarm.chunk_bytes = {swarm.chunk_bytes}: at least 1024, or 0 for what fits each version")
    elif 0 < swarm.chunk_bytes * MAX_SEGMENT_CHUNKS < swarm.segment_bytes:
        yield Finding(
            f"swarm.chunk_bytes = {swarm.chunk_bytes} is too small for swarm.segment_bytes = {swarm.segment_bytes}: "
            f"a segment has at most {MAX_SEGMENT_CHUNKS} chunks",
            ("swarm.chunk_bytes", "swarm.segment_bytes"),
        )


def _tasks(config: LearnerConfig) -> Iterator[tuple[str, TaskSection | EvalTask]]:
    """Every task of the configuration, with the key of its table."""
    yield "task", config.task
    yield from ((f"eval.{i}.task", one.task) for i, one in enumerate(config.eval) if one.task is not None)


def _task_findings(where: str, task: TaskSection | EvalTask, *, scored: bool) -> Iterator[Finding]:
    if task.messages and task.template:
        what = f"{where}.messages and {where}.template are both set: a prompt is made of one of them"
        yield Finding(what, (f"{where}.messages", f"{where}.template"))
    if task.data and not task.answer and not scored:
        what = f'{where}.answer = "" and no {where}.reward: nothing says what an answer is worth'
        yield Finding(what, (f"{where}.answer", f"{where}.reward", f"{where}.data"))


def _not_plain(key: str, value: Any) -> Iterator[str]:
    """Values that TOML has and JSON and msgpack have not: options travel in all three."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _not_plain(f"{key}.{name}", inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _not_plain(key, inner)
    elif isinstance(value, int) and not MIN_SEED <= value <= MAX_SEED:
        yield f"{key}: a number of more than 64 bits"
    elif not isinstance(value, (bool, int, float, str)):
        yield f"{key}: a {type(value).__name__} is not taken here: write it as a string, in quotes"
