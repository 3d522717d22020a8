"""A run's samples as every view reads them: prompt, completion or turns, reward and its parts. Typed, bounded, read-only.

What is here was written by a model, by an environment and by nodes: texts are cleaned. Must not know how they are shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from learner.status.words import plain_text

MOST_SAMPLE = 4000
"""Characters of one prompt or completion that a view is given: a few pages, whatever wrote it."""

MOST_TURNS = 128
"""Turns of one sample that a view is given."""

Plain = Annotated[str, BeforeValidator(plain_text)]
"""A short text without control characters."""

Long = Annotated[str, BeforeValidator(lambda text: plain_text(text, MOST_SAMPLE, lines=True))]
"""A text of several lines without control characters."""


class Part(BaseModel):
    """Read-only; a value that is null or missing is the default."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        return {k: v for k, v in values.items() if v is not None} if isinstance(values, Mapping) else values


class SampleSpan(Part):
    """Tokens in a row of one completion, by who made them."""

    version: Plain = ""
    node: Plain = ""
    tokens: int = 0


class SampleCall(Part):
    """A tool call that the model wrote."""

    name: Plain = ""
    arguments: Plain = ""
    """as JSON"""


class SampleTurn(Part):
    """A turn of an episode: what the model wrote, or what its environment answered."""

    by: Plain = ""
    """"model" or "environment" """
    tokens: int = 0
    text: Long = ""
    calls: tuple[SampleCall, ...] = ()


class SampleEnd(Part):
    """How an episode ended."""

    over: Plain = ""
    """the limit that ended it; "" where its environment did"""
    calls: int = 0
    errors: int = 0


class SampleRow(Part):
    """One prompt and what the model wrote."""

    step: int = 0
    prompt: Long = ""
    completion: Long = ""
    reward: float | None = None
    finish: Plain = ""
    spans: tuple[SampleSpan, ...] = ()
    turns: Annotated[tuple[SampleTurn, ...], BeforeValidator(lambda turns: list(turns)[:MOST_TURNS])] = ()
    """of an episode, in order; empty for a completion of one turn"""
    end: SampleEnd | None = None
    parts: dict[Plain, float] = Field(default_factory=dict)
    """named parts of the reward, before their weights"""

    @property
    def made(self) -> tuple[SampleSpan, ...]:
        """Its spans, those of one maker under one version as one: of an episode each turn has its own."""
        merged: dict[tuple[str, str], int] = {}
        for span in self.spans:
            merged[span.version, span.node] = merged.get((span.version, span.node), 0) + span.tokens
        return tuple(SampleSpan(version=version, node=node, tokens=n) for (version, node), n in merged.items())

    @property
    def ended(self) -> str:
        """How it ended, in a word or two."""
        if self.end is None:
            return self.finish
        return f"ended by {self.end.over}" if self.end.over else "done"
