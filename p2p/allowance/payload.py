"""How much of an uplink's limit is left for chunks, when all that leaves counts. Pure; it is told the time and what left."""

from __future__ import annotations

SMOOTHED = 0.3
"""Weight of the newest second in the mean of what leaves beside chunks."""

LEAST_PART = 0.5
"""Part of the limit that chunks may have at the least: what leaves beside them comes and goes, and versions must not stop."""

MARGIN = 0.99
"""Part of the rest that the pump is told: what it hands out beyond the limit would only wait, chosen on older news."""


class PayloadPart:
    """Measures what leaves beside the payload of chunks: headers, acknowledgements, control messages, tokens."""

    def __init__(self) -> None:
        self._beside = 0.0
        self._before: tuple[float, int, int] | None = None

    def look(self, now: float, wire: int, chunks: int) -> None:
        """Bytes on the wire and bytes of chunks' payload that left so far; once a second."""
        if self._before is not None and now > self._before[0]:
            at, wire_then, chunks_then = self._before
            beside = max(0.0, (wire - wire_then) - (chunks - chunks_then)) / (now - at)
            self._beside += SMOOTHED * (beside - self._beside)
        self._before = now, wire, chunks

    def of(self, limit: float) -> float:
        """Bytes/s of chunks that `limit` bytes/s on the wire have room for."""
        return MARGIN * max(LEAST_PART * limit, limit - self._beside)
