"""What is in a run's directory before a learner starts on it. Changes nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

from p2p.errors import UsageError
from p2p.files import is_locked

SAMPLES_FILE = "samples.jsonl"
"""Name of the file with what the model wrote, a few completions a step."""

OLDER_SAMPLES = "samples.1.jsonl"
"""Name of the file before it, which is replaced when the newer one is full."""


def existing_run(run_dir: Path, *, resume: bool) -> str | None:
    """The id of the run that the directory holds; None for a new one. UsageError when it does not fit the wish."""
    marker = run_dir / "run.json"
    if marker.exists():
        # Without a status page nothing ever happened in it: a start that was refused on the way may be tried again.
        if not resume and (run_dir / "status.json").exists():
            raise UsageError(f"{run_dir} holds a run already: add --resume to go on with it, or choose another run_dir")
        try:
            return str(json.loads(marker.read_text())["run"])
        except (OSError, ValueError, KeyError, TypeError):
            raise UsageError(f"{marker} cannot be read: {run_dir} holds no run that can be resumed") from None
    if resume:
        raise UsageError(f"nothing to resume: {run_dir} holds no run")
    return None


def check_idle(run_dir: Path) -> None:
    """UsageError when a learner is running on the directory. It may start right after: only `Journal.open` makes sure."""
    try:
        lock = os.open(run_dir / "journal.sqlite.lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return  # no learner was ever here; and what cannot be read is told by who must read it
    try:
        held = is_locked(lock)
    except OSError as error:
        raise UsageError(f"cannot lock {run_dir}/journal.sqlite.lock: {error.strerror}") from None
    finally:
        os.close(lock)
    if held:
        raise UsageError(f"another learner is running on this directory: {run_dir}")


def kept_listen(run_dir: Path) -> list[str] | None:
    """The multiaddrs that the run listened on before, which tickets name; None when there are none."""
    kept = run_dir / "listen.json"
    if not kept.exists():
        return None
    try:
        return [str(a) for a in json.loads(kept.read_text())]
    except (OSError, ValueError, TypeError):
        raise UsageError(f"{kept} cannot be read: remove it, and new tickets will name new ports") from None
