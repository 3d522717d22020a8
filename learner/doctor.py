"""The learner's part of `shoal doctor`: the sandbox for rewards, and room for checkpoints. Must not know nodes or engines.

It is here, and not with the rest of the doctor, because the node's package may not import the learner's. The frame of the command
line may know both, and hands this in. All of it is a warning at most: the doctor says whether a *node* would run.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from learner.rewards.sandbox import landlock_version
from learner.rewards.sandbox_probe import missing_layers
from p2p.findings import OK, WARNING, DoctorFinding
from p2p.limits import GIB
from p2p.quantities import human_bytes

LITTLE_DISK = 20 * GIB
"""Bytes below which checkpoints may fill the disk: one takes 12 bytes a parameter (fp32 weights and two moments), so 7 GiB for
0.6B, and two are there while one replaces the other."""


def judge_sandbox(missing: list[str], landlock: int) -> DoctorFinding:
    """Of what confines scorers that run answers as code. `landlock`: the kernel's version of it."""
    what = "reward sandbox"
    if not missing:
        return DoctorFinding(what, OK, f"namespaces, Landlock {landlock} and seccomp confine scorers that run answers as code")
    said = f"not to be had here: {', '.join(missing)}"
    if "Landlock" in missing:
        todo = (
            "tasks whose scorer runs answers as code are refused: Linux 5.13 or later with landlock in the boot option lsm=, or "
            "task.allow_unconfined = true at your own risk; other tasks need none of it"
        )
        return DoctorFinding(what, WARNING, said, todo)
    todo = (
        "scorers run with less around them; a container may withhold it. docker run --security-opt seccomp=unconfined is a "
        "trade: scorers get it, and the container's own filter of system calls is gone for everything that runs in it"
    )
    return DoctorFinding(what, WARNING, said, todo)


def judge_run_disk(folder: Path, *, writable: bool, free: int) -> DoctorFinding:
    """Of the disk on which a learner would keep its runs."""
    what = "disk: checkpoints"
    if not writable:
        return DoctorFinding(what, WARNING, f"{folder} cannot be written by a learner", "choose another run_dir")
    said = f"{human_bytes(free)} free for {folder}; a checkpoint takes 12 bytes a parameter"
    if free < LITTLE_DISK:
        return DoctorFinding(what, WARNING, said, "for a learner of a larger model make room, or choose another run_dir")
    return DoctorFinding(what, OK, said)


def examine_learner(run_dir: Path) -> list[DoctorFinding]:
    """The findings about a learner on this machine, whose runs would lie in or under `run_dir`."""
    there = run_dir.absolute()
    while not os.path.exists(there) and there != there.parent:  # Path.exists raises where a folder cannot be entered
        there = there.parent
    try:
        free = shutil.disk_usage(there).free
    except OSError:
        free = 0
    writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    return [judge_sandbox(missing_layers(), landlock_version()), judge_run_disk(run_dir.absolute(), writable=writable, free=free)]
