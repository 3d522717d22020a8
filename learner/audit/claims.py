"""A completion as it came from nodes, of which some tokens are to be scored. Must import without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import xxhash


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


class OwnGroup(NamedTuple):
    """What the auditor answers itself, once a seed."""

    prompt_ids: tuple[int, ...]
    seeds: tuple[int, ...]


def prompt_number(prompt_ids: Sequence[int]) -> int:
    """Stands for a prompt: 53 bits, which a float64 holds."""
    return xxhash.xxh3_64_intdigest(np.asarray(prompt_ids, "<i8").tobytes()) >> 11


def places_of(first: int, stop: int, given: Sequence[tuple[int, int]]) -> list[int]:
    """Of a completion's places from `first` to before `stop`, those that were drawn. `given`: in order, none within another."""
    places, at = list[int](), first
    for start, end in given:
        places += range(at, min(start, stop))
        at = max(at, end)
    return places + list(range(at, stop))
