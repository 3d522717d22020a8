"""The learner's configuration: TOML file, then dotted flags, strict. Must import without torch."""

from __future__ import annotations

import dataclasses
import json
import tomllib
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from learner.dispatch.dispatcher import Strategies
from learner.economy.local_rollout import FLOOR_S
from learner.trainer.settings import SEEDS, TrainerConfig
from p2p.errors import UsageError
from p2p.limits import DEFAULT_SEGMENT, MAX_CHUNK, MAX_SEGMENT, MAX_SEGMENT_CHUNKS
from p2p.protocol.prices import MAX_PRICE


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class TaskSection(Section):
    name: str = "reverse"
    """a built-in task, or reasoning_gym:DATASET"""
    seed: int = Field(default=0, ge=SEEDS[0], le=SEEDS[1])
    options: dict[str, Any] = Field(default_factory=dict)
    allow_unconfined: bool = False
    """score answers that are run as code also where the system cannot keep them from our files"""


class RolloutSection(Section):
    max_staleness: int = Field(default=2, ge=0, le=64)
    """learner steps between a trajectory's oldest token and the step that trains on it"""
    groups_per_step: int = Field(default=16, ge=1)
    """prompts per optimizer step"""
    samples: int = Field(default=16, ge=1)
    """completions per prompt: one group"""
    max_new_tokens: int = Field(default=64, ge=1)
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    micro_batch_groups: int = Field(default=4, ge=1)
    """groups that the trainer is handed at a time, and cuts into forwards together, while others are still generated"""
    stall_s: float = Field(default=120.0, ge=1)
    """seconds a node that has work may go without making a token before others get it"""
    on_update: Literal["continue", "finish"] = "continue"
    """what becomes of a sequence when its node gets newer weights: "continue" goes on under them (a span of its own; the
    cache is computed anew); "finish" ends under those that it began with, and the node takes nothing new until then"""
    finish_s: float = Field(default=60.0, gt=0, le=3600)
    """with "finish", seconds a node may hold a version back; what is not finished then goes on under newer weights, anywhere"""


    equal_groups: Literal["train", "drop"] = "train"
    """groups whose members all got the same reward teach nothing (their advantages are zero): "drop" generates others in their
    place. That makes a step dearer, and its prompts those of middling difficulty"""
    extra_groups: int = Field(default=0, ge=0)
    """groups that may be reserved for a step beyond `groups_per_step`: those that end first fill it, the surplus is aborted and
    its prompts are drawn again. This and the next two favour short answers: redundancy/kept_mean_length and cut_mean_length of
    the metrics show how much"""
    extra_samples: int = Field(default=0, ge=0)
    """completions of a group beyond `samples`: it is whole with those that end first, the others are aborted"""
    publish_every: int = Field(default=0, ge=0, le=64)
    """optimizer steps between two versions; 0: as few as it takes to bring a version to the nodes meanwhile"""
    truncate_stuck_s: float = Field(default=0.0, ge=0)
    """seconds after which what alone keeps the trainer waiting is cut where it is, and trained on with finish "truncated"; 0:
    never"""


class ActivationSection(Section):
    """Who of those that cost something generates, and what may be spent. Nodes that cost nothing always do."""

    margin: float = Field(default=0.1, ge=0, le=10)
    """capacity beyond what the learner needs, as a share of it"""
    release: float = Field(default=0.25, ge=0, le=10)
    """a node is let go only when the others have this much more than is needed, for `dwell_s`"""
    dwell_s: float = Field(default=60.0, ge=0)
    explore_share: float = Field(default=0.05, ge=0, le=1)
    """of what is spent an hour, what may go to nodes whose speed is not known yet"""
    most_usd_per_hour: float = Field(default=100.0, ge=0)
    """that a node may ask for itself, where `prices` does not say what it costs: dearer ones are not used"""
    max_usd_per_hour: float = Field(default=0.0, ge=0)
    """0: no limit"""
    budget_usd: float = Field(default=0.0, ge=0)
    """for the whole run, over all its lives; once it is spent nothing more is generated. 0: no limit"""
    prices: dict[str, list[float]] = Field(default_factory=dict)
    """name of nodes (* and ? as in a shell) -> [$/hour] or [$/hour, $/hour idle] or [.., .., $/GB that leaves them]: instead of
    what they say themselves; the first that fits counts"""
    ask_command: list[str] = Field(default_factory=list)
    """run when more nodes would be worth it, with SHOAL_MORE, SHOAL_WHY, SHOAL_RUN and SHOAL_TICKET in its environment"""
    ask_url: str = ""
    """told the same by POST, as JSON"""
    ask_every_s: float = Field(default=300.0, ge=1)
    """at most"""
    learner_usd_per_hour: float = Field(default=0.0, ge=0)
    """what the learner's own machine costs, for the bill"""


