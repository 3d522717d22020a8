"""The table [task] of a configuration. Must not know how a prompt is made or an answer scored."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from learner.section import Section, Seed


class TaskSection(Section):
    """Where prompts come from, and how answers are scored."""

    name: str = "reverse"
    """A built-in task, or reasoning_gym:DATASET."""
    seed: Seed = 0
    """Seed of the task's prompts."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the task: strings, numbers, booleans, lists and tables of them."""
    allow_unconfined: bool = False
    """Score answers that are run as code even where the operating system cannot keep them from your files."""
