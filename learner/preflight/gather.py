"""Looks at the machine, the model's files and the run's directory before a start. Thin shell: `checks` judges.

It writes nothing, downloads nothing, and nothing that it starts stays. Must not import torch.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from learner.config import LearnerConfig, TaskSection
from learner.endpoint.keys import endpoint_key
from learner.endpoint.settings import read_listen
from learner.environments.running import set_environment
from learner.environments.settings import EnvironmentSection
from learner.evaluation.settings import EvalSection, EvalTask
from learner.model_folder import ModelFolder, check_model_folder, find_here, number_in, open_model_folder, read_model_config
from learner.preflight.counting import NotCounted, count_costs
from learner.preflight.devices import Devices, ask_torch, check_last_checkpoint, computes_on_cpu, host_memory, maybe_gpu, pick
from learner.preflight.environments import try_environment
from learner.preflight.facts import PARTS, Facts, Memory, ModelShape, Room
from learner.rewards.group_scorer import PooledScorer
from learner.rollouts.stop_strings import check_stop_strings
from learner.run_dir import check_idle, existing_run, kept_listen
from learner.section import Finding
from learner.tasks.port import Task
from learner.tasks.prompting import encode_prompt, fit_prompts, unused_options
from learner.tasks.registry import open_task
from learner.tasks.settings import TaskSettings
from learner.tracking.settings import check_trackers
from learner.trainer.adapter.peft_form import check_peft, check_same_adapter
from learner.trainer.forecast.facts import ModelCosts
from learner.trainer.optimizers.kinds import check_package
from learner.trainer.settings import CHECKPOINT_FROM, LoraSection
from p2p.channel.libp2p import check_dialable
from p2p.channel.listening import check_free
from p2p.errors import ShoalError, UsageError
from p2p.printable import printable

PROMPTS = 8
"""Prompts that are tried: enough to see that they can be made and how long they are, and made in an instant."""

RUN_FOLDERS = {"checkpoints": "checkpoints", "versions": "versions/chunks"}
"""Part of a run -> its folder in the run's directory: these hold nearly all of its bytes, and may be links to another disk."""

EDGE_BYTES = 1 << 16
"""Bytes at the beginning and at the end of two tensors that are compared: weights that were trained apart differ in any row."""

HEADS = ("lm_head.weight", "embed_out.weight")
"""How the names of output heads end."""

TASK_KEYS = (*(f"task.{name}" for name in TaskSettings.model_fields), "task.reward", "environment.name")
"""Settings that a task is made of."""

LORA_KEYS = tuple(f"trainer.lora.{name}" for name in LoraSection.model_fields)
"""Settings that an adapter follows from."""

ENVIRONMENT_KEYS = tuple(f"environment.{name}" for name in EnvironmentSection.model_fields)
"""Settings that an environment is made with."""

COUNTED_FROM = 10_000_000
"""Parameters from which `--dry-run` counts activations, which takes seconds: below, they are small beside the machine."""

Found = TypeVar("Found")


def gather(config: LearnerConfig, wrong: Collection[str] = (), *, resume: bool = False, thorough: bool = True) -> Facts:
    """What there is to know. `wrong` are settings that nothing can be tried with. `thorough`: also what takes seconds: torch's
    devices, the tokenizer, the processes that score and play."""
    return _Look(config, frozenset(wrong), resume, thorough).facts()


