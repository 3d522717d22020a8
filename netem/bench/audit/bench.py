"""The bench: makes what is missing of the tokens, judges all that there are. Must not know flags or what is printed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from learner.audit.calibration import NodeArithmetic
from learner.audit.plan import OWN_KIND
from learner.audit.repeats import SeenTokens
from learner.audit.scorer import score
from learner.audit.sequential import FALSE_ALARM
from netem.bench.audit.cheats import cheats
from netem.bench.audit.judging import (
    AMONG,
    HONEST_FIRST,
    KNOWN,
    LATE,
    NOBODY_TRUSTED,
    Sample,
    Test,
    calibrate,
    calibration_tokens,
    detected,
    facts,
    honest_row,
    ways,
)
from netem.bench.audit.making import HONEST, SHORT, TokenGoals, TokenMaker, stream_of
from netem.bench.audit.own_rounding import own_rounding
from netem.bench.audit.store import Column, TokenFiles, claims_of, column_of
from netem.bench.audit.world import BEFORE, EIGHT, MEMBERS, STRANGE_EVERY, World, open_world
from node.engine.environment import KINDS, missing, survey
from node.engine.port import EngineDied
from p2p.errors import ShoalError, UsageError
from p2p.termination import run_terminable

DTYPES = ("float32", "bfloat16")
"""Types that a node of the bench computes in."""

BEGINNING, SHORTLY = 300, (KNOWN, NOBODY_TRUSTED)
"""Tokens of an honest node of which many are judged, and how: bets that were never lost are turned by few tokens, so most false
alarms are to be expected at a node's beginning."""

REPEATS = 20
"""Runs of each cheat, each from another token of what was made."""


@dataclass(frozen=True, slots=True)
class AuditBench:
    """What is to be made and judged."""

    world: str = "tiny"
    engines: tuple[str, ...] = ("transformers/float32", "transformers/bfloat16")
    python: str = ""
    """of vLLM's environment"""
    wanted: TokenGoals = field(default_factory=TokenGoals)
    suspected: int = 40_000
    """tokens of honest nodes and of each mild cheat that are scored under suspects' weights as well"""
    seed: int = 0
    """of prompts and draws"""


