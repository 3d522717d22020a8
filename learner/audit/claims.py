"""A completion as it came from nodes, of which some tokens are to be scored. Must import without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """A completion as it came from nodes."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """claimed, in nats; one a completion token"""
    seed: int
    first: int = 0
    """completion tokens before this one are not checked (others made them, or under another version)"""
    stop: int | None = None
    """nor those from this one on"""
    given: tuple[tuple[int, int], ...] = ()
    """[start, stop) of what an environment wrote, which nobody drew"""
