"""States of published versions that lie whole in the run's directory, for who would otherwise go through many dense differences:
the auditor, where it looks at one version in several. Must not know why one is kept, or torch.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from p2p.files import write_whole
from p2p.version import Version

FOLDER = "whole"
"""In the run's `versions`."""

KEPT = 3
"""States that are kept at most: that of the version that is looked at next, and of those that were looked at last, under which
completions may still end."""


def whole_state(run_dir: Path, version: Version) -> Path:
    """Where a version's state lies, if it was kept."""
    return run_dir / "versions" / FOLDER / f"{version.epoch}-{version.step}.state"


def keep_whole(run_dir: Path, version: Version, data: np.ndarray) -> None:
    """Keep a state (uint8 [bytes]), and drop the oldest beyond KEPT. OSError as the disk says."""
    path = whole_state(run_dir, version)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, data.data)
    for old in sorted(path.parent.glob("*.state"), key=_order)[:-KEPT]:
        old.unlink(missing_ok=True)


def _order(path: Path) -> tuple[int, ...]:
    return tuple(int(part) if part.isdigit() else -1 for part in path.stem.split("-"))
