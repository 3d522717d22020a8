"""What honest nodes' deviations are, on disk: what a run measured, and what another one's file gives.

Must not know how it is used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from learner.audit.bets import HonestMeans
from learner.audit.calibration import DrawnAt, NodeArithmetic, from_json
from p2p.errors import UsageError

CALIBRATION_FILE = "audit-calibration.json"
"""In the run's directory: what honest nodes' deviations are, as measured on trusted nodes and by the auditor itself."""

log = logging.getLogger("shoal.audit")


def calibration_writer(path: Path) -> Callable[[str], None]:
    """Keeps what was measured. A full disk costs it, and no more."""

    def write(text: str) -> None:
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            log.warning("what was measured of honest nodes cannot be kept in %s: %s", path, error.strerror)

    return write


def kept_calibration(path: Path, drawn: DrawnAt) -> dict[NodeArithmetic, HonestMeans]:
    """What `calibration_writer` kept in an earlier life of the run; nothing when there is none, it is damaged, or nodes drew
    otherwise then."""
    try:
        return from_json(path.read_text(encoding="utf-8"), drawn) if path.exists() else {}
    except (OSError, UnicodeDecodeError, UsageError) as error:
        log.warning("what an earlier life of this run measured of honest nodes is passed over, and measured anew: %s cannot be "
                    "used: %s", path, error)  # fmt: skip
        return {}


def read_calibration(file: str) -> str:
    """What `audit.calibration` names; "" where it names nothing. UsageError when it cannot be read."""
    try:
        return Path(file).expanduser().read_text(encoding="utf-8") if file else ""
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"audit.calibration: {file} cannot be read: {error}") from None
