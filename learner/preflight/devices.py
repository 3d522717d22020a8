"""The trainer's device, by the trainer's own torch: asked in a process of its own, for the head's must not import it.

`python -m learner.preflight.devices` prints what torch finds, as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from learner.preflight.facts import Memory
from learner.trainer.checkpoints.forms import check_devices
from learner.trainer.export import last_commit
from p2p.errors import UsageError
from p2p.processes import child_environment, python_command

ANSWER_S = 120.0
"""Seconds that torch has to say what it finds: importing it on a busy machine takes up to a minute."""

GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Where Linux shows that there may be a GPU that torch calls cuda: NVIDIA's, AMD's, and either under WSL. Without one of these
torch is not asked."""

CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Files with the most bytes that this container may take (cgroup 2 and 1)."""


@dataclass(frozen=True, slots=True)
class Devices:
    """What torch finds."""

    gpus: tuple[Memory | None, ...] = ()
    """in torch's order; None is one whose memory torch cannot tell"""
    mps: bool = False
    error: str = ""
    """why it could not be asked, or not for all"""


def host_memory() -> Memory:
    """This machine's, or this container's share of it."""
    found = psutil.virtual_memory()
    total, free = found.total, found.available
    for file in CGROUP_LIMITS:
        try:
            limit = Path(file).read_text().strip()
        except OSError:
            continue
        if limit.isdigit() and int(limit) < total:
            total = int(limit)
    return Memory("this machine", total, min(free, total), psutil.swap_memory().total)


def maybe_gpu() -> bool:
    """Whether torch may find a GPU."""
    return any(Path(file).exists() for file in GPU_FILES)


def ask_torch() -> Devices:
    """The devices of the trainer's torch. Quick where there can be no GPU; else it takes some seconds."""
    if not maybe_gpu():
        return Devices()
    command = python_command("learner.preflight.devices")
    try:
        told = subprocess.run(
            command, capture_output=True, text=True, timeout=ANSWER_S, env=child_environment(), check=True,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        values = json.loads(told.stdout.splitlines()[-1])
        error = values["error"] and f"torch cannot be asked for all its devices: {values['error'][:200]}"
        return Devices(tuple(one and Memory(*one) for one in values["gpus"]), values["mps"], error)
    except subprocess.CalledProcessError as failed:
        last = (failed.stderr.strip().splitlines() or ["no reason given"])[-1]
        return Devices(error=f"torch cannot be asked for its devices: {last[:200]}")
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError, IndexError, TypeError) as failed:
        return Devices(error=f"torch cannot be asked for its devices: {failed}")


def pick(device: str, devices: Devices, count: int = 1) -> Memory | None:
    """The memory of the trainer's device `trainer.device`, the first where it has `count` of them; None of the CPU and of one
    whose memory is not known. UsageError when there is no such device, or there are fewer, and torch could be asked."""
    kind, _, number = device.partition(":")
    if kind == "cpu" or (kind == "auto" and not devices.gpus):
        return None
    if kind == "mps":
        if not devices.mps and not devices.error:
            raise UsageError(f'trainer.device = "{device}": torch finds no such device here')
        return None
    index = int(number) if number.isdigit() else 0
    if index >= len(devices.gpus):
        if devices.error:
            return None
        names = ", ".join(gpu.name for gpu in devices.gpus if gpu) or 'none; trainer.device = "cpu" is the processor'
        raise UsageError(f'trainer.device = "{device}": torch finds no such device here (it finds {names})')
    if count > len(devices.gpus) and not devices.error:
        raise UsageError(f"trainer.devices = {count}: torch finds {len(devices.gpus)} here; set no more than that")
    return devices.gpus[index]


def computes_on_cpu(device: str, devices: Devices) -> bool:
    """Whether `trainer.device` is surely one that has no memory of its own."""
    return device in ("cpu", "mps") or (device == "auto" and not devices.gpus and not devices.error)


def check_last_checkpoint(run_dir: Path, devices: int) -> None:
    """UsageError where so many devices cannot go on from the run's last commit. That there is none is another's to tell."""
    try:
        checkpoint = last_commit(run_dir).checkpoint
    except UsageError:
        return
    check_devices(checkpoint, devices)


def main() -> int:
    """What torch finds, as one line of JSON."""
    import torch

    gpus: list[list[str | int] | None] = []
    error = ""
    try:
        for i in range(torch.cuda.device_count()):
            gpus.append(None)
            try:
                free, total = torch.cuda.mem_get_info(i)
                gpus[i] = [f"{torch.cuda.get_device_name(i)} (cuda:{i})", total, free]
            except Exception as failed:  # a full GPU, for instance: those after it may answer
                error = f"{type(failed).__name__}: {failed}"
    except Exception as failed:  # a driver may fail in any way: then what was found so far is all there is
        error = f"{type(failed).__name__}: {failed}"
    print(json.dumps({"gpus": gpus, "mps": bool(torch.backends.mps.is_available()), "error": error}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
