"""The bench: a small model in training, nodes that are honest in several arithmetics, and cheats. All in one process.

Must not know flags or what is printed.
"""

from __future__ import annotations

import copy
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from learner.audit.calibration import NodeArithmetic, measure, widest
from learner.audit.scorer import Scored, score
from learner.audit.sequential import FALSE_ALARM, HonestMeans, NodeTest
from learner.tasks.prompting import encode_prompt
from learner.trainer.model import load_model
from learner.trainer.policy import PolicyTrainer
from learner.trainer.settings import TrainerConfig
from netem.bench.audit.cheats import cheats
from netem.bench.audit.engines import FastNode, MakesClaims, Prompt, TransformersNode, served
from netem.bench.staleness.cases import TASKS, Case
from netem.bench.staleness.loop import study_task, warm_model
from netem.bench.staleness.rollouts import RolloutSource
from netem.bench.staleness.sampler import Sampler

TASK = "reverse"
VERSIONS = 11
"""Versions that are trained, from the start's on: the last one is what honest nodes serve."""

BATCH = 512
"""Completions that are made and checked together."""

MOST_TOKENS = 200_000
"""Tokens after which a cheat that was not caught counts as not found."""

LOOK_TOKENS = 16
"""Tokens between two looks at a node."""

NODE_TOKENS = 1_000_000
"""Tokens of one honest node in a run: the promise is made for so many."""


class World(NamedTuple):
    """The models of the bench, and its prompts."""

    versions: list[nn.Module]
    """as served, the oldest first"""
    other: nn.Module
    """another start's"""
    prompt: Callable[[int], Prompt]
    most: int
    eos: int


def make_world(folder: Path, say: Callable[[str], None]) -> World:
    """Train a few versions on policy, as the study of staleness does."""
    case = Case(objective="grpo", staleness=0, seed=0, task=TASK)
    path = warm_model(folder, TASK, 0)
    loaded = load_model(path, "cpu")
    trainer = PolicyTrainer(loaded.model, TrainerConfig(model=str(path), checkpoint_dir="", **case.trainer_settings()))
    sampler, task = Sampler(loaded.model), study_task(TASK, 0)
    rollouts = RolloutSource(case, task, loaded.tokenizer, sampler)
    versions = [served(loaded.model)]
    for step in range(VERSIONS):
        trainer.accumulate(rollouts.batch(step).groups, step)
        trainer.step(step)
        sampler.load(loaded.model)
        versions.append(served(loaded.model))
    say(f"trained {VERSIONS} versions")
    other = served(load_model(warm_model(folder, TASK, 1), "cpu").model)

    def prompt(index: int) -> Prompt:
        return tuple(encode_prompt(loaded.tokenizer, task.prompt(index)))

    return World(versions, other, prompt, TASKS[TASK]["most"], int(loaded.tokenizer.eos_token_id))


