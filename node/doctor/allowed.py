"""What the owner of this machine allows the node whose folder is looked at, and why that rests.

Must not know engines or links.
"""

from __future__ import annotations

from pathlib import Path

from p2p.allowance.keeper import LIMITS_FILE, what_holds
from p2p.allowance.limits import read_limits
from p2p.errors import UsageError
from p2p.findings import OK, WARNING, DoctorFinding


def examine_limits(folder: Path) -> list[DoctorFinding]:
    """Nothing where no node with limits has run in `folder`."""
    try:
        limits = read_limits((folder / LIMITS_FILE).read_text(encoding="utf-8"))
    except OSError:
        return []
    except UsageError as error:
        return [DoctorFinding("limits", WARNING, str(error), f"remove {folder / LIMITS_FILE}: the node writes it anew")]
    said, holds = str(limits) or "none", what_holds(folder)
    return [DoctorFinding("limits", OK, f"{said}{f'; now: {holds}' if holds else ''}")] if str(limits) else []