def bench_audit(bench: AuditBench, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """What `shoal bench audit --json` prints. Goes on with what is in `folder`. UsageError for an engine that cannot run,
    ShoalError for one that does not start."""
    kinds = [_kind(text) for text in bench.engines]
    for engine in sorted({kind.engine for kind in kinds}):
        if why := missing(engine, survey(bench.python) if engine == "vllm" and bench.python else survey()):
            raise UsageError(f"the {engine} engine cannot run: {why} (vLLM's own environment: --engine-python)")
    torch.set_num_threads(1)
    world = open_world(bench.world, folder, say, bench.seed)
    try:
        run_terminable(TokenMaker(world, world.checker(), bench.wanted, bench.python, say).make, kinds)
    except EngineDied as error:
        raise ShoalError(f"{error}; the same command goes on from here (see {world.folder / 'engine.log'})") from error
    return judge(world, kinds, bench.suspected, say)


def _kind(text: str) -> NodeArithmetic:
    engine, _, dtype = text.partition("/")
    if engine not in KINDS or engine == "fake" or dtype not in DTYPES:
        raise UsageError(f"{text!r} is no engine and type; want transformers or vllm, and float32 or bfloat16: vllm/bfloat16")
    return NodeArithmetic(engine, dtype, "cpu")


def judge(world: World, kinds: Sequence[NodeArithmetic], suspected: int, say: Callable[[str], None]) -> dict[str, Any]:
    """All that was made of these kinds."""
    suspects = tuple(name for name in world.states if name.startswith((BEFORE, EIGHT)))
    models = {name: world.checker(name) for name in suspects}
    honest = {kind: _sample(world, stream_of(world, kind, HONEST), models, suspected) for kind in kinds}
    means = calibrate({kind: _without_later(sample, suspected // 2) for kind, sample in honest.items()})
    own = own_rounding(world)
    say(f"the auditor made {own.tokens(OWN_KIND):,} tokens of {OWN_KIND} itself")
    rows = []
    for kind in kinds:
        judged = honest[kind].part(calibration_tokens(honest[kind]), honest[kind].column.tokens)
        row: dict[str, Any] = {"engine": str(kind), **facts(judged.column)}
        for known, test in ways(means, kind, own=own).items():
            row[known] = honest_row(judged, test)
        scored = honest[kind].part(suspected // 2, suspected)
        row["with suspects"] = {"tokens": scored.column.tokens, **honest_row(scored, ways(means, kind, suspects)[KNOWN])}
        row["other prompts"] = _other_prompts(world, kind)
        row["beginnings"] = {
            way: honest_row(judged, test, BEGINNING) for way, test in ways(means, kind, own=own).items() if way in SHORTLY
        }  # fmt: skip
        row["short answers"] = _short_answers(stream_of(world, kind, SHORT), ways(means, kind, own=own))
        rows.append(row)
        say(f"{kind}: {row['tokens']:,} honest tokens judged")
    found = []
    for kind in kinds:
        for name, cheat in cheats(world.states).items():
            sample = _sample(world, stream_of(world, kind, name), models if cheat.mild else {}, suspected)
            if not sample.column.tokens:
                continue
            row = {"engine": str(kind), "cheat": name, **facts(sample.column)}
            for known, test in ways(means, kind, own=own).items():
                row[known] = detected(sample, test, REPEATS)
            row[LATE] = detected(sample, ways(means, kind, own=own)[NOBODY_TRUSTED], REPEATS, honest[kind].part(0, HONEST_FIRST))
            if cheat.mild:
                for known, test in ways(means, kind, suspects).items():
                    if known in (KNOWN, AMONG):
                        row[f"{known}, with suspects"] = detected(sample, test, REPEATS)
            found.append(row)
        say(f"{kind}: cheats judged")
    return {
        "world": world.name, "seed": world.seed, "false_alarm": FALSE_ALARM, "honest": rows, "cheats": found,
        "honest_tokens": sum(row["tokens"] for row in rows), "own": _shown(own.means[OWN_KIND]),
        "means": {str(k): _shown(m) for k, m in means.items()},
    }  # fmt: skip


def _without_later(sample: Sample, most: int) -> Sample:
    """As if only the first `most` tokens had been read under suspects' weights: the bound on suspects is measured on these, and
    judged on the others."""
    kept = {name: np.where(np.arange(len(values)) < most, values, np.nan) for name, values in sample.suspected.items()}
    return Sample(sample.column, kept)


def _sample(world: World, stream: TokenFiles, models: dict[str, nn.Module], most: int) -> Sample:
    """All tokens, with what the first `most` would be under the suspects' weights: kept beside them, computed where missing."""
    column = stream.read()
    suspected = {}
    for name, model in models.items():
        parts, seen = [], 0
        for path in stream.batches():
            if seen >= most:
                break
            parts.append(_under(world, path, name, model))
            seen += len(parts[-1])
        values = np.full(column.tokens, np.nan, np.float32)
        if parts:
            values[:seen] = np.concatenate(parts)
        suspected[name] = values
    return Sample(column, suspected)


def _under(world: World, path: Path, name: str, model: nn.Module) -> np.ndarray:
    """Log probabilities of a batch's tokens under other weights."""
    kept = path.with_suffix("." + "".join(c if c.isalnum() else "_" for c in name) + ".npy")
    if kept.exists():
        values: np.ndarray = np.load(kept)
        return values
    values = np.concatenate([found.recomputed for found in score(model, claims_of(path, world))]).astype(np.float32)
    np.save(kept, values)
    return values


def _other_prompts(world: World, kind: NodeArithmetic) -> dict[str, Any] | None:
    """Honest tokens of strange prompts, judged by a calibration on the others alone: does it hold for what nobody expected?"""
    if world.name != "tiny":
        return None
    plain, strange, seen = [], [], SeenTokens()
    for path in stream_of(world, kind, HONEST).batches():
        first = int(path.stem.split("-")[0])
        with np.load(path) as file:
            of = np.repeat(first + np.arange(len(file["lengths"])) // MEMBERS, file["lengths"])
        odd, columns = of % STRANGE_EVERY == 1, column_of(path, world, seen)
        plain.append([c[~odd] for c in columns])
        strange.append([c[odd] for c in columns])
    a, b = (Sample(Column(*(np.concatenate(c) for c in zip(*parts, strict=True))), {}) for parts in (plain, strange))
    means = calibrate({kind: a})
    return {"tokens": b.column.tokens, **honest_row(b, ways(means, kind)[KNOWN])}


def _short_answers(stream: TokenFiles, ways: Mapping[str, Callable[[], Test]]) -> dict[str, Any] | None:
    """Many honest nodes of BEGINNING tokens, of answers of which most in a group are alike, as a run judges them that trusts
    nobody and as one does that measured their kind."""
    column = stream.read()
    if not column.tokens:
        return None
    return facts(column) | {way: honest_row(Sample(column, {}), ways[way], BEGINNING) for way in SHORTLY}


def _shown(means: Any) -> dict[str, Any]:
    return {name: getattr(means, name) for name in ("far", "near", "gross", "off", "bias", "noise", "quiet", "level", "toward")}