def run(tokens: int, repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    """`tokens` of each honest kind, half of them for its calibration; `repeats` runs of each cheat."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        world = make_world(Path(folder), say)
    checker = world.versions[-1]
    kinds: dict[NodeArithmetic, MakesClaims] = {
        NodeArithmetic("ours", "float32", "cpu"): FastNode(Sampler(checker), world.most),
        NodeArithmetic("transformers", "float32", "cpu"): TransformersNode(checker, torch.float32, world.most, world.eos, 64),
        NodeArithmetic("transformers", "bfloat16", "cpu"): TransformersNode(checker, torch.bfloat16, world.most, world.eos, 128),
    }
    honest, means = [], dict[NodeArithmetic, HonestMeans]()
    for k, (kind, node) in enumerate(kinds.items()):
        found = _joined(_stream(world, node, checker, first=k * 10_000_000, tokens=tokens))
        half = len(found.distance) // 2
        means[kind] = measure(*(column[:half] for column in found))
        honest_row = _honest_row(kind, Scored(*(column[half:] for column in found)), means[kind])
        honest.append(honest_row)
        say(f"{kind}: {honest_row['tokens']} honest tokens, caught {honest_row['caught']} of {honest_row['nodes']}")
    rows = []
    for name, node in cheats(checker, world.versions[-2], world.versions[0], world.other, world.most).items():
        row: dict[str, Any] = {"cheat": name}
        for column, against in (("float32", means[NodeArithmetic("ours", "float32", "cpu")]), ("any engine", widest(means))):
            row |= {f"{column} {what}": value for what, value in _detect(world, node, checker, against, repeats).items()}
        rows.append(row)
        say(f"{name}: after {row['float32 median']} tokens; {row['any engine median']} where any engine is allowed")
    return {
        "false_alarm": FALSE_ALARM, "honest": honest, "cheats": rows, "cost": _cost(world, checker),
        "means": {str(kind): _rounded(m) for kind, m in means.items()},
    }  # fmt: skip


def _stream(world: World, node: MakesClaims, checker: nn.Module, *, first: int, tokens: int) -> Iterable[Scored]:
    """What checking finds in a node's completions, at least so many tokens of them."""
    seen, index = 0, first
    while seen < tokens:
        prompts = [world.prompt(index + i) for i in range(BATCH)]
        claims = node(prompts, [7919 * (index + i) + 11 for i in range(BATCH)])
        found = _joined(score(checker, claims))
        yield found
        seen, index = seen + len(found.distance), index + BATCH


def _joined(parts: Iterable[Scored]) -> Scored:
    return Scored(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _honest_row(kind: NodeArithmetic, found: Scored, means: HonestMeans) -> dict[str, Any]:
    """The tokens as those of nodes of NODE_TOKENS each, looked at as they come."""
    nodes = caught = 0
    most = -np.inf
    for first in range(0, len(found.distance), NODE_TOKENS):
        test, nodes = NodeTest(means), nodes + 1
        for at in range(first, min(first + NODE_TOKENS, len(found.distance)), LOOK_TOKENS):
            test.look(*(column[at : at + LOOK_TOKENS] for column in found))
            most = max(most, test.log_evidence)
        caught += test.verdict().caught
    exact = float((found.distance == 0).mean())
    return {
        "engine": str(kind), "tokens": len(found.distance), "nodes": nodes, "caught": caught, "exact": round(exact, 5),
        "far": float((found.distance > 0.05).mean()), "near": float((found.distance > 0.005).mean()),
        "most_evidence": round(float(np.exp(min(most, 50.0))), 3),
    }  # fmt: skip


def _detect(world: World, node: MakesClaims, checker: nn.Module, means: HonestMeans, repeats: int) -> dict[str, Any]:
    """Tokens until it is caught: median and 90th percentile over repeats; None where it is not within MOST_TOKENS."""
    found: list[int | None] = []
    why = ""
    for repeat in range(repeats):
        test = NodeTest(means)
        for part in _stream(world, node, checker, first=100_000_000 + 1_000_000 * repeat, tokens=MOST_TOKENS):
            for at in range(0, len(part.distance), LOOK_TOKENS):
                test.look(*(column[at : at + LOOK_TOKENS] for column in part))
                if test.caught_at:
                    break
            if test.caught_at:
                break
        found.append(test.caught_at or None)
        why = test.verdict().why or why
        if test.caught_at == 0:
            break  # one that lasts as long as that says it for all
    return {"median": _percentile(found, 0.5), "p90": _percentile(found, 0.9), "why": why}


def _percentile(found: Sequence[int | None], share: float) -> int | None:
    """The least number of tokens that suffices for this share of the runs; None when it was not found in so many."""
    ranked = sorted(n for n in found if n is not None)
    at = max(0, math.ceil(share * len(found)) - 1)
    return ranked[at] if at < len(ranked) else None


def _cost(world: World, checker: nn.Module) -> dict[str, float]:
    """CPU seconds of checking against those of generating the same tokens with transformers, in batches of one size."""
    node = TransformersNode(checker, torch.float32, world.most, world.eos, BATCH)
    prompts = [world.prompt(i) for i in range(BATCH)]
    made = copy.copy(node)(prompts, list(range(BATCH)))
    began = time.process_time()
    node(prompts, list(range(BATCH)))
    generated, began = time.process_time() - began, time.process_time()
    score(checker, made)
    checked = time.process_time() - began
    return {"generate_s": round(generated, 4), "check_s": round(checked, 4), "ratio": round(checked / generated, 4)}


def _rounded(means: HonestMeans) -> dict[str, float]:
    return {
        "far": round(means.far, 6), "near": round(means.near, 6), "off": round(means.off, 6), "bias": round(means.bias, 6)
    }  # fmt: skip
