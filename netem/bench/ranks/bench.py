"""`shoal bench ranks`: what memory a trainer of several processes takes in each of them, on this machine's CPU.

Peaks are of the resident memory, over what the process had before it opened the model: programs and libraries
take the same in each.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from netem.demo.tiny_model import build_random_model
from p2p.errors import ShoalError
from p2p.processes import child_environment, last_line, python_command, start, wait_or_kill

STEPS = 3
"""Optimizer steps: from the second on memory is what it stays."""

WAIT_S = 900.0
"""Seconds for one number of ranks."""

MIB = 1 << 20
"""Bytes."""


def bench_ranks(counts: Sequence[int], size: str, say: Callable[[str], None]) -> dict[str, Any]:
    """What `shoal bench ranks --json` prints. ShoalError where a run fails."""
    rows = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="shoal-ranks-") as scratch:
        model = build_random_model(Path(scratch) / "model", size=size)
        for count in counts:
            say(f"{count} {'process' if count == 1 else 'processes'} ...")
            folder = Path(scratch) / str(count)
            folder.mkdir()
            rows.append({"ranks": count, "of_each": _measured(folder, model, count)})
    return {"model": size, "parameters": sum(r["parameters"] for r in rows[0]["of_each"]), "rows": rows}


def _measured(folder: Path, model: Path, count: int) -> list[dict[str, int]]:
    run = ["netem.bench.ranks.child", str(folder), str(model), str(STEPS)]
    if count > 1:
        run = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(count), "--module", *run]
    log = folder / "said.log"
    environment = child_environment({"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"})
    process = start(python_command(*run), stdout=log, stderr=log, environment=environment)
    if wait_or_kill(process, WAIT_S):
        raise ShoalError(f"{count} ranks: {last_line(log)}")
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(count)]


def describe(result: dict[str, Any]) -> str:
    """A table for people; of several ranks the largest of each figure."""
    lines = [
        f"model {result['model']}, {result['parameters']:,} parameters; MiB of the rank with the most, and of rank 0 where it "
        "publishes; sent: of all ranks together",
        "| ranks | parts | loading | training | publishing | rank 0 publishing | saving | sent, first version | sent, a delta |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        of_each = row["of_each"]
        most = {key: max(r[key] for r in of_each) / MIB for key in ("held", "loading", "training", "publishing", "saving")}
        sent = [sum(r[key] for r in of_each) / MIB for key in ("sent_first", "sent_delta")]
        others = max((r["publishing"] for r in of_each[1:]), default=of_each[0]["publishing"]) / MIB
        lines.append(
            f"| {row['ranks']} | {most['held']:.0f} | {most['loading']:.0f} | {most['training']:.0f} | {others:.0f} | "
            f"{of_each[0]['publishing'] / MIB:.0f} | {most['saving']:.0f} | {sent[0]:.2f} | {sent[1]:.2f} |"
        )
    return "\n".join(lines)
