"""Which form a checkpoint on the disk has, and who can read it. Must not know torch: it is asked before a start."""

from __future__ import annotations

from pathlib import Path

from p2p.errors import UsageError

TENSORS = "sharded"
"""The folder of the ranks' files in a checkpoint."""


def is_sharded(path: Path) -> bool:
    """Whether several ranks wrote this checkpoint."""
    return (path / TENSORS).is_dir()


def check_devices(checkpoint: Path, devices: int) -> None:
    """UsageError where so many processes cannot go on from it. That it is gone is another's to tell."""
    if devices > 1 and checkpoint.is_dir() and not is_sharded(checkpoint):
        raise UsageError(
            f"trainer.devices = {devices}: checkpoint {checkpoint} was written by one process; resume with trainer.devices = 1"
        )