class LocalEngineSection(Section):
    """The learner's local engine, on the trainer's device: it generates at the beginning of a step while the others are too few,
    and alone when nobody else is there. Trainer and engine take turns."""

    engine: Literal["", "transformers", "vllm", "fake"] = ""
    """"" for none; else as `shoal node --engine`"""
    engine_python: str = ""
    engine_set: dict[str, Any] = Field(default_factory=dict)
    """further settings of it, as `shoal node --engine-set`. It keeps its memory in the trainer's turn: leave room"""
    device: str = "auto"
    dtype: str = "auto"
    threads: int = Field(default=1, ge=1)
    capacity: int = Field(default=64, ge=1)
    """sequences decoded at once"""
    floor_s: float = Field(default=FLOOR_S, ge=0)
    """less is not worth a turn: so long at the least while the others do not meet the capacity rule, else none"""
    most_s: float = Field(default=0.0, ge=0)
    """of a turn; 0: no limit"""


class DispatchSection(Section):
    """What the dispatcher goes by (`learner.dispatch.dispatcher.Strategies`); to be switched off to see what each is worth."""

    gain: bool = True
    longest_first: bool = True
    pace: bool = False
    balance: bool = True

    def strategies(self) -> Strategies:
        return Strategies(**self.model_dump())


class SwarmSection(Section):
    listen: list[str] = Field(default_factory=lambda: ["/ip4/0.0.0.0/tcp/0"], min_length=1)
    """multiaddrs; port 0 is chosen once and kept with the run, so that tickets stay good"""
    announce: list[str] = Field(default_factory=list)
    """addresses to put into tickets instead of those found (a public address, a forwarded port)"""
    segment_bytes: int = Field(default=DEFAULT_SEGMENT, ge=1024, le=MAX_SEGMENT)
    chunk_bytes: int = Field(default=0, ge=0, le=MAX_CHUNK)
    """0: as fits each version's size (`p2p.weights.encode.chunk_bytes_for`)"""
    anchor_every: int = Field(default=20, ge=1)
    """publications between anchors: bounds a joiner's chain"""
    squash_every: int = Field(default=5, ge=0)
    """publications between cumulative deltas, each over so many: shortens the chain to a newer version. Costs one more state in
    the trainer's memory; 0 or 1: none"""


class StatusSection(Section):
    port: int = Field(default=0, ge=0, le=65535)
    """loopback port of /status and /metrics; 0: any free one"""


OWNED = (
    "checkpoint_dir",
    "task",
    "task_seed",
    "task_options",
    "task_allow_unconfined",
    "max_staleness",
    "temperature",
    "max_new_tokens",
    "micro_batch_groups",
    "model",
)
"""Trainer settings that follow from other sections."""


def _trainer_section() -> type[Section]:
    hints = typing.get_type_hints(TrainerConfig)
    fields: dict[str, Any] = {}
    for f in dataclasses.fields(TrainerConfig):
        if f.name in OWNED:
            continue
        kind = hints[f.name]
        if typing.get_origin(kind) is tuple:  # TOML has lists
            items, default = typing.get_args(kind), list(typing.cast(tuple, f.default))
            field = Field(default, min_length=len(items), max_length=len(items))
            fields[f.name] = (list[items[0]], field)  # type: ignore[valid-type]
        else:
            fields[f.name] = (kind, f.default)
    return create_model("TrainerSection", __base__=Section, **fields)


TrainerSection = _trainer_section()


