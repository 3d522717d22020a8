"""What CUDA graphs bring a vLLM node, and whether they hold through an update in place (`shoal bench graphs`).

Thin shell: each way is a process of its own (`vllm_graphs`), one after the other, in the engine's environment.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from netem.bench.engine.models import SHAPES
from node.engine.process import packages
from node.engine.settings import GraphsName
from p2p.errors import UsageError
from p2p.processes import child_environment

PROGRAM = Path(__file__).with_name("vllm_graphs.py")

TRANSFORMERS = "transformers"
"""In place of a kind of graphs: the transformers engine."""

NEAR = 0.1
"""Part of the other version's distance that tokens may be from the version that they claim: rounding alone is a hundredth."""


@dataclass(frozen=True, slots=True)
class GraphsBench:
    """`ways` and `model` are names; `sequences` at once in each round of `new` tokens each; `rank` of an adapter, 0: none."""

    ways: tuple[str, ...] = ("none", "decode", "compiled", TRANSFORMERS)
    model: str = "0.6b"
    dtype: str = "bfloat16"
    rank: int = 0
    sequences: tuple[int, ...] = (8, 64, 256)
    new: int = 128
    kv_bytes: int = 16 << 30
    python: str = ""


def bench_graphs(bench: GraphsBench, folder: Path | None, say: Callable[[str], None]) -> dict[str, Any]:
    """What `shoal bench graphs --json` prints. UsageError on names that there are not; a way that fails says why."""
    known = (*get_args(GraphsName), TRANSFORMERS)
    odd = [way for way in bench.ways if way not in known]
    if bench.model not in SHAPES or odd:
        raise UsageError(f"models: {', '.join(SHAPES)}; ways: {', '.join(known)}; not {', '.join([bench.model, *odd])}")
    if min(bench.new, *bench.sequences, bench.kv_bytes) < 1 or bench.rank < 0:
        raise UsageError("numbers must be 1 or more, the rank 0 or more")
    rows = []
    for way in bench.ways:
        say(f"{bench.model}, {way} ...")
        with tempfile.TemporaryDirectory(prefix="shoal-graphs-", dir=folder) as where:
            rows.append(_measure(bench, way, Path(where)))
        say(_told(rows[-1]))
    return {"model": bench.model, "dtype": bench.dtype, "rank": bench.rank, "rows": rows, "ok": all(map(_holds, rows))}


def _measure(bench: GraphsBench, way: str, folder: Path) -> dict[str, Any]:
    ask = {
        "graphs": way, "rank": bench.rank, "dtype": bench.dtype, "kv_bytes": bench.kv_bytes, "threads": 1, "new": bench.new,
        "sequences": bench.sequences, "folder": str(folder), "config": SHAPES[bench.model].config,
    }  # fmt: skip
    with packages(bench.python) as root:
        child = subprocess.run(
            [bench.python, "-P", str(PROGRAM), json.dumps(ask)], capture_output=True, text=True, check=False,
            env=child_environment(root=root),
        )  # fmt: skip
    if child.returncode or not child.stdout.strip():
        lines = [line for line in child.stderr.strip().splitlines() if line.strip()] or ["no reason given"]
        return {"graphs": way, "failed": lines[-1][:300]}
    found: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return found


def _holds(row: dict[str, Any]) -> bool:
    return "failed" not in row and row["apart"]["mean"] < NEAR * row["apart"]["other"]


def describe_graphs(result: dict[str, Any]) -> str:
    """Lines for people."""
    about = f"{result['model']}, {result['dtype']}" + (f", an adapter of rank {result['rank']}" if result["rank"] else "")
    return "\n".join([about, *map(_told, result["rows"])])


def _told(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"{row['graphs']:<12} failed: {row['failed']}"
    rates = ", ".join(
        f"{one['tokens_per_s']:,.0f} of {one['sequences']} at once ({one['step_s'] * 1e3:.1f} ms a step)" for one in row["speeds"]
    )
    pauses = ", ".join(f"{one['pause_s']:.3f} (copy {one['apply_s']:.3f})" for one in row["commits"])
    apart = row["apart"]
    return (
        f"{row['graphs']:<12} starts in {row['start_s']:.1f} s; tokens/s: {rates}; seconds of pause for a version: {pauses}; "
        f"nats from the version that tokens claim {apart['mean']:.2g} ({apart['most']:.2g} at most), from the other "
        f"{apart['other']:.2g}"
    )
