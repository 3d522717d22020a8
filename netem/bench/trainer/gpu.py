"""The trainer on a GPU: memory against its forecast, tokens a second, and what publishing takes (`shoal bench trainer --gpu`).

Thin shell: each case is a process of its own (`gpu_step`), which begins with nothing.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import psutil
import torch
from transformers import AutoModelForCausalLM

from learner.trainer.forecast.count import count_model
from learner.trainer.forecast.facts import ModelCosts
from learner.trainer.forecast.forecast import TrainingPlan, forecast, kept_layers
from learner.trainer.forecast.sizes import SHAPES, shape_config
from learner.trainer.settings import LoraSection, OptimizerName
from netem.bench.trainer.bench import START, STATES
from p2p.errors import UsageError
from p2p.processes import child_environment, python_command
from p2p.quantities import human_bytes

STEPS = 4
"""Of each case; the first warms up and does not count in times."""

HOST_MOST = 24
"""Bytes of the host a parameter from which on a case trains alone: neither saved nor published, as the host may not have room."""

NOT_A_PART = ("load", "between", "end")
"""Moments that are no part of a step."""

FORWARDS = 3
"""Forwards and backwards of a step, about."""


@dataclass(frozen=True, slots=True)
class GpuCase:
    """A model, the tokens of its forwards, and how it is trained."""

    shape: str
    tokens: int
    how: str = "adamw"
    """an optimizer's name, or loraN: an adapter of rank N"""

    @classmethod
    def read(cls, text: str) -> GpuCase:
        """SHAPE:TOKENS or SHAPE:TOKENS:HOW. UsageError."""
        shape, _, rest = text.partition(":")
        tokens, _, how = rest.partition(":")
        known = how in ("", *get_args(OptimizerName)) or (how.startswith("lora") and how[4:].isdigit() and int(how[4:]) > 0)
        if shape not in SHAPES or not tokens.isdigit() or not known:
            ways = ", ".join(get_args(OptimizerName))
            raise UsageError(f"{text!r} is not SHAPE:TOKENS or SHAPE:TOKENS:HOW; shapes: {', '.join(SHAPES)}; how: {ways}, loraN")
        return cls(shape, int(tokens), how or "adamw")

    @property
    def rank(self) -> int:
        """Of the adapter; 0: there is none."""
        return int(self.how[4:]) if self.how.startswith("lora") else 0

    @property
    def optimizer(self) -> OptimizerName:
        """Of the trainer."""
        return "adamw" if self.rank else cast(OptimizerName, self.how)

    def settings(self) -> dict[str, Any]:
        """Of the trainer, beside its defaults."""
        found: dict[str, Any] = {
            "micro_batch_tokens": self.tokens, "lr": 1e-6, "max_new_tokens": self.tokens, "optimizer": self.optimizer,
        }  # fmt: skip
        return {**found, "lora": {"rank": self.rank}} if self.rank else found

    def mix(self) -> dict[str, Any]:
        """Groups of a step: one shared prompt and eight completions each, the tokens of some three forwards."""
        groups = max(1, round(FORWARDS * self.tokens / (8 * 512 + 256)))
        return {"groups": groups, "samples": 8, "prompt": 256, "completion": 512, "sigma": 0.5, "most": self.tokens // 2,
                "flat": 0}  # fmt: skip


def bench_on_gpu(
    texts: list[str], folder: Path | None, say: Callable[[str], None], *, device: str = "cuda", alone: bool = False
) -> dict[str, Any]:
    """What `shoal bench trainer --gpu --json` prints. `alone`: steps are neither saved nor published."""
    cases = [GpuCase.read(text) for text in texts]
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("torch sees no GPU here: --memory measures steps on a processor, --forecast counts without either")
    rows = []
    for case in cases:
        say(f"{case.shape}, forwards of {case.tokens:,} tokens, {case.how} ...")
        rows.append(measure_on_gpu(case, folder, device=device, alone=alone))
        say(_told(rows[-1]))
    return {"gpu": rows, "ok": all("failed" not in row for row in rows)}


