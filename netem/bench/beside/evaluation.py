"""`shoal bench evaluation`: what evaluations on the nodes cost a run that trains.

A real learner and real nodes over loopback, with the default evaluation every so many steps. The steps of one run are told apart
by whether an evaluation ran beside them. Two costs: of the trainer's own time, what is no part of a step that it accounts for;
and of the nodes, whose places an evaluation takes, so that groups come later.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from netem.bench.beside.served_run import ServedRun
from p2p.errors import ShoalError, UsageError

LOOK_S = 0.1
"""Seconds between two looks at the run: a small part of a step, which takes seconds."""

PARTS = ("time/wait_for_batch", "time/train", "time/commit", "time/publish")
"""What the trainer does in a step, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationBench:
    """`prompts` greedy answers every `every` steps, for `steps` steps that are counted."""

    steps: int = 48
    prompts: int = 64
    every: int = 12
    nodes: int = 2
    capacity: int = 16

    def __post_init__(self) -> None:
        if min(self.steps, self.prompts, self.every, self.nodes, self.capacity) < 1:
            raise UsageError("steps, prompts, every, nodes, capacity: above 0")


class EvaluationLook(NamedTuple):
    """The run at a moment."""

    step: int
    """that were committed"""
    running: bool
    """whether an evaluation ran"""
    evaluation: int
    """tokens of evaluations so far"""
    tokens: int
    """all tokens of the nodes so far"""


def bench_evaluation(bench: EvaluationBench, folder: Path | None, say: Callable[[str], None]) -> dict[str, Any]:
    """What `shoal bench evaluation --json` prints. ShoalError when the run does not get going or ends."""
    settings: dict[str, Any] = {
        "trainer": {"eval_size": bench.prompts, "eval_every": bench.every}, "endpoint": {"listen": "127.0.0.1:0"},
    }  # fmt: skip
    with (
        tempfile.TemporaryDirectory(prefix="shoal-evaluation-", dir=folder) as name,
        ServedRun(Path(name), settings, bench.capacity) as run,
    ):
        run.start(bench.nodes)
        run.wait("the first evaluation", lambda: any("eval/seconds" in line for line in run.metrics()))
        first = run.status()["step"] + 1
        last = first + bench.steps
        say(f"counting steps {first + 1} to {last}")
        seen: list[EvaluationLook] = []
        while not seen or seen[-1].step < last:
            if run.learner.poll() is not None:
                raise ShoalError(f"the learner ended before step {last}: {run.learner.last_line()}")
            if status := run.status():
                seen.append(_seen(status))
            time.sleep(LOOK_S)
        run.wait("the last step's line", lambda: any(line.get("step") == last and "time/step" in line for line in run.metrics()))
        return account(run.metrics(), seen, first, last)


def _seen(status: dict[str, Any]) -> EvaluationLook:
    return EvaluationLook(
        status["step"], bool(status["evaluations"]), status["requests"]["tokens"]["evaluation"],
        sum(n["tokens"] for n in status["nodes"]),
    )  # fmt: skip


def account(lines: Sequence[dict[str, Any]], seen: Sequence[EvaluationLook], first: int, last: int) -> dict[str, Any]:
    """Of the steps after `first` up to `last`."""
    told = {line["step"]: line for line in lines if "time/step" in line and first <= line["step"] <= last}
    evaluations = [line for line in lines if "eval/seconds" in line and first < line["step"] <= last]
    if len(told) <= last - first:
        raise ShoalError(f"{len(told)} lines of {last - first + 1} steps")
    wall = told[last]["time"] - told.pop(first)["time"]  # each is written when its step is over
    begin = next(look for look in seen if look.step >= first)
    end = next(look for look in seen if look.step >= last)
    beside = {look.step + 1 for look in seen if look.running}
    accounted = sum(line[part] for line in told.values() for part in PARTS)
    groups = {
        name: _means([line for step, line in told.items() if (step in beside) == is_beside])
        for name, is_beside in (("beside", True), ("without", False))
    }
    with_it, without = groups["beside"], groups["without"]
    longer = with_it["time/step"] - without["time/step"] if with_it["steps"] and without["steps"] else 0.0
    return {
        "later_share": longer * with_it["steps"] / wall,
        "steps": len(told), "evaluations": len(evaluations), "evaluation_s": [line["eval/seconds"] for line in evaluations],
        "wall_s": wall, "unaccounted_share": max(0.0, wall - accounted) / wall,
        "tokens_share": (end.evaluation - begin.evaluation) / (end.tokens - begin.tokens), "by_step": groups,
        "ok": bool(evaluations) and max(0.0, wall - accounted) / wall < 0.01,
    }  # fmt: skip


def _means(lines: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Seconds of a step in the mean, by part."""
    return {"steps": len(lines)} | ({key: fmean(line[key] for line in lines) for key in ("time/step", *PARTS)} if lines else {})


def describe(result: dict[str, Any]) -> str:
    """What `shoal bench evaluation` prints."""
    lines = [
        f"{result['steps']} steps in {result['wall_s']:.0f} s, {result['evaluations']} evaluations beside them; of the trainer's "
        f"time {result['unaccounted_share']:.2%} is not its steps' waiting, training, committing and publishing: "
        f"{'ok' if result['ok'] else 'NOT OK'}",
        f"evaluations took {result['tokens_share']:.1%} of the nodes' tokens; groups that came later for them took "
        f"{result['later_share']:.1%} of the time",
    ]
    for name, means in result["by_step"].items():
        if means["steps"]:
            parts = ", ".join(f"{key.partition('/')[2]} {means[key]:.2f}" for key in ("time/step", *PARTS))
            lines.append(f"{means['steps']:.0f} steps {name} an evaluation, seconds in the mean: {parts}")
    return "\n".join(lines)
