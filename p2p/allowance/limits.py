"""What the owner of a host allows it, as one value, and how a person writes it. Pure.

The same names stand in flags, in the file that a running process looks at, and in what is shown. Must not know who keeps the
limits, nor how.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from p2p.allowance.hours import ALWAYS, Hours
from p2p.errors import UsageError

MBIT = 125_000.0
"""Bytes a second of one Mbit/s."""

GB = 10**9
"""Bytes of a gigabyte, as disks and volume tariffs count."""

LEAST_MBIT = 0.1
"""The lowest rate that may be set: what keeps some links alive, and brings tokens home, takes some kilobytes a second."""

MOST = 1e9
"""The largest number that a limit may have, in its unit: far above any host, so that sums stay finite."""


@dataclass(frozen=True, slots=True)
class HostLimits:
    """What a host may use. 0 is no limit."""

    up: float = 0.0
    """bytes a second that leave it, on the wire"""
    down: float = 0.0
    """bytes a second that come to it, on the wire"""
    disk: int = 0
    """bytes of its folder"""
    daily: int = 0
    """bytes a day on the wire, both directions together"""
    between: Hours | None = None
    """the hours in which it takes part; None: always"""
    gives_way: bool = False
    """it rests while its device or its uplink is used by others"""

    def changed(self, said: Mapping[str, Any]) -> HostLimits:
        """These with what `said` changes, by the names of `as_said`; a value of None changes nothing. UsageError with one line
        for a name that is none, and for a value that cannot be."""
        unknown = [name for name in said if name not in _NAMES]
        if unknown:
            raise UsageError(f"{unknown[0]!r:.80} is no limit; there are {', '.join(_NAMES)}")
        new = self
        for name, value in said.items():
            if value is None:
                continue
            match name:
                case "max_up_mbit":
                    new = replace(new, up=_rate(name, value))
                case "max_down_mbit":
                    new = replace(new, down=_rate(name, value))
                case "max_disk":
                    new = replace(new, disk=int(_number(name, value) * GB))
                case "quota_gb_per_day":
                    new = replace(new, daily=int(_number(name, value) * GB))
                case "between":
                    new = replace(new, between=None if value in ("", ALWAYS) else Hours.parse(str(value)))
                case "yield":
                    if not isinstance(value, bool):
                        raise UsageError(f"yield: {value!r:.40} is neither true nor false")
                    new = replace(new, gives_way=value)
        return new

    @property
    def as_said(self) -> dict[str, Any]:
        """As a person says it: by the names of the flags, in their units."""
        return {
            "max_up_mbit": self.up / MBIT, "max_down_mbit": self.down / MBIT, "max_disk": self.disk / GB,
            "quota_gb_per_day": self.daily / GB, "between": str(self.between or ALWAYS), "yield": self.gives_way,
        }  # fmt: skip

    def __str__(self) -> str:
        """In words; "" where nothing is limited."""
        words = (
            f"up {self.up / MBIT:g} Mbit/s" if self.up else "", f"down {self.down / MBIT:g} Mbit/s" if self.down else "",
            f"disk {self.disk / GB:g} GB" if self.disk else "", f"{self.daily / GB:g} GB a day" if self.daily else "",
            str(self.between or ""), "gives way" if self.gives_way else "",
        )  # fmt: skip
        return ", ".join(filter(None, words))


NO_LIMITS = HostLimits()
"""What holds for a host whose owner says nothing."""

_NAMES = tuple(NO_LIMITS.as_said)


def read_limits(text: str) -> HostLimits:
    """What `written_limits` made. UsageError for anything else."""
    try:
        said = json.loads(text)
    except ValueError:
        said = None
    if not isinstance(said, dict):
        raise UsageError("the file of limits is no JSON object")
    return NO_LIMITS.changed(said)


def written_limits(limits: HostLimits) -> str:
    """As the file that a running process looks at."""
    return json.dumps(limits.as_said) + "\n"


def _rate(name: str, value: Any) -> float:
    rate = _number(name, value)
    if 0 < rate < LEAST_MBIT:
        raise UsageError(f"{_flag(name)}: {rate:g} is below {LEAST_MBIT:g} Mbit/s, with which no link stays up (0: no limit)")
    return rate * MBIT


def _number(name: str, value: Any) -> float:
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number <= MOST:  # NaN is not, either
        raise UsageError(f"{_flag(name)}: {value!r:.40} is not a number from 0 (no limit) to {MOST:,.0f}")
    return number


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
