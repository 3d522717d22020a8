"""`shoal bench audit --in-run STEPS`: what audits cost a run whose nodes are all proven, beside what generating costs.

The demo's model through real processes over loopback, two honest nodes, nobody trusted. Processor time of the nodes' engines,
which do nothing but generate, and of the auditor. Must not know flags or what is printed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from learner.config import build_config, dump_toml
from learner.status.steps import metrics_lines
from netem.demo.recipes import RECIPES
from netem.processes.children import POLITE_S, Children, LoggedProcess, run_module, wait_for
from netem.processes.engines import engines_of
from p2p.errors import ShoalError, UsageError

RECIPE = RECIPES["reverse"]

NODES = 2
"""Honest nodes."""

WARM = 60
"""Steps that are not counted: nodes are proven in them, and what waits of them is checked."""

LOOK_S = 0.25
"""Seconds between two looks at the run."""

START_S, RUN_S = 300.0, 3600.0
"""Seconds until the learner stands, and until a run is given up."""


@dataclass(frozen=True, slots=True)
class Spent:
    """Totals at the end of a step: processor time in seconds, and tokens that were checked."""

    step: int
    engines: float
    auditor: float
    checked: float


def audited_run(steps: int, seed: int, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """One run of so many steps; its files are left in `folder`. UsageError for too few steps, ShoalError when a process that
    should live ends."""
    if steps <= 2 * WARM:
        raise UsageError(f"--in-run: {steps} steps are too few: {WARM} are not counted, and as many again should be")
    model, run_dir, load = folder / "model", folder / "run", os.getloadavg()[0]
    run_module("netem.demo.recipes", str(model), RECIPE.name, str(seed), timeout_s=RUN_S)
    values = RECIPE.config(run_dir, model, steps, seed)
    values["trainer"]["eval_size"] = 0  # engines shall do nothing but generate what is trained on
    values["standing"] = {"trusted": []}
    config = folder / "learner.toml"
    config.write_text(dump_toml(build_config(values, "bench audit").model_dump()))
    children = Children(folder / "logs")
    try:
        learner = children.start("learner", "learner", str(config), "--json")
        wait_for("a learner", (run_dir / "ticket.txt").exists, START_S, [learner])
        nodes = [
            children.start(
                f"node-{i}", "node", "--join", str(run_dir / "ticket.txt"), "--dir", str(folder / f"node-{i}"), "--name",
                f"node-{i}", "--listen", "/ip4/127.0.0.1/tcp/0", "--capacity", str(RECIPE.capacity), "--json",
            )
            for i in range(NODES)
        ]  # fmt: skip
        say(f"{steps} steps, {NODES} honest nodes, seed {seed}")
        spent = _watched(learner, nodes, run_dir)
    finally:
        children.end(POLITE_S)
    lines = [line for line in metrics_lines(run_dir / "metrics.jsonl") if "perf/tokens" in line]
    return {"seed": seed, "load": [round(load, 1), round(os.getloadavg()[0], 1)], **cost(spent, lines)}


def _watched(learner: LoggedProcess, nodes: Sequence[LoggedProcess], run_dir: Path) -> list[Spent]:
    """What was spent at each step that was seen, in order."""
    spent, engines, began = list[Spent](), list[psutil.Process](), time.monotonic()
    while learner.poll() is None:
        for node in nodes:
            if node.failed():
                raise ShoalError(f"{node.name} ended with status {node.returncode}: {node.last_line()}")
        if time.monotonic() - began > RUN_S:
            raise ShoalError(f"the run was not over after {RUN_S:.0f} s")
        last = _last_step(run_dir / "metrics.jsonl")
        if last is not None and (not spent or last["step"] > spent[-1].step):
            if len(engines) < len(nodes):
                engines = engines_of(node.pid for node in nodes)
            try:
                used = sum(sum(engine.cpu_times()[:2]) for engine in engines)
            except psutil.NoSuchProcess:  # the run is over
                break
            spent.append(Spent(int(last["step"]), used, last.get("audit/seconds", 0.0), last.get("audit/checked_tokens", 0.0)))
        time.sleep(LOOK_S)
    if learner.wait(RUN_S):
        raise ShoalError(f"the learner ended with status {learner.returncode}: {learner.last_line()}")
    return spent


def _last_step(path: Path) -> dict[str, Any] | None:
    last = None
    for line in metrics_lines(path):
        if "perf/tokens" in line:
            last = line
    return last


def cost(spent: Sequence[Spent], lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """From the first step after WARM to the last that was seen. Pure. `lines`: the run's metrics, of which tokens are counted."""
    counted = [at for at in spent if at.step >= WARM]
    if len(counted) < 2:
        raise ShoalError("no steps were seen after those that are not counted")
    first, last = counted[0], counted[-1]
    made = sum(line["perf/tokens"] for line in lines if first.step < line["step"] <= last.step)
    engines, auditor = last.engines - first.engines, last.auditor - first.auditor
    return {
        "steps": last.step - first.step, "tokens": int(made), "checked": int(last.checked - first.checked),
        "checked_share": (last.checked - first.checked) / made, "engines_s": round(engines, 2), "auditor_s": round(auditor, 2),
        "cost": auditor / engines, "before_s": round(first.auditor, 2),
    }  # fmt: skip
