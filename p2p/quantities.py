"""Bytes and seconds in words, as a person reads them. All that shows some to a person uses these; the axis of a plot has one
unit for all its points, and so chooses its own (`learner.status.plots`)."""

from __future__ import annotations


def human_bytes(size: float) -> str:
    """Bytes in binary units, three significant digits: 605246 is 591 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 999.5:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 99.95 else f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"


def human_seconds(seconds: float) -> str:
    """31 s, 5 min 12 s, 2 h 05 min."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