class _Look:
    """One look. What fails is noted, and the rest goes on."""

    def __init__(self, config: LearnerConfig, wrong: frozenset[str], resume: bool, thorough: bool) -> None:
        self.config, self.wrong, self.resume, self.thorough = config, wrong, resume, thorough
        self.run_dir = Path(config.run_dir)
        self.tried: list[Finding] = []
        self.notes: list[str] = []
        self.devices = Devices()
        self.opened: ModelFolder | None = None
        """the model's tokenizer, once it was loaded"""
        self.tools: dict[str, tuple[dict[str, Any], ...]] = {}
        """of the environments that were tried"""

    def facts(self) -> Facts:
        """Everything, in the order in which a person would want to mend it."""
        task = self._attempt(TASK_KEYS, self._task)
        model = self._attempt(("model",), self._model)
        if self.thorough and task is not None:
            if task.environment is None:
                keys = (*TASK_KEYS, "task.allow_unconfined")
                self._attempt(keys, partial(self._try_scorer, task, self.config.task))
            else:
                self._attempt((*TASK_KEYS, *ENVIRONMENT_KEYS), partial(self._try_environment, task))
            if model is not None:
                tokens = self._attempt(("model", *TASK_KEYS), partial(self._prompt_tokens, task))
                model = replace(model, longest_prompt=tokens or 0)
            for section in self.config.eval:
                self._attempt(("eval",), partial(self._evaluation, section, task))
        folder = self._attempt(("run_dir",), self._folder)
        rooms = None if folder is None else self._attempt(("run_dir",), partial(self._rooms, folder))
        if folder is not None or not self.resume:  # else another learner may hold this run's own ports
            listen = self._listen()
            for text in listen:
                self._attempt(("swarm.listen",), partial(check_free, [text]))
            self._attempt(("status.port",), self._status_port)
            self._attempt(("status.port", "swarm.listen"), partial(check_apart, listen, self.config.status.port))
            self._attempt(("endpoint.listen",), self._endpoint)
        self._attempt(LORA_KEYS, self._adapter)
        self._attempt(("tracking",), partial(check_trackers, self.config.tracking))
        self._attempt(("swarm.announce",), partial(check_dialable, self.config.swarm.announce))
        self._attempt(("local_engine.engine_python", "local_engine.engine"), self._engine_python)
        self._attempt(("trainer.optimizer",), self._optimizer)
        if self.resume and not self.config.external_trainer:
            self._attempt(("trainer.devices",), partial(check_last_checkpoint, self.run_dir, self.config.trainer.devices))
        gpu = self._attempt(("trainer.device", "trainer.devices"), self._gpu)
        known = self.thorough or self.config.trainer.device == "cpu" or not maybe_gpu()
        on_cpu = known and computes_on_cpu(self.config.trainer.device, self.devices)
        costs = None
        if model is not None and not any(finding.keys == LORA_KEYS for finding in self.tried):
            costs = self._attempt(LORA_KEYS, partial(self._costs, model, gpu=not on_cpu))
        return Facts(
            tuple(self.tried), tuple(self.notes), model, rooms=rooms or (), host=host_memory(), gpu=gpu, on_cpu=on_cpu,
            costs=costs,
        )  # fmt: skip

    def _attempt(self, keys: tuple[str, ...], look: Callable[[], Found]) -> Found | None:
        """What `look` finds; None where it fails, or where `keys` of it are known to be wrong."""
        if self.wrong.intersection(keys):
            return None
        try:
            return look()
        except ShoalError as error:
            problems = error.problems if isinstance(error, UsageError) else (str(error),)
            self.tried += [Finding(problem, keys) for problem in problems]
        except OSError as error:
            self.tried.append(Finding(f"{keys[0]}: {error}", keys))
        return None

    def _task(self) -> Task:
        task = open_task(self.config.task, own_score=self.config.own_score)
        set_environment(task, self.config.environment)
        if task.environment is not None and self.config.task.reward and not self.config.environment.name:
            raise UsageError("task.reward: an environment rewards its episodes itself; leave the reward functions out")
        if task.held_out_count == 0 and self.config.trainer.eval_size:
            self.notes.append("task.held_out: no row is held out, so nothing is evaluated: raise it, or give more rows")
        return task

    def _model(self) -> ModelShape | None:
        name, external = self.config.model, self.config.external_trainer
        folder = find_here(name)
        if folder is None:
            from huggingface_hub.constants import HF_HUB_OFFLINE

            if HF_HUB_OFFLINE:
                raise UsageError(
                    f"model: {name} is no folder here and not in the hub's cache, and HF_HUB_OFFLINE forbids to ask the hub"
                )
            self.notes.append(
                f"model: {name} is no folder here and not in the hub's cache: it would be downloaded from the hub, and nothing "
                "of it was checked"
            )
            return None
        cached = not Path(name).is_dir()
        try:
            vocabulary = check_model_folder(folder)
        except UsageError:
            if not cached:
                raise
            self.notes.append(f"model: {name} is not whole in the hub's cache: the rest would be downloaded")
            return None
        parameters = count_parameters(folder)
        if not parameters and not external:
            if not cached:
                raise UsageError(f"model: {folder} has no *.safetensors: the trainer needs the weights")
            self.notes.append(f"model: the weights of {name} are not in the hub's cache: they would be downloaded")
        values = read_model_config(folder)
        context = number_in(values, "max_position_embeddings") or 0
        return ModelShape(parameters, vocabulary, context, more_parts=isinstance(values.get("text_config"), dict))

    def _costs(self, model: ModelShape, *, gpu: bool) -> ModelCosts | None:
        """Counted where a look may take seconds, and for a model whose start takes longer anyway."""
        trainer, folder = self.config.trainer, find_here(self.config.model)
        if self.config.external_trainer or folder is None or not model.parameters or model.more_parts:
            return None
        if model.parameters < (COUNTED_FROM if self.thorough else CHECKPOINT_FROM):
            return None
        try:
            return count_costs(folder, trainer, gpu=gpu)
        except NotCounted as error:
            self.notes.append(f"memory: what activations take is not known: {error}")
            return None

    def _prompt_tokens(self, task: Task) -> int:
        """Tokens of the longest of some prompts. Loads the tokenizer."""
        folder = find_here(self.config.model)
        model = self.opened = open_model_folder(str(folder))
        check_stop_strings(model.tokenizer, task.stop)
        fit_prompts(task, model.tokenizer, model.context)
        for name in unused_options(model.tokenizer, task.chat_format):
            self.notes.append(f"task.template_options.{name} does nothing: the model's chat template does not name it")
        return max(len(encode_prompt(model.tokenizer, task.prompt(i), task.chat_format)) for i in range(PROMPTS))

    def _evaluation(self, section: EvalSection, of: Task) -> None:
        """Its problems can be had, and scored."""
        settings = section.task
        try:
            if settings is not None:
                of = open_task(settings, own_score=not (settings.reward or section.environment))
                if section.environment:
                    set_environment(of, self.config.environment)
                if of.environment is None:
                    self._try_scorer(of, settings)
                elif settings.reward:
                    raise UsageError("an environment rewards its episodes itself; leave the reward functions out")
                elif not self.wrong.intersection(ENVIRONMENT_KEYS):
                    self._try_environment(of)
                if self.opened is not None:
                    check_stop_strings(self.opened.tokenizer, of.stop)
                    fit_prompts(of, self.opened.tokenizer, self.opened.context)
            prompt = of.held_out(0) if section.held_out else of.prompt(0)
            if self.opened is not None:
                encode_prompt(self.opened.tokenizer, prompt, of.chat_format)
        except UsageError as error:
            raise UsageError(*(f"eval {section.name}: {problem}" for problem in error.problems)) from None

    def _try_scorer(self, task: Task, settings: TaskSection | EvalTask) -> None:
        with PooledScorer(task, settings, allow_unconfined=settings.allow_unconfined):
            pass

    def _try_environment(self, task: Task) -> None:
        """Each environment once: it is the same for all who play in it. The task's prompts name its tools from here on."""
        source = task.environment
        assert source is not None
        key = f"{source.name} {dict(source.options)!r}"
        if key not in self.tools:
            self.tools[key] = ()  # one that fails is told of once
            ready = try_environment(source, self.config.environment)
            odd = list(ready.warnings)
            if ready.missing:
                odd.append(f"it runs in a sandbox without {', '.join(ready.missing)}: not to be had on this system")
            self.notes += [f"environment {source.name}: {printable(line)}" for line in odd]
            self.tools[key] = tuple(ready.tools)
        task.chat_format = replace(task.chat_format, tools=self.tools[key] or task.chat_format.tools)

    def _adapter(self) -> None:
        check_peft(self.config.trainer.lora)
        if self.resume:
            check_same_adapter(self.run_dir, self.config.trainer.lora)

    def _optimizer(self) -> None:
        check_package("adamw" if self.config.external_trainer else self.config.trainer.optimizer)

    def _folder(self) -> Path:
        """run_dir, or the nearest folder above it that exists, in which it can be made."""
        existing_run(self.run_dir, resume=self.resume)
        check_idle(self.run_dir)
        folder = nearest_folder(self.run_dir.absolute())
        if not folder.is_dir():
            raise UsageError(f"cannot make the run directory {self.run_dir}: {folder} is not a directory")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UsageError(f"cannot make the run directory {self.run_dir}: {folder} cannot be written to")
        return folder

    def _rooms(self, folder: Path) -> tuple[Room, ...]:
        """The run's disks. `folder` is on run_dir's."""
        rooms = {folder.stat().st_dev: Room(str(folder), shutil.disk_usage(folder).free, parts=("journal",))}
        for part, name in RUN_FOLDERS.items():
            there = (self.run_dir / name).resolve()  # a link is followed, also one that leads nowhere
            near = nearest_folder(there)
            for link in (self.run_dir / part, self.run_dir / name):
                if link.is_symlink() and not link.is_dir():
                    raise UsageError(f"run_dir: {link} is a link to {link.resolve()}, which is no folder: make it")
            if not os.access(near, os.W_OK | os.X_OK):
                raise UsageError(f"run_dir: {name} would be written in {near}, which cannot be written to")
            taken = sum(f.stat().st_size for f in there.rglob("*") if f.is_file()) if self.resume else 0
            device = near.stat().st_dev
            room = rooms.get(device) or Room(str(near), shutil.disk_usage(near).free, parts=())
            rooms[device] = replace(room, taken=room.taken + taken, parts=(*room.parts, part))
        return tuple(replace(room, parts=tuple(part for part in PARTS if part in room.parts)) for room in rooms.values())

    def _engine_python(self) -> None:
        engine = self.config.local_engine
        if engine.engine and engine.engine_python and shutil.which(engine.engine_python) is None:
            raise UsageError(f"local_engine.engine_python: there is no program {engine.engine_python} that can be run here")

    def _listen(self) -> list[str]:
        kept = self._attempt(("run_dir",), partial(kept_listen, self.run_dir)) if self.resume else None
        return kept or list(self.config.swarm.listen)

    def _status_port(self) -> None:
        port = self.config.status.port
        if port:
            try:
                check_free([f"/ip4/127.0.0.1/tcp/{port}"])
            except UsageError as error:
                raise UsageError(f"status port {port} cannot be used: {error}") from None

    def _endpoint(self) -> None:
        if not self.config.endpoint.listen:
            return
        host, port = read_listen(self.config.endpoint.listen)
        try:
            check_free([f"/ip{6 if ':' in host else 4}/{host}/tcp/{port}"])
        except UsageError as error:
            raise UsageError(f"endpoint.listen = {self.config.endpoint.listen!r}: {error}") from None
        if self.config.endpoint.key_env:
            endpoint_key(self.run_dir, self.config.endpoint.key_env)

    def _gpu(self) -> Memory | None:
        """The trainer's device; None of the CPU, and where it is not asked for."""
        if self.config.external_trainer or not self.thorough:
            return None
        device = self.config.trainer.device
        self.devices = Devices() if device == "cpu" else ask_torch()
        if self.devices.error:
            self.notes.append(self.devices.error)
        return pick(device, self.devices, self.config.trainer.devices)


