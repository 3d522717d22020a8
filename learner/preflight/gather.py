"""Looks at the machine, the model's files and the run's directory before a start. Thin shell: `checks` judges.

It writes nothing, downloads nothing, and nothing that it starts stays. Must not import torch.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from learner.config import LearnerConfig
from learner.model_folder import check_model_folder, find_here, number_in, open_model_folder, read_model_config
from learner.preflight.devices import Devices, ask_torch, computes_on_cpu, host_memory, maybe_gpu, pick
from learner.preflight.facts import Facts, Memory, ModelShape, Room
from learner.rewards.scoring import Scorer
from learner.run_dir import check_idle, existing_run, kept_listen
from learner.section import Finding
from learner.tasks.port import Task
from learner.tasks.prompting import encode_prompt, fit_prompts, unused_options
from learner.tasks.registry import open_task
from learner.tasks.settings import TaskSettings
from p2p.channel.listening import check_free
from p2p.errors import ShoalError, UsageError

PROMPTS = 8
"""Prompts that are tried: enough to see that they can be made and how long they are, and made in an instant."""

RUN_FOLDERS = ("checkpoints", "versions")
"""Folders of a run that hold nearly all of its bytes."""

HEADS = ("lm_head.weight", "embed_out.weight")
"""How the names of output heads end."""

TASK_KEYS = (*(f"task.{name}" for name in TaskSettings.model_fields), "task.reward")
"""Settings that a task is made of."""

Found = TypeVar("Found")


def gather(config: LearnerConfig, wrong: Collection[str] = (), *, resume: bool = False, thorough: bool = True) -> Facts:
    """What there is to know. `wrong` are settings that nothing can be tried with. `thorough`: also what takes seconds: torch's
    devices, the tokenizer, the process that scores."""
    return _Look(config, frozenset(wrong), resume, thorough).facts()


class _Look:
    """One look. What fails is noted, and the rest goes on."""

    def __init__(self, config: LearnerConfig, wrong: frozenset[str], resume: bool, thorough: bool) -> None:
        self.config, self.wrong, self.resume, self.thorough = config, wrong, resume, thorough
        self.run_dir = Path(config.run_dir)
        self.tried: list[Finding] = []
        self.notes: list[str] = []
        self.devices = Devices()

    def facts(self) -> Facts:
        """Everything, in the order in which a person would want to mend it."""
        task = self._attempt(TASK_KEYS, self._task)
        model = self._attempt(("model",), self._model)
        if self.thorough and task is not None:
            self._attempt(TASK_KEYS, partial(self._try_scorer, task))
            if model is not None:
                tokens = self._attempt(("model", *TASK_KEYS), partial(self._prompt_tokens, task))
                model = replace(model, longest_prompt=tokens or 0)
        folder = self._attempt(("run_dir",), self._folder)
        room = None if folder is None else self._attempt(("run_dir",), partial(self._room, folder))
        if folder is not None or not self.resume:  # else another learner may hold this run's own ports
            for text in self._listen():
                self._attempt(("swarm.listen",), partial(check_free, [text]))
            self._attempt(("status.port",), self._status_port)
        gpu = self._attempt(("trainer.device",), self._gpu)
        known = self.thorough or self.config.trainer.device == "cpu" or not maybe_gpu()
        on_cpu = known and computes_on_cpu(self.config.trainer.device, self.devices)
        return Facts(tuple(self.tried), tuple(self.notes), model, room=room, host=host_memory(), gpu=gpu, on_cpu=on_cpu)

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
        task = open_task(self.config.task, own_score=not self.config.task.reward)
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

    def _prompt_tokens(self, task: Task) -> int:
        """Tokens of the longest of some prompts. Loads the tokenizer."""
        folder = find_here(self.config.model)
        model = open_model_folder(str(folder))
        fit_prompts(task, model.tokenizer, model.context)
        for name in unused_options(model.tokenizer, task.chat_format):
            self.notes.append(f"task.template_options.{name} does nothing: the model's chat template does not name it")
        return max(len(encode_prompt(model.tokenizer, task.prompt(i), task.chat_format)) for i in range(PROMPTS))

    def _try_scorer(self, task: Task) -> None:
        with Scorer(task, allow_unconfined=self.config.task.allow_unconfined):
            pass

    def _folder(self) -> Path:
        """run_dir, or the nearest folder above it that exists, in which it can be made."""
        existing_run(self.run_dir, resume=self.resume)
        check_idle(self.run_dir)
        folder = self.run_dir.absolute()
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        if not folder.is_dir():
            raise UsageError(f"cannot make the run directory {self.run_dir}: {folder} is not a directory")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UsageError(f"cannot make the run directory {self.run_dir}: {folder} cannot be written to")
        return folder

    def _room(self, folder: Path) -> Room:
        taken = sum(
            file.stat().st_size
            for name in RUN_FOLDERS if self.resume
            for file in (self.run_dir / name).rglob("*") if file.is_file()
        )  # fmt: skip
        return Room(str(folder), shutil.disk_usage(folder).free, taken)

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

    def _gpu(self) -> Memory | None:
        """The trainer's device; None of the CPU, and where it is not asked for."""
        if self.config.external_trainer or not self.thorough:
            return None
        device = self.config.trainer.device
        self.devices = Devices() if device == "cpu" else ask_torch()
        if self.devices.error:
            self.notes.append(self.devices.error)
        return pick(device, self.devices)


def count_parameters(folder: Path) -> int:
    """Values in a model folder's weights, by the heads of its *.safetensors; 0 where there are none. OSError where one cannot be
    read. Where embedding and output head are tied the head is left out, which some files hold a second time."""
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    try:
        names = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
        if index.exists() and not all((folder / name).exists() for name in names):
            return 0
    except (ValueError, KeyError, AttributeError, TypeError):
        raise UsageError(f"model: {index} cannot be read") from None
    values = read_model_config(folder)
    tied = any(part.get("tie_word_embeddings") for part in (values, values.get("text_config")) if isinstance(part, dict))
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder / name for name in names if (folder / name).exists()):
        try:
            with safe_open(file, framework="numpy") as tensors:
                shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}
        except SafetensorError as error:
            raise UsageError(f"model: {file} cannot be read: {error}") from None
    others = {shape for name, shape in shapes.items() if not name.endswith(HEADS)}
    return sum(math.prod(shape) for name, shape in shapes.items() if not (tied and name.endswith(HEADS) and shape in others))
