"""Seconds, rates, numbers and prices as a person writes them. Pure."""

from __future__ import annotations

import re

from p2p.errors import UsageError
from p2p.protocol.prices import MAX_PRICE

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
"""Seconds of each unit."""

MOST_S = 10 * 365 * 86_400.0
"""Seconds of the longest period: longer than any run."""


def seconds_of(flag: str, text: str) -> float:
    """The seconds of "7d", "12h", "30m". UsageError otherwise."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)([smhdw])", text, re.ASCII)
    seconds = float(found[1]) * UNITS[found[2]] if found else 0.0
    if not 0 < seconds <= MOST_S:
        raise UsageError(f"{flag}: {text[:40]!r} is no time: write 30m, 12h, 7d or 2w, at most 3650d")
    return seconds


def hourly_of(flag: str, text: str) -> int:
    """The number of "20/h", or of "20". UsageError otherwise."""
    found = re.fullmatch(r"(\d{1,9})(/h)?", text, re.ASCII)
    if not found or not int(found[1]):
        raise UsageError(f"{flag}: {text[:40]!r} is no rate: write 20/h, for 20 new identities an hour")
    return int(found[1])


def count_of(flag: str, text: str) -> int:
    """A number of 1 and more. UsageError otherwise."""
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII) or not int(text):
        raise UsageError(f"{flag}: {text[:40]!r} is no number from 1 on")
    return int(text)


def dollars_of(flag: str, text: str) -> float:
    """A price in US dollars. UsageError otherwise."""
    try:
        usd = float(text)
    except ValueError:
        usd = -1.0
    if not 0 <= usd <= MAX_PRICE:  # NaN is not, either
        raise UsageError(f"{flag}: {text[:40]!r} is no price from 0 to {MAX_PRICE:,.0f} dollars")
    return usd