def nearest_folder(path: Path) -> Path:
    """`path`, or what is nearest above it and exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def check_apart(listen: Sequence[str], port: int) -> None:
    """UsageError when two addresses to listen on are the same, or one of them takes the status page's port, which is on the
    loopback. Each alone may be free."""
    fixed = [text for text in listen if not text.endswith("/tcp/0")]
    for text in fixed:
        if fixed.count(text) > 1:
            raise UsageError(f"swarm.listen: {text} is there twice")
    for host in ("0.0.0.0", "127.0.0.1"):
        if port and f"/ip4/{host}/tcp/{port}" in fixed:
            raise UsageError(f"status.port = {port} is also a port of swarm.listen (/ip4/{host}/tcp/{port}): choose another")


def count_parameters(folder: Path) -> int:
    """Values in a model folder's weights, by the heads of its *.safetensors; 0 where there are none. OSError where one cannot be
    read. Where embedding and output head are tied the head is left out, which some files hold a second time. Where config.json
    does not say whether they are, which is then the architecture's default, they are if their values are the same."""
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    try:
        names = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
        if index.exists() and not all((folder / name).exists() for name in names):
            return 0
    except (ValueError, KeyError, AttributeError, TypeError):
        raise UsageError(f"model: {index} cannot be read") from None
    values = read_model_config(folder)
    parts = [part for part in (values, values.get("text_config")) if isinstance(part, dict)]
    said = [part["tie_word_embeddings"] for part in parts if "tie_word_embeddings" in part]
    shapes: dict[str, tuple[int, ...]] = {}
    where: dict[str, Path] = {}
    for file in sorted(folder / name for name in names if (folder / name).exists()):
        try:
            with safe_open(file, framework="numpy") as tensors:
                shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}
                where |= dict.fromkeys(tensors.keys(), file)
        except SafetensorError as error:
            raise UsageError(f"model: {file} cannot be read: {error}") from None

    def is_second(name: str) -> bool:
        """Whether it is a head that is tied to an embedding of the same shape."""
        if not name.endswith(HEADS):
            return False
        alike = [other for other, shape in shapes.items() if shape == shapes[name] and not other.endswith(HEADS)]
        if said:
            return any(said) and bool(alike)
        return any(_edges(where[other], other) == _edges(where[name], name) for other in alike)

    return sum(math.prod(shape) for name, shape in shapes.items() if not is_second(name))


def _edges(file: Path, name: str) -> bytes:
    """The first and last bytes of a tensor in a *.safetensors, whatever its type."""
    with open(file, "rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        start, stop = json.loads(stream.read(size))[name]["data_offsets"]
        parts = []
        for offset in (start, max(start, stop - EDGE_BYTES)):
            stream.seek(8 + size + offset)
            parts.append(stream.read(min(EDGE_BYTES, stop - offset)))
    return b"".join(parts)
