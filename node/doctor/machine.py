"""What the machine gives a node: memory, limits of its container, open files, disk, clock.

Readers that ask the system, and judgements that are pure: facts in, a `DoctorFinding` out. Must not import torch; must not know
engines or the network.
"""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import struct
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil

from p2p.channel.listening import MAX_FILES
from p2p.findings import OK, WARNING, WRONG, DoctorFinding
from p2p.limits import GIB
from p2p.quantities import human_bytes

LITTLE_MEMORY = 2 * GIB
"""Bytes below which only tiny models fit: node and engine take about one GiB before any weights."""

FEW_FILES = 1024
"""Open files below which a node may run out of them: each connection is one, and so is each chunk that is being read."""

FEW_PROCESSES = 256
"""Threads and processes of a container below which torch, which starts several for each core, may fail to start."""

LITTLE_DISK = 10 * GIB
"""Bytes below which the disk may fill: `--store-gib` is 8 by default, and the model's weights come on top."""

NO_DISK = 256 << 20
"""Bytes below which not even a tiny model and its chunks fit."""

MIN_TIME = 1_735_689_600.0
"""Unix time before which no clock can be right: the first of January 2025, before Shoal was written."""

NO_LIMIT = 1 << 60
"""Bytes from which a limit of version 1 of cgroups means that there is none: the kernel says 2**63 less a page."""

_STA_UNSYNC = 0x40
"""The bit of the kernel's clock status that says that nobody disciplines it (linux/timex.h)."""

_TIMEX = struct.Struct("@Iqqqqi164x")
"""Of struct timex (linux/timex.h): modes, offset, frequency, largest error in microseconds, estimated error, status."""


@dataclass(frozen=True, slots=True)
class ContainerLimits:
    """What this process's control groups allow it; None where they do not limit it."""

    memory: int | None = None
    """bytes"""
    cpus: float | None = None
    """cores' worth of time"""
    processes: int | None = None
    """threads and processes"""


