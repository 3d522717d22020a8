"""The trainer alone: `shoal bench trainer`. What a step takes against what was forecast; tokens a second against an older tree.

Thin shell: each measurement is a process of its own, which begins with nothing.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from learner.trainer.forecast.count import count_model
from learner.trainer.forecast.forecast import TrainingPlan, forecast, kept_layers
from learner.trainer.forecast.sizes import SHAPES, shape_config
from netem.bench.trainer.saved import compare_saved, describe_saved
from p2p.errors import ShoalError, UsageError
from p2p.processes import child_environment, python_command
from p2p.quantities import human_bytes

START = {"epoch": 0, "step": 0, "checkpoint": "", "segment_bytes": 8 << 20, "anchor_every": 20, "squash_every": 5}
"""What a head would say to a trainer of a new run."""

STATES = 2
"""Published states of two steps: a third, the base of cumulative deltas, comes later in a run."""

COMPILED_AFTER = 10
"""Steps before what is measured in bfloat16: each size of a forward is compiled when it first occurs, and that stays."""

LONG_ROW_PACK = 4096
"""Tokens of a forward beside which a long row goes alone."""

WITHIN = 0.1
"""Share by which a forecast may be off."""

SAME_NORM = {"float32": 1e-3, "bfloat16": 0.05}
"""Share by which gradient norms of the same groups may differ, by what this tree computes in: eight bits of mantissa round each
product by up to 0.4 %."""

NEW_SETTINGS = ("activation_checkpointing", "compute_dtype")
"""Trainer settings that the older tree does not know."""


@dataclass(frozen=True, slots=True)
class MemoryCase:
    """A model, and the tokens of its forwards."""

    shape: str
    tokens: int

    @classmethod
    def read(cls, text: str) -> MemoryCase:
        """SHAPE:TOKENS."""
        shape, _, tokens = text.partition(":")
        if shape not in SHAPES or not tokens.isdigit():
            raise UsageError(f"{text!r} is not SHAPE:TOKENS with a shape of {', '.join(SHAPES)}")
        return cls(shape, int(tokens))


@dataclass(frozen=True, slots=True)
class TrainerBench:
    """What is measured."""

    memory: tuple[str, ...]
    """SHAPE:TOKENS each"""
    saved: str
    before: Path | None
    """an older tree; None: speed is not compared"""
    speed: tuple[str, ...]
    pairs: int
    groups: int
    prompt: float
    completion: float
    threads: int
    compute_dtype: str = "auto"
    """of this tree, in steps and where speed is compared; the older one computes in float32"""
    rows: tuple[str, ...] = ()
    """SHAPE:TOKENS each: models, and the tokens of a row that is far longer than a forward"""


def bench_trainer(bench: TrainerBench, folder: Path | None, say: Callable[[str], None]) -> dict[str, Any]:
    """Everything, one process at a time."""
    memory, speed, rows = ([MemoryCase.read(text) for text in texts] for texts in (bench.memory, bench.speed, bench.rows))
    result: dict[str, Any] = {"saved": None, "speed": []}
    if bench.saved:
        case = MemoryCase.read(bench.saved)
        say(f"{case.shape}, what a forward of {case.tokens} tokens keeps ...")
        result["saved"] = compare_saved(case.shape, case.tokens)
    result["memory"] = measure_memory_of_steps(memory, folder, bench.threads, say, compute=bench.compute_dtype)
    result["rows"] = [measure_long_row(case, folder, bench.threads, say) for case in rows]
    if bench.before is not None:
        mix = {"groups": bench.groups, "samples": 8, "prompt": bench.prompt, "completion": bench.completion, "sigma": 0.7,
               "most": 2048, "flat": 0}  # fmt: skip
        result["speed"] = [
            compare_speed(bench.before, case, mix, pairs=bench.pairs, threads=bench.threads, compute=bench.compute_dtype, say=say)
            for case in speed
        ]
    result["ok"] = all(abs(row["off"]) <= WITHIN for row in result["memory"])
    return result


def measure_memory_of_steps(
    cases: list[MemoryCase], folder: Path | None, threads: int, say: Callable[[str], None], *, compute: str = "auto"
) -> list[dict[str, Any]]:
    """Two steps of each, measured and forecast."""
    rows = []
    for case in cases:
        say(f"{case.shape}, forwards of {case.tokens} tokens ...")
        # One shared prompt a group and eight completions: the tokens of two forwards and a bit.
        mix = {"groups": 4, "samples": 8, "prompt": case.tokens / 20, "completion": case.tokens / 15, "sigma": 0.3,
               "most": case.tokens // 2, "flat": 0}  # fmt: skip
        settings = {"micro_batch_tokens": case.tokens, "lr": 1e-6, "max_new_tokens": case.tokens, "compute_dtype": compute}
        before = COMPILED_AFTER if compute == "bfloat16" else 0
        told = {"threads": threads, "steps": 2, "before": before, "settings": settings, "mix": mix}
        measured = _steps(case.shape, told, folder)
        costs = count_model(shape_config(case.shape), case.tokens, bfloat16=compute == "bfloat16")
        plan = TrainingPlan(own_memory=False, states=STATES, room=costs.layer_bytes * measured["kept"])
        found = forecast(costs, plan)
        peak = max(measured["most"].values())
        rows.append({
            "shape": case.shape, "tokens": case.tokens, "parameters": costs.parameters, "forecast": found.device,
            "measured": peak, "off": found.device / peak - 1, "moments": measured["most"], "base": measured["base"],
            "again": costs.layers - kept_layers(costs, plan), "layers": costs.layers,
        })  # fmt: skip
    return rows


def measure_long_row(case: MemoryCase, folder: Path | None, threads: int, say: Callable[[str], None]) -> dict[str, Any]:
    """What one step of two rows of `case.tokens` tokens takes, each of which goes alone."""
    say(f"{case.shape}, two rows of {case.tokens:,} tokens, where a forward has {LONG_ROW_PACK:,} ...")
    prompt = case.tokens // 8
    mix = {"groups": 1, "samples": 2, "prompt": prompt, "completion": case.tokens - prompt, "sigma": 0.0, "most": case.tokens,
           "flat": 0}  # fmt: skip
    settings = {"micro_batch_tokens": LONG_ROW_PACK, "lr": 1e-6, "max_new_tokens": case.tokens}
    measured = _steps(case.shape, {"threads": threads, "steps": 1, "before": 0, "settings": settings, "mix": mix}, folder)
    vocabulary = int(shape_config(case.shape).vocab_size)
    return {
        "shape": case.shape, "tokens": measured["tokens"] // 2, "measured": max(measured["most"].values()),
        "seconds": measured["seconds"], "logits": 4 * vocabulary * (case.tokens - prompt),
    }  # fmt: skip


def _steps(shape: str, told: dict[str, Any], folder: Path | None) -> dict[str, Any]:
    """What `one_step` measured in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="shoal-trainer-", dir=folder) as where:
        answer = subprocess.run(
            python_command("netem.bench.trainer.one_step"),
            input=json.dumps({"shape": shape, "folder": where, "start": START, **told}),
            capture_output=True, text=True, env=child_environment(),
        )  # fmt: skip
    if answer.returncode:
        raise ShoalError(f"{shape}: {(answer.stderr.strip().splitlines() or ['no reason given'])[-1]}")
    measured: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return measured


