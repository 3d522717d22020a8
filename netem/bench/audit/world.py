"""The models of the bench, made once in a folder: versions of one model in training, what cheats serve in their place, prompts.

Must not know nodes, claims or checks.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from torch import nn

from learner.tasks.port import Task
from learner.tasks.prompting import encode_prompt
from learner.trainer.model import load_model
from learner.trainer.policy import PolicyTrainer
from learner.trainer.settings import TrainerConfig
from netem.bench.staleness.cases import Case
from netem.bench.staleness.loop import study_task, warm_model
from netem.bench.staleness.rollouts import RolloutSource
from netem.bench.staleness.sampler import Sampler
from netem.demo.tiny_model import ALPHABET
from node.engine.flat_model import MappedState, fill_new, state_tensors, write_state
from node.engine.port import StateFile
from p2p.layout import Layout
from p2p.version import Version

NOW, OTHER, EIGHT, FOUR = "now", "another model", "8-bit weights", "4-bit weights"
"""States: what honest nodes serve, another start's, and the first one's matrices in fewer bits."""

BEFORE, LONG_AGO = "weights of one version ago", "weights of ten versions ago"
"""States of the small model: those versions before NOW."""

TINY_VERSIONS = 11
"""Versions of the small model that are trained, on policy, at the study's learning rate."""

CHAT_STEPS, CHAT_GROUPS, CHAT_SAMPLES, CHAT_LR = 3, 4, 8, 1e-5
"""Training of the chat model before NOW: its last step gives the direction of the versions before."""

CHAT_RATES = (1e-6, 1e-5, 5e-5)
"""Learning rates of the chat model's last step: a version before NOW for each."""

EXAMPLES, EXAMPLE_EVERY = 12, 32
"""Solved problems that stand in front of the small model's prompt in one group of so many: a prefix longer than a block of an
engine's cache, shared by all such groups."""

STRANGE_EVERY, STRANGE_LENGTH = 4, 12
"""One group in so many of the small model asks what it never saw, so many random characters: its answers have 1.5 to 2.4 nats a
token, where those of its task have 0.1 to 0.8."""

TINY_MOST, CHAT_MOST = 48, 32
"""Most tokens of an answer. The small model is not stopped at its end of text, which comes after 7 where it knows the task: long
answers cost an engine less a token than many short ones. The chat model's are longer than the demo's, and do stop."""

MEMBERS = 8
"""Sequences of a group: they share its prompt, which an engine reads once."""

SEED_APART = 10_000_000_000
"""Groups from one seed's to the next one's: of another seed all prompts and draws are others."""

MOST_SEED = 10_000
"""With more a sequence's seed would be no uint64."""

CONTEXT = 256
"""Tokens of the longest prompt with its answer, at most."""

Ids = tuple[int, ...]


class World(NamedTuple):
    """What there is to serve, to ask and to check with."""

    name: str
    folder: Path
    layout: Layout
    prompt_of: Callable[[int], Ids]
    """of a group, by its number among those of all seeds"""
    most: int
    """tokens of an answer"""
    stop: Ids
    """tokens that end an answer"""
    context: int
    """most tokens of a prompt with its answer"""
    end: Ids = ()
    """tokens that end an answer in a run, where the bench goes on behind them"""
    seed: int = 0
    """of prompts and draws; the models are the same for all"""

    def prompt(self, index: int) -> Ids:
        """Of a group, by its number."""
        return self.prompt_of(index + self.seed * SEED_APART)

    def seed_of(self, index: int, member: int, shop: int = 0) -> int:
        """Of a sequence of this group; `shop`: of the so-manieth try of a node that looks for a better one."""
        return ((index + self.seed * SEED_APART) * MEMBERS + member) * 7919 + 11 + 1_000_003 * 7919 * shop

    @property
    def tokens(self) -> Path:
        """Where what nodes make is kept."""
        return self.folder / (f"tokens-{self.seed}" if self.seed else "tokens")

    @property
    def model_dir(self) -> Path:
        """Configuration and tokenizer."""
        return self.folder / "model"

    @property
    def states(self) -> list[str]:
        """Names of what there is to serve."""
        return sorted(path.stem for path in self.folder.glob("*.state"))

    def state(self, name: str, step: int) -> StateFile:
        """To be served as version `step`."""
        return StateFile(self.folder / f"{name}.state", self.layout, Version(0, step))

    def checker(self, name: str = NOW, dtype: torch.dtype = torch.float32) -> nn.Module:
        """A model with the weights of a state, to compute in `dtype`."""
        from transformers import AutoConfig, AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self.model_dir), dtype=dtype).eval()
        fill_new(state_tensors(model), MappedState(self.state(name, 0)))
        return model


def open_world(name: str, folder: Path, say: Callable[[str], None], seed: int = 0) -> World:
    """The world "tiny" or "chat" in `folder`, made there unless it is there already."""
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    task = study_task("chat" if name == "chat" else "reverse", 0)
    if not (place / "layout.json").exists():
        layout = (_make_chat if name == "chat" else _make_tiny)(place, task, say)
        (place / "layout.json").write_text(json.dumps(layout.to_wire()))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    chat, end = name == "chat", (int(tokenizer.eos_token_id),)
    return World(
        name, place, Layout.from_wire(json.loads((place / "layout.json").read_text())),
        prompt_of=_prompts(task, tokenizer, examples=not chat), most=CHAT_MOST if chat else TINY_MOST,
        stop=end if chat else (), context=CONTEXT, end=() if chat else end,
        seed=seed,
    )  # fmt: skip


