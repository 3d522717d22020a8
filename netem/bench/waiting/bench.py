"""`shoal bench waiting`: which part of a step the trainer waits for the disk and the encoder, with a checkpoint every step.

The same steps once with checkpoints and versions beside training, once with waiting for both, each in a process of its own.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from netem.bench.engine.models import SHAPES
from p2p.errors import ShoalError, UsageError
from p2p.processes import child_environment, python_command

WAITS = ("time/commit", "time/publish")
"""What the trainer waits in a step, in seconds, for others than nodes."""

PARTS = ("time/step", "time/train", "time/update", *WAITS, "time/checkpoint", "stage/copy", "stage/encode", "stage/digest")
"""What is told of a step, in seconds."""

WARM = 1
"""Steps that are not counted: buffers and files are made in the first."""

STATE_BYTES = 16
"""Bytes a parameter on disk: a checkpoint of 12 before the one before it is deleted, and what is published."""

LIMIT = 0.05
"""Share of a step that the trainer may wait."""


def bench_waiting(
    model: str, steps: int, rows: int, tokens: int, *, compare: bool, folder: Path | None, say: Callable[[str], None]
) -> dict[str, Any]:
    """What `shoal bench waiting --json` prints."""
    if model not in SHAPES:
        raise UsageError(f"no model {model!r} here: {', '.join(SHAPES)}")
    if steps <= WARM or rows < 4 or rows % 4 or tokens < 8:
        raise UsageError("steps: 2 or more; rows: 4, 8, ...; tokens: 8 or more")
    runs = {"beside": _run(model, steps, rows, tokens, beside=True, folder=folder, say=say)}
    if compare:
        runs["waiting"] = _run(model, steps, rows, tokens, beside=False, folder=folder, say=say)
    return {"ok": runs["beside"]["waits_share"] < LIMIT, "rows": rows, "tokens": tokens, "runs": runs}


def _run(
    model: str, steps: int, rows: int, tokens: int, *, beside: bool, folder: Path | None, say: Callable[[str], None]
) -> dict[str, Any]:
    root = Path(tempfile.mkdtemp(prefix="shoal-waiting-", dir=folder))
    say(f"{model}, {steps} steps of {rows} rows of {tokens} tokens, {'beside' if beside else 'waiting'}")
    settings = {
        "folder": str(root), "model": model, "steps": steps, "rows": rows, "tokens": tokens, "checkpoint_beside": beside,
        "publish_beside": beside,
    }  # fmt: skip
    try:
        done = subprocess.run(
            python_command("netem.bench.waiting.run", json.dumps(settings)), capture_output=True, text=True, check=False,
            env=child_environment(),
        )  # fmt: skip
    finally:
        shutil.rmtree(root, ignore_errors=True)
    if done.returncode:
        raise ShoalError(f"the trainer ended with {done.returncode}:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    lines = result.pop("lines")[WARM:]
    result["seconds"] = {part: median(line.get(part, 0.0) for line in lines) for part in PARTS}
    result["waits_share"] = sum(line[part] for line in lines for part in WAITS) / sum(line["time/step"] for line in lines)
    result["waits_share_max"] = max(sum(line[part] for part in WAITS) / line["time/step"] for line in lines)
    return result


def describe(result: dict[str, Any]) -> str:
    """A table for people."""
    lines = []
    for name, run in result["runs"].items():
        seconds = run["seconds"]
        lines.append(
            f"{name}: {run['parameters'] / 1e6:.0f} M parameters, a checkpoint of {run['checkpoint_bytes'] / 1e9:.3f} GB "
            f"each step, at most {run['peak_bytes'] / 1e9:.1f} GB of memory, load {run['load']:.1f}"
        )
        lines.append(
            f"  a step {seconds['time/step']:.2f} s (median), of which training {seconds['time/train']:.2f}; waits for "
            f"checkpoints {seconds['time/commit']:.3f}, for versions {seconds['time/publish']:.3f}: {run['waits_share']:.1%} of "
            f"all steps' time, at most {run['waits_share_max']:.1%} of one"
        )
        lines.append(
            f"  a checkpoint from its taking to its commit {seconds['time/checkpoint']:.2f} s; a version: copied "
            f"{seconds['stage/copy']:.2f}, encoded {seconds['stage/encode']:.2f}, digests {seconds['stage/digest']:.2f} s"
        )
    return "\n".join(lines)
