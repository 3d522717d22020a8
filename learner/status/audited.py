"""What a run's state says of audits, and of nodes that were caught. Must not know how it
is shown or where the values came from."""

from __future__ import annotations

from learner.status.sample_rows import Part, Plain


class AuditState(Part):
    """What is scored again of what nodes generate."""

    state: Plain = ""
    """"" of a run without audits"""
    why: Plain = ""
    """why they ended; "" while they go on"""
    checked: int = 0
    unchecked: int = 0
    """tokens, as all of these numbers"""
    calibrated: int = 0
    waiting: int = 0
    """completions"""
    seconds: float = 0.0
    """processor time"""


class CaughtState(Part):
    """Nodes that were expelled as cheats, by audits or by the trainer's own pass."""

    nodes: int = 0
    last: Plain = ""
    """which one was last, why, and what became of what it made"""
    trained_tokens: int = 0
    remade_groups: int = 0