def read_limits(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> ContainerLimits:
    """The limits of this process, of either version of cgroups, its own group's and those above."""
    memory: list[int] = []
    cpus: list[float] = []
    processes: list[int] = []
    for number, controllers, path in _groups(groups):
        if number == "0":
            for folder in _up(root, path):
                memory += _numbers(folder / "memory.max")
                processes += _numbers(folder / "pids.max")
                quota = _numbers(folder / "cpu.max")  # "max 100000" has one number only
                cpus += [quota[0] / quota[1]] if len(quota) == 2 else []
        for controller in controllers.split(","):
            for folder in _up(root / controller, path):
                memory += [n for n in _numbers(folder / "memory.limit_in_bytes") if n < NO_LIMIT]
                processes += _numbers(folder / "pids.max")
                quota = _numbers(folder / "cpu.cfs_quota_us") + _numbers(folder / "cpu.cfs_period_us")
                cpus += [quota[0] / quota[1]] if len(quota) == 2 and quota[0] > 0 else []
    return ContainerLimits(min(memory, default=None), min(cpus, default=None), min(processes, default=None))


def _groups(file: Path) -> list[list[str]]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    return [line.split(":", 2) for line in lines if line.count(":") >= 2]


def _up(root: Path, path: str) -> list[Path]:
    """The group's folder and those above it. In a container the path may be the host's, and only `root` is there."""
    below = Path(path.lstrip("/"))
    return [root / part for part in (below, *below.parents)]


def _numbers(file: Path) -> list[int]:
    try:
        words = file.read_text(encoding="ascii").split()
    except (OSError, UnicodeDecodeError):
        return []
    return [int(word) for word in words if word.removeprefix("-").isdigit()]


def judge_memory(total: int, available: int, limits: ContainerLimits) -> DoctorFinding:
    """Of the machine's bytes, and what of them is not in use."""
    usable = min(available, limits.memory or available)
    said = f"{human_bytes(available)} of {human_bytes(total)} are free"
    if limits.memory is not None and limits.memory < total:
        said += f", and this container may use {human_bytes(limits.memory)}"
    if usable < LITTLE_MEMORY:
        return DoctorFinding(
            "memory", WARNING, said, "only tiny models fit: end other programs, or give the container more (docker run --memory)"
        )
    return DoctorFinding("memory", OK, said)


def judge_limits(limits: ContainerLimits, cores: int) -> DoctorFinding:
    """Of what the control groups allow besides memory."""
    told = [f"{limits.cpus:g} of {cores} cores" if limits.cpus is not None and limits.cpus < cores else ""]
    told += [f"{limits.processes:,} threads and processes" if limits.processes is not None else ""]
    said = ", ".join(filter(None, told)) or f"none on the {cores} cores and the number of threads"
    todo = []
    if limits.cpus is not None and limits.cpus < 1:
        todo.append("give it at least one core (docker run --cpus)")
    if limits.processes is not None and limits.processes < FEW_PROCESSES:
        todo.append(f"torch may not start: allow at least {FEW_PROCESSES} processes (docker run --pids-limit, systemd TasksMax=)")
    return DoctorFinding("limits", WARNING if todo else OK, said, "; ".join(todo))


def judge_files(hard: int) -> DoctorFinding:
    """Of the open files that this process may have at most; a node raises its own limit as far as that."""
    if hard in (-1, resource.RLIM_INFINITY) or hard >= MAX_FILES:
        return DoctorFinding("open files", OK, f"as many as a node asks for ({MAX_FILES:,})")
    if hard >= FEW_FILES:
        return DoctorFinding("open files", OK, f"{hard:,} at most")
    todo = "each connection is one: raise the limit (ulimit -n 65536, or LimitNOFILE=65536 in the systemd unit)"
    return DoctorFinding("open files", WARNING, f"{hard:,} at most", todo)


def judge_disk(what: str, folder: Path, *, writable: bool, free: int) -> DoctorFinding:
    """Of the disk where `folder` is or would be."""
    if not writable:
        return DoctorFinding(what, WRONG, f"{folder} cannot be written", "give another folder, or change its owner")
    said = f"{human_bytes(free)} free for {folder}"
    if free < NO_DISK:
        return DoctorFinding(what, WRONG, said, "make room, or give a folder on another disk")
    if free < LITTLE_DISK:
        return DoctorFinding(what, WARNING, said, "make room, or give a folder on another disk: weights and chunks may not fit")
    return DoctorFinding(what, OK, said)


def look_at_disk(what: str, folder: Path) -> DoctorFinding:
    """The finding about `folder`, which need not be there yet."""
    there = folder.absolute()
    while not os.path.exists(there) and there != there.parent:  # Path.exists raises where a folder cannot be entered
        there = there.parent
    try:
        free = shutil.disk_usage(there).free
    except OSError as error:
        return DoctorFinding(what, WRONG, f"{folder} cannot be looked at: {error.strerror}", "give another folder")
    return judge_disk(what, folder, writable=there.is_dir() and os.access(there, os.W_OK | os.X_OK), free=free)


@dataclass(frozen=True, slots=True)
class KernelClock:
    """What the kernel knows of its clock."""

    synchronised: bool
    error_s: float
    """the largest error that it believes in, in seconds"""


def read_kernel_clock() -> KernelClock | None:
    """None where the kernel does not say. Changes nothing."""
    if sys.platform != "linux":
        return None
    buffer = ctypes.create_string_buffer(_TIMEX.size)
    with suppress(OSError, AttributeError):
        if ctypes.CDLL(None).adjtimex(buffer) >= 0:
            _, _, _, error, _, status = _TIMEX.unpack(buffer.raw)
            return KernelClock(not status & _STA_UNSYNC, error / 1e6)
    return None


def judge_clock(now: float, clock: KernelClock | None) -> DoctorFinding:
    """Of this machine's clock, without asking anybody. What depends on it: a manifest dated more than a day ahead is refused, and
    tickets and memberships expire."""
    said = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%d %H:%M UTC")
    keep = "let the system keep it: timedatectl set-ntp true, or install chrony (--join TICKET compares it with the learner's)"
    if now < MIN_TIME:
        return DoctorFinding("clock", WRONG, f"{said} is in the past: versions would be refused as from the future", keep)
    if clock is None:
        return DoctorFinding("clock", OK, f"{said}; the system does not say who keeps it")
    if not clock.synchronised:
        return DoctorFinding("clock", WARNING, f"{said}; the system says that nobody keeps it right", keep)
    return DoctorFinding("clock", OK, f"{said}; kept right by the system, to {max(clock.error_s, 0.001):.3g} s")


def examine_machine(folder: Path) -> list[DoctorFinding]:
    """Everything about the machine; a node would keep its files in `folder`."""
    memory, limits = psutil.virtual_memory(), read_limits()
    return [
        judge_memory(memory.total, memory.available, limits),
        judge_limits(limits, os.cpu_count() or 1),
        judge_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
        look_at_disk("disk: chunks", folder),
        judge_clock(time.time(), read_kernel_clock()),
    ]
