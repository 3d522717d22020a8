"""States of published versions that lie whole in the run's directory, for who would otherwise go through many dense differences:
the auditor, where it looks at one version in several. Must not know why one is kept, or torch.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from p2p.files import write_whole
from p2p.version import Version

FOLDER = "versions/whole"
"""In the run's directory. The head empties it when it starts: what lies there is of versions that are gone."""

KEPT = 3
"""States that are kept at most: that of the version that is looked at next, and of those that were looked at last, under which
completions may still end."""

ROOM = 4
"""States that must fit on the disk for one to be kept: checkpoints, chunks and the journal come first."""


def whole_state(run_dir: Path, version: Version) -> Path:
    """Where a version's state lies, if it was kept."""
    return run_dir / FOLDER / f"{version.epoch}-{version.step}.state"


def keep_whole(run_dir: Path, version: Version, data: np.ndarray) -> None:
    """Keep a state (uint8 [bytes]) and the newest KEPT - 1 besides, if the disk has room. OSError as the disk says."""
    path = whole_state(run_dir, version)
    path.parent.mkdir(parents=True, exist_ok=True)
    for old in sorted(path.parent.iterdir(), key=_order)[: 1 - KEPT]:
        old.unlink(missing_ok=True)
    if shutil.disk_usage(path.parent).free >= ROOM * data.nbytes:
        write_whole(path, data.data)


def _order(path: Path) -> tuple[int, ...]:
    """What was not written to its end is the oldest."""
    name, _, rest = path.name.partition(".")
    return tuple(int(part) if part.isdigit() else -1 for part in name.split("-")) if rest == "state" else (-1,)