def _prompts(task: Task, tokenizer: Any, *, examples: bool) -> Callable[[int], Ids]:
    solved: Ids = ()
    if examples:
        for i in range(EXAMPLES):
            example = task.prompt(1_000_000_000 + i)
            solved += (*encode_prompt(tokenizer, example), *tokenizer.encode(str(example.entry), add_special_tokens=False))

    def prompt(index: int) -> Ids:
        if examples and index % STRANGE_EVERY == 1:
            text = "".join(Random(index).choices(ALPHABET[:36], k=STRANGE_LENGTH)) + ">"
            return tuple(tokenizer.encode(text, add_special_tokens=False))
        ids = tuple(encode_prompt(tokenizer, task.prompt(index)))
        return solved + ids if examples and index % EXAMPLE_EVERY == 0 else ids

    return prompt


def served(model: nn.Module) -> nn.Module:
    """A copy with weights as nodes get them: rounded to bfloat16, kept in float32."""
    made = copy.deepcopy(model).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(parameter.to(torch.bfloat16).float())
    return made


def rounded_weights(model: nn.Module, bits: int) -> nn.Module:
    """A copy with each row of each matrix of the layers rounded to so many bits (symmetric, by its largest value). The embeddings
    are left as they are, as quantisers leave them."""
    made, levels = copy.deepcopy(model), 2 ** (bits - 1) - 1
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.dim() == 2 and "layers." in name:
                scale = parameter.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / levels
                parameter.copy_((parameter / scale).round() * scale)
    return made


def _write(place: Path, models: dict[str, nn.Module]) -> Layout:
    """As float32, so that rounded weights are what they are; one layout for all."""
    layout = None
    for name, model in models.items():
        layout = write_state(model, place / f"{name}.state", "float32")
    assert layout is not None
    return layout


def _save_folder(loaded: Any, place: Path) -> None:
    loaded.model.config.save_pretrained(place / "model")
    loaded.tokenizer.save_pretrained(place / "model")


def _make_tiny(place: Path, task: Task, say: Callable[[str], None]) -> Layout:
    """A few versions on policy, as the study of staleness trains them."""
    case = Case(objective="grpo", staleness=0, seed=0, task="reverse")
    path = warm_model(place / "starts", "reverse", 0)
    loaded = load_model(path, "cpu")
    trainer = PolicyTrainer(loaded.model, TrainerConfig(model=str(path), checkpoint_dir="", **case.trainer_settings()))
    sampler = Sampler(loaded.model)
    rollouts = RolloutSource(case, task, loaded.tokenizer, sampler)
    versions = [served(loaded.model)]
    for step in range(TINY_VERSIONS):
        trainer.accumulate(rollouts.batch(step).groups, step)
        trainer.step(step)
        sampler.load(loaded.model)
        versions.append(served(loaded.model))
    say(f"trained {TINY_VERSIONS} versions")
    now = versions[-1]
    other = served(load_model(warm_model(place / "starts", "reverse", 1), "cpu").model)
    _save_folder(loaded, place)
    return _write(place, {
        NOW: now, BEFORE: versions[-2], LONG_AGO: versions[-11], OTHER: other, EIGHT: rounded_weights(now, 8),
        FOUR: rounded_weights(now, 4),
    })  # fmt: skip


def _make_chat(place: Path, task: Task, say: Callable[[str], None]) -> Layout:
    """Some steps of the real chat model. The versions before NOW are one step back along the last step's own direction, at each
    of CHAT_RATES: what the step would have been at that rate."""
    case = Case(
        objective="grpo", staleness=0, seed=0, task="chat", groups=CHAT_GROUPS, samples=CHAT_SAMPLES, lr=CHAT_LR, steps=CHAT_STEPS
    )
    path = warm_model(place / "starts", "chat", 0)
    loaded = load_model(path, "cpu")
    trainer = PolicyTrainer(loaded.model, TrainerConfig(model=str(path), checkpoint_dir="", **case.trainer_settings()))
    sampler = Sampler(loaded.model)
    rollouts = RolloutSource(case, task, loaded.tokenizer, sampler)
    for step in range(CHAT_STEPS):
        before = copy.deepcopy(loaded.model) if step + 1 == CHAT_STEPS else None
        trainer.accumulate(rollouts.batch(step).groups, step)
        trainer.step(step)
        sampler.load(loaded.model)
        say(f"trained step {step + 1} of {CHAT_STEPS} of the chat model")
    assert before is not None
    del trainer, sampler, rollouts
    _save_folder(loaded, place)
    now = served(loaded.model)
    layout = _write(place, {NOW: now})
    for bits, name in ((8, EIGHT), (4, FOUR)):
        _write(place, {name: rounded_weights(now, bits)})
    for rate in CHAT_RATES:
        _write(place, {f"{BEFORE} (lr {rate:g})": served(_back(loaded.model, before, rate / CHAT_LR))})
    _write(place, {f"{LONG_AGO} (lr 1e-06)": served(_back(loaded.model, before, 10 * 1e-6 / CHAT_LR))})
    return layout


def _back(model: nn.Module, before: nn.Module, times: float) -> nn.Module:
    """The model so many of its last steps back."""
    made = copy.deepcopy(model)
    with torch.no_grad():
        for parameter, old in zip(made.parameters(), before.parameters(), strict=True):
            parameter.add_(old - parameter, alpha=times)
    return made
