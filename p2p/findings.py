"""What `shoal doctor` found of one thing, for whoever looks after it. Must not know what is looked at.

The node's package makes most findings, the learner's some, and neither may import the other: this is what both speak.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

FindingState = Literal["ok", "warning", "wrong"]

OK: FindingState = "ok"
WARNING: FindingState = "warning"
"""A node runs all the same, and a person would want to know."""
WRONG: FindingState = "wrong"
"""No node would run so."""


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """One line of the doctor's answer."""

    what: str
    """the thing looked at: "memory", "disk"; the same in every answer"""
    state: FindingState
    said: str
    """what was found"""
    todo: str = ""
    """what to do about it; "" where nothing has to be done"""


def count_of(findings: Iterable[DoctorFinding], state: FindingState) -> int:
    """How many of `findings` are in `state`."""
    return sum(finding.state == state for finding in findings)