class Stepper:
    """A trainer in a process of its own, of any tree."""

    def __init__(self, tree: Path, told: dict[str, Any]) -> None:
        script = Path(__file__).with_name("either_tree.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"},
        )  # fmt: skip
        self.began = self.ask(told)

    def ask(self, what: dict[str, Any]) -> dict[str, Any]:
        """One line, and what is answered."""
        out, back = self._pipes()
        out.write(json.dumps(what) + "\n")
        out.flush()
        line = back.readline()
        if not line:
            raise ShoalError("a trainer that is measured ended; its last words are above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End it."""
        self._pipes()[0].close()
        self._process.wait()

    def _pipes(self) -> tuple[IO[str], IO[str]]:
        assert self._process.stdin is not None and self._process.stdout is not None
        return self._process.stdin, self._process.stdout


def compare_speed(
    before: Path, case: MemoryCase, mix: dict[str, Any], *, pairs: int, threads: int, say: Callable[[str], None],
    compute: str = "auto",
) -> dict[str, Any]:
    """Steps on the same groups, by the tree in `before` and by this one in turns. The first pair warms up and does not count."""
    if not (before / "learner").is_dir():
        raise UsageError(f"--before {before}: no tree of Shoal is there (git archive 1832404 | tar x -C {before})")
    kind, values = SHAPES[case.shape]
    told = {
        "threads": threads, "kind": kind, "values": {"max_position_embeddings": 32768, **values}, "new": NEW_SETTINGS,
        "settings": {"micro_batch_tokens": case.tokens, "max_new_tokens": 512, "lr": 1e-6, "activation_checkpointing": "auto",
                     "compute_dtype": compute},
    }  # fmt: skip
    here = Path(__file__).resolve().parents[3]
    steppers = [Stepper(before.absolute(), told), Stepper(here, told)]
    turns = []
    for number in range(pairs + 1):
        old, new = (stepper.ask({"seed": number, "mix": mix}) for stepper in steppers)
        say(f"{case.shape}: {old['tokens']} tokens, before {old['seconds']:.1f} s ({old['cpu']:.1f} of a core), "
            f"now {new['seconds']:.1f} s ({new['cpu']:.1f})")  # fmt: skip
        if number:
            turns.append({"before": old, "now": new})
    for stepper in steppers:
        stepper.close()
    within = SAME_NORM["bfloat16" if compute == "bfloat16" else "float32"]
    if any(abs(t["before"]["norm"] / t["now"]["norm"] - 1) > within for t in turns):
        raise ShoalError("the two trees made other gradients of the same groups, so their times cannot be compared")
    times = sorted(t["before"]["seconds"] / t["now"]["seconds"] for t in turns)
    cpu = sorted(t["before"]["cpu"] / t["now"]["cpu"] for t in turns)
    return {
        "shape": case.shape, "tokens": case.tokens, "mix": mix, "pairs": pairs, "threads": threads, "compute_dtype": compute,
        "faster": {"median": statistics.median(times), "least": times[0], "most": times[-1]},
        "less_cpu": {"median": statistics.median(cpu), "least": cpu[0], "most": cpu[-1]},
    }  # fmt: skip


def describe(result: dict[str, Any]) -> str:
    """Tables."""
    lines = [describe_saved(result["saved"])] if result["saved"] else []
    if result["memory"]:
        lines.append(f"{'model':<7}{'tokens':>7}{'forecast':>11}{'measured':>11}{'off':>8}   most, by moment")
    for row in result["memory"]:
        moments = ", ".join(f"{name} {human_bytes(size)}" for name, size in row["moments"].items())
        lines.append(
            f"{row['shape']:<7}{row['tokens']:>7,}{human_bytes(row['forecast']):>11}{human_bytes(row['measured']):>11}"
            f"{row['off']:>+8.1%}   {moments}; {row['again']} of {row['layers']} layers run again"
        )
    for row in result["rows"]:
        lines.append(
            f"{row['shape']}: two rows of {row['tokens']:,} tokens took {human_bytes(row['measured'])} at most and "
            f"{row['seconds']:.0f} s; all logits of one of them alone would be {human_bytes(row['logits'])}"
        )
    for row in result["speed"]:
        lines.append(
            f"{row['shape']}: {row['faster']['median']:.2f} times as fast ({row['faster']['least']:.2f} to "
            f"{row['faster']['most']:.2f} in {row['pairs']} pairs), by CPU time {row['less_cpu']['median']:.2f} "
            f"({row['less_cpu']['least']:.2f} to {row['less_cpu']['most']:.2f}), {row['threads']} thread(s)"
        )
    return "\n".join(lines)
