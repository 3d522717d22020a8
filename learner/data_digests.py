"""What a run's data were when it began, and which of them changed before it was resumed. Must not know how rows are read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from learner.evaluation.problems import Evaluation
from learner.tasks.port import Task
from p2p.files import write_whole


def changed_data(run_dir: Path, task: Task, evaluations: Sequence[Evaluation] = (), *, resume: bool) -> list[str]:
    """Keeps digests of the data of the task and of evaluations with a task of their own; of a resumed run, a line for each source
    that is not what it was."""
    file = run_dir / "data.json"
    own = {one.plan.name: dict(one.fingerprint) for one in evaluations if one.fingerprint not in ({}, task.fingerprint)}
    now: dict[str, Any] = {"task": dict(task.fingerprint), "eval": own}
    before: dict[str, Any] = json.loads(file.read_text()) if resume and file.exists() else now
    if "task" not in before or isinstance(before["task"], str):  # of a learner that kept the task's alone
        before = {"task": before, "eval": own}
    write_whole(file, json.dumps(now, indent=1))
    after = "prompts are drawn from what is there now; groups that were under way with another prompt are generated again"
    told = [f"task.data: {line}: {after}" for line in _differences(before["task"], now["task"])]
    after = "figures from here on are of other problems than those before"
    for name in own.keys() & before["eval"].keys():
        told += [f"eval {name}: {line}: {after}" for line in _differences(before["eval"][name], own[name])]
    return told


def _differences(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    yield from (f"{name} has changed since this run began" for name in now if name in before and now[name] != before[name])
    yield from (f"{name} is new to this run" for name in now if name not in before)
    yield from (f"{name} is not among its data any more" for name in before if name not in now)
