"""`shoal bench evaluation`: what evaluations on the nodes cost a run that trains.

A real learner and real nodes over loopback, with the default evaluation every so many steps. The steps of one run are told apart
by whether an evaluation ran beside them. Two costs: of the trainer's own time, which is all but its waiting for groups; and of
the nodes, whose places an evaluation takes, so that groups come later. The learner's processes and the nodes have cores of their
own, where there are two: a node's generation must not count as the trainer's time.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, variance
from typing import Any, NamedTuple

import psutil

from netem.bench.beside.served_run import ServedRun
from p2p.errors import ShoalError, UsageError

LOOK_S = 0.1
"""Seconds between two looks at the run: a small part of a step, which takes seconds."""

PARTS = ("time/wait_for_batch", "time/train", "time/commit", "time/publish")
"""What the trainer does in a step, in seconds; the first is its waiting."""

OWN = "time/own"
"""From the end of the step before to a step's end, less the waiting: what it does, and what its steps do not account for."""

MOST = 0.01
"""The share of the trainer's time that evaluations may cost it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationBench:
    """`prompts` greedy answers every `every` steps, for `steps` steps that are counted."""

    steps: int = 96
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
        apart = _part_cores([run.learner.pid], [node.pid for node in run.nodes.values()])
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
        return account(run.metrics(), seen, first, last) | {"cores_apart": apart}


def _part_cores(learner: Sequence[int], nodes: Sequence[int]) -> bool:
    """Give the processes of the learner, with all that they started, the first half of our cores, and the nodes the other half.
    Whether there were two."""
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    for pids, theirs in ((learner, cores[:half]), (nodes, cores[half:])) if half else ():
        for pid in pids:
            for process in (root := psutil.Process(pid), *root.children(recursive=True)):
                for thread in process.threads():  # each by itself: those that are there do not follow the first one
                    os.sched_setaffinity(thread.id, theirs)
    return half > 0


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
    wall = told[last]["time"] - told[first]["time"]  # each is written when its step is over
    begin = next(look for look in seen if look.step >= first)
    end = next(look for look in seen if look.step >= last)
    beside = {look.step + 1 for look in seen if look.running}
    steps = {
        step: {key: told[step][key] for key in ("time/step", *PARTS)}
        | {OWN: told[step]["time"] - told[step - 1]["time"] - told[step][PARTS[0]]}
        for step in range(first + 1, last + 1)
    }
    with_it = [parts for step, parts in steps.items() if step in beside]
    without = [parts for step, parts in steps.items() if step not in beside]
    held, later = _longer(with_it, without, OWN), _longer(with_it, without, PARTS[0])
    return {
        "held_up_share": held.seconds / wall, "held_up_error": held.error / wall,
        "later_share": later.seconds / wall, "later_error": later.error / wall,
        "steps": len(steps), "evaluations": len(evaluations), "evaluation_s": [line["eval/seconds"] for line in evaluations],
        "wall_s": wall, "tokens_share": (end.evaluation - begin.evaluation) / (end.tokens - begin.tokens),
        "by_step": {"beside": _means(with_it), "without": _means(without)},
        "ok": bool(evaluations) and held.seconds / wall < MOST,
    }  # fmt: skip


class _Longer(NamedTuple):
    """How much longer steps beside an evaluation took than the others, all of them together."""

    seconds: float
    error: float
    """its standard error, taking steps for independent of each other; 0 where there are too few to tell"""


def _longer(with_it: Sequence[dict[str, float]], without: Sequence[dict[str, float]], key: str) -> _Longer:
    if not with_it or not without:
        return _Longer(0.0, 0.0)
    a, b = [line[key] for line in with_it], [line[key] for line in without]
    error = math.sqrt(variance(a) / len(a) + variance(b) / len(b)) if min(len(a), len(b)) > 1 else 0.0
    return _Longer(len(a) * (fmean(a) - fmean(b)), len(a) * error)


def _means(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Seconds of a step in the mean, by part."""
    return {"steps": len(steps)} | ({key: fmean(step[key] for step in steps) for key in steps[0]} if steps else {})


def describe(result: dict[str, Any]) -> str:
    """What `shoal bench evaluation` prints."""
    lines = [
        f"{result['steps']} steps in {result['wall_s']:.0f} s, {result['evaluations']} evaluations beside them; they held the "
        f"trainer up for {result['held_up_share']:.2%} of its time (standard error {result['held_up_error']:.2%}): "
        f"{'ok' if result['ok'] else 'NOT OK'}",
        f"evaluations took {result['tokens_share']:.1%} of the nodes' tokens; the trainer waited longer for groups beside them, "
        f"for {result['later_share']:.1%} of its time (standard error {result['later_error']:.1%})",
    ]
    for name, means in result["by_step"].items():
        if means["steps"]:
            parts = ", ".join(f"{key.partition('/')[2]} {means[key]:.2f}" for key in ("time/step", *PARTS, OWN))
            lines.append(f"{means['steps']:.0f} steps {name} an evaluation, seconds in the mean: {parts}")
    return "\n".join(lines)