def measure_on_gpu(case: GpuCase, folder: Path | None, *, device: str, alone: bool) -> dict[str, Any]:
    """One case; one that fails says why and does not keep the others from running."""
    bfloat16, size = device == "cuda", parameters_of(case.shape)
    alone = alone or (case.optimizer == "adamw_host" and size * HOST_MOST > psutil.virtual_memory().total)
    told = {
        "shape": case.shape, "device": device, "settings": case.settings(), "mix": case.mix(), "steps": STEPS, "start": START,
        "publish": not alone, "save": not alone,
    }  # fmt: skip
    about = {"shape": case.shape, "tokens": case.tokens, "how": case.how, "alone": alone}
    with tempfile.TemporaryDirectory(prefix="shoal-gpu-", dir=folder) as where:
        child = subprocess.Popen(
            python_command("netem.bench.trainer.gpu_step"), text=True, env=child_environment(),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert child.stdin is not None
        child.stdin.write(json.dumps({"folder": where, **told}))
        child.stdin.close()
        child.stdin = None  # `communicate` would close it again
        # While it runs: both take their time.
        costs = count_model(
            shape_config(case.shape), case.tokens, bfloat16=bfloat16, gpu=device == "cuda",
            lora=LoraSection(rank=case.rank), frozen="bfloat16" if bfloat16 else "float32",
        )  # fmt: skip
        out, errors = child.communicate()
    if child.returncode:
        lines = [line for line in errors.strip().splitlines() if line.strip()] or ["no reason given"]
        return {**about, "failed": lines[-1][:300]}
    measured: dict[str, Any] = json.loads(out.splitlines()[-1])
    return {**measured, **about, **_against(case, costs, measured, own_memory=bfloat16)}


def _against(case: GpuCase, costs: ModelCosts, measured: dict[str, Any], *, own_memory: bool) -> dict[str, Any]:
    plan = TrainingPlan(
        own_memory=own_memory, optimizer=case.optimizer, whole=not case.rank, frozen_bytes=2 if case.rank and own_memory else 4,
        states=STATES, room=costs.layer_bytes * measured["kept"],
    )  # fmt: skip
    found = forecast(costs, plan)
    # The first step makes the optimizer's state and compiles: the others are what a run has.
    seconds = {moment: statistics.median(times[1:] or times) for moment, times in measured["seconds"].items()}
    step = sum(sum(measured["seconds"][moment][1:]) for moment in ("forward and backward", "update"))
    laid, whole = (sum(measured[kind][1:]) for kind in ("computed", "steps_tokens"))
    peak = max(measured["device"].values(), default=0)
    return {
        "forecast": found.device, "peak": peak, "off": found.device / peak - 1 if peak else None, "host_forecast": found.host,
        "again": costs.layers - kept_layers(costs, plan), "median": seconds, "laid_a_second": laid / step,
        "tokens_a_second": whole / step, "flops": (4 * costs.parameters + 2 * costs.trained) * laid / step,
    }  # fmt: skip


def parameters_of(shape: str) -> int:
    """Values of all weights of a shape, made without memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape_config(shape))
    return sum(parameter.numel() for parameter in model.parameters())


def describe_on_gpu(result: dict[str, Any]) -> str:
    """A table."""
    head = f"{'model':<6}{'tokens':>7} {'how':<11}{'forecast':>10}{'measured':>10}{'off':>7}{'tokens/s':>10}"
    return "\n".join([f"{head}   seconds of a step's parts", *(_told(row) for row in result["gpu"])])


def _told(row: dict[str, Any]) -> str:
    start = f"{row['shape']:<6}{row['tokens']:>7,} {row['how']:<11}"
    if "failed" in row:
        return f"{start}failed: {row['failed']}"
    off = "" if row["off"] is None else f"{row['off']:+.1%}"
    parts = ", ".join(f"{name} {seconds:.3f}" for name, seconds in row["median"].items() if name not in NOT_A_PART)
    return (
        f"{start}{human_bytes(row['forecast']):>10}{human_bytes(row['peak']):>10}{off:>7}{row['laid_a_second']:>10,.0f}"
        f"   {parts}; {row['tokens_a_second']:,.0f} tokens/s with each row's own prompt; {row['flops'] / 1e12:,.0f} TFLOP/s (6 "
        f"FLOP a trained parameter and token that is computed, 4 a frozen one); checkpoint {row['checkpoint']:.1f} s; "
        f"{row['again']} of {row['layers']} layers run again"
    )
