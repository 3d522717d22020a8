"""What SHOAL_NIGHTLY=1 adds to `make test`: property tests look at 10,000 histories each, and whole runs of minutes are made."""

from __future__ import annotations

import os
from typing import Any

import pytest

NIGHTLY = os.environ.get("SHOAL_NIGHTLY", "") not in ("", "0")

nightly = pytest.mark.skipif(not NIGHTLY, reason="takes minutes: SHOAL_NIGHTLY=1")
"""Marks a test that `make test` leaves out."""


def cases(by_day: list[Any], *by_night: Any) -> list[Any]:
    """A test's cases: those of `make test`, which are most unlike each other, and what the night adds."""
    return [*by_day, *by_night] if NIGHTLY else by_day


HOW_MANY = [1, 8, 60] if NIGHTLY else [8]
"""Attackers of an attack's test: sixty take a minute each, and one is less than eight."""


def examples(usual: int, nightly: int = 10_000) -> int:
    """`max_examples` of a test, or how often it draws."""
    return nightly if NIGHTLY else usual
