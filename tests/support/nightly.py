"""How long the property tests look: seconds in `make test`, 10,000 histories each with SHOAL_NIGHTLY=1."""

from __future__ import annotations

import os

NIGHTLY = os.environ.get("SHOAL_NIGHTLY", "") not in ("", "0")

HOW_MANY = [1, 8, 60] if NIGHTLY else [1, 8]
"""Attackers of an attack's test: sixty take a minute each."""


def examples(usual: int, nightly: int = 10_000) -> int:
    """`max_examples` of a test."""
    return nightly if NIGHTLY else usual