class LearnerConfig(Section):
    """Everything a run is made of. Saved, resolved, as config.toml in the run directory."""

    run_dir: str
    model: str
    """local folder or hub id of a Hugging Face causal LM"""
    seed: int = Field(default=0, ge=SEEDS[0], le=SEEDS[1])
    external_trainer: bool = False
    """wait for a trainer of yours (learner.client.client) instead of starting ours"""
    task: TaskSection = TaskSection()
    rollout: RolloutSection = RolloutSection()
    dispatch: DispatchSection = DispatchSection()
    activation: ActivationSection = ActivationSection()
    local_engine: LocalEngineSection = LocalEngineSection()
    swarm: SwarmSection = SwarmSection()
    status: StatusSection = StatusSection()
    trainer: Any = Field(default_factory=TrainerSection)

    def trainer_config(self) -> TrainerConfig:
        """The trainer process's settings."""
        values = self.trainer.model_dump()
        values |= {
            "model": self.model,
            "checkpoint_dir": str(Path(self.run_dir) / "checkpoints"),
            "task": self.task.name,
            "task_seed": self.task.seed,
            "task_options": dict(self.task.options),
            "task_allow_unconfined": self.task.allow_unconfined,
            "max_staleness": self.rollout.max_staleness,
            "temperature": self.rollout.temperature,
            "max_new_tokens": self.rollout.max_new_tokens,
            "micro_batch_groups": self.rollout.micro_batch_groups,
        }
        return TrainerConfig.from_dict(values)


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The values in a TOML file. UsageError, one line, when there is none or it is none; `what` names it there."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"no such {what}: {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not TOML: {error}") from None


def load_config(file: str | Path, overrides: Sequence[str] = ()) -> LearnerConfig:
    """Read a TOML file and apply `--section.key value` flags. UsageError, one line, for anything wrong."""
    path = Path(file)
    values = read_toml(path, "config file")
    for key, text in _pairs(overrides):
        _set(values, key, _parse(text))
    return build_config(values, str(path))


def build_config(values: dict[str, Any], source: str) -> LearnerConfig:
    """Check a dictionary of settings. UsageError names the first wrong key."""
    values = dict(values)
    try:
        if "trainer" in values:
            values["trainer"] = TrainerSection.model_validate(values["trainer"])
        config = LearnerConfig.model_validate(values)
        _check_plain("task.options", config.task.options)
        _check_plain("local_engine.engine_set", config.local_engine.engine_set)
        trainer = config.trainer_config()
    except ValidationError as error:
        first = error.errors()[0]
        prefix = ["trainer"] if error.title == "TrainerSection" else []
        key = ".".join([*prefix, *(str(p) for p in first["loc"])])
        what = "unknown key" if first["type"] == "extra_forbidden" else first["msg"].lower()
        raise UsageError(f"{source}: {key}: {what}") from None
    if config.rollout.top_p < 1 and trainer.proximal == "behaviour" and not config.external_trainer:
        raise UsageError(
            f"rollout.top_p = {config.rollout.top_p:g} does not go with trainer.proximal = \"behaviour\": nodes report log "
            "probabilities within the nucleus, the trainer's are over all tokens, so bad answers would lose their gradient; "
            "set rollout.top_p = 1 or trainer.proximal = \"trainer\""
        )
    rollout = config.rollout
    if rollout.publish_every > rollout.max_staleness + 1:
        raise UsageError(
            f"rollout.publish_every = {rollout.publish_every}: with rollout.max_staleness = {rollout.max_staleness} the learner "
            f"would wait for a version that it has not published; at most {rollout.max_staleness + 1}"
        )
    for name, prices in config.activation.prices.items():
        if not 1 <= len(prices) <= 3 or not all(0 <= price <= MAX_PRICE for price in prices):
            raise UsageError(f"activation.prices: {name!r} is to have one to three prices from 0 to {MAX_PRICE:g}")
    swarm = config.swarm
    if 0 < swarm.chunk_bytes < 1024:
        raise UsageError(f"swarm.chunk_bytes = {swarm.chunk_bytes}: at least 1024, or 0 for what fits each version")
    if 0 < swarm.chunk_bytes * MAX_SEGMENT_CHUNKS < swarm.segment_bytes:
        raise UsageError(
            f"swarm.chunk_bytes = {swarm.chunk_bytes} is too small for swarm.segment_bytes = {swarm.segment_bytes}: "
            f"a segment has at most {MAX_SEGMENT_CHUNKS} chunks"
        )
    return config


def _check_plain(key: str, value: Any) -> None:
    """UsageError for a value that TOML has and JSON and msgpack have not: options travel in all three."""
    if isinstance(value, dict):
        for name, inner in value.items():
            _check_plain(f"{key}.{name}", inner)
    elif isinstance(value, list):
        for inner in value:
            _check_plain(key, inner)
    elif isinstance(value, int) and not SEEDS[0] <= value <= SEEDS[1]:
        raise UsageError(f"{key}: a number of more than 64 bits")
    elif not isinstance(value, (bool, int, float, str)):
        raise UsageError(f"{key}: a {type(value).__name__} is not taken here: write it as a string, in quotes")


def _pairs(overrides: Sequence[str]) -> list[tuple[str, str]]:
    pairs = []
    items = list(overrides)
    while items:
        flag = items.pop(0)
        if not flag.startswith("--") or len(flag) < 3:
            raise UsageError(f"unexpected argument {flag!r} (settings are given as --section.key VALUE)")
        key, equals, value = flag[2:].partition("=")
        if not equals:
            if not items:
                raise UsageError(f"--{key} needs a value")
            value = items.pop(0)
        pairs.append((key.replace("-", "_"), value))
    return pairs


def _parse(text: str) -> Any:
    """A flag's value as TOML would read it; text when it is not TOML."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for name in path:
        values = values.setdefault(name, {})
        if not isinstance(values, dict):
            raise UsageError(f"--{key}: {name} is not a section")
    values[last] = value


def dump_toml(values: dict[str, Any]) -> str:
    """Nested dictionaries of plain values as TOML (what a resolved config needs, no more)."""
    lines = [f"{_key(k)} = {_toml(v)}" for k, v in values.items() if not isinstance(v, dict)]
    for name, table in values.items():
        if isinstance(table, dict):
            lines += ["", f"[{_key(name)}]", *(f"{_key(k)} = {_toml(v)}" for k, v in table.items())]
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    bare = name != "" and name.isascii() and all(c.isalnum() or c in "_-" for c in name)
    return name if bare else _text(name)


def _text(value: str) -> str:
    """A basic string: JSON's escapes are TOML's too, but TOML also wants DEL escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    raise TypeError(f"no TOML for {type(value).__name__}")
