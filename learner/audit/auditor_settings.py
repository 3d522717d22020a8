"""What the head tells its auditor when it starts it. Must import without torch."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditorSettings:
    """As JSON on the auditor's command line."""

    model: str
    """the folder of the run's model"""
    lora: dict[str, Any]
    """`trainer.lora`"""
    chunks: str
    """the folder of the head's chunk store"""
    run: str
    epoch: int
    head_key: str
    """hex"""
    device: str
    dtype: str
    served_dtype: str
    """of what is published"""
    threads: int
    window: int
    """versions whose states are held"""
    temperature: float
    top_p: float
    stop_ids: list[int]
    stop: list[str]
    """tokens and strings that end a completion"""
    longest: int
    """its tokens at the most"""

    def text(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def read(cls, text: str) -> AuditorSettings:
        """Inverse of `text`."""
        return cls(**json.loads(text))
