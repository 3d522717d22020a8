"""What earlier epochs of a run published, and left. Must not know versions."""

from __future__ import annotations

import shutil
from pathlib import Path

from learner.client import whole_states
from p2p.weights.store import clear_chunks


def clear_leftovers(run_dir: Path) -> None:
    """Of no use to anybody (their manifests are fenced out), and nothing names it."""
    clear_chunks(run_dir / "versions" / "chunks")
    for folder in ("batches", whole_states.FOLDER):
        shutil.rmtree(run_dir / folder, ignore_errors=True)
