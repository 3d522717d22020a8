"""Tokens per second over the last few seconds. Must not know engines."""

from __future__ import annotations

from collections import deque

RATE_WINDOW_S = 5.0
"""Seconds that the reported tokens/s are a mean over: long enough to smooth a prefill, short enough to see a throttled GPU."""


class TokenRate:
    """Counts what each step made; `now` is any clock's seconds."""

    def __init__(self) -> None:
        self.tokens = 0
        """since the engine started"""
        self._recent: deque[tuple[float, int]] = deque()

    def add(self, now: float, made: int) -> None:
        """Count a step that made `made` tokens, at `now`, which must not fall."""
        self.tokens += made
        self._recent.append((now, made))
        while now - self._recent[0][0] > RATE_WINDOW_S:
            self._recent.popleft()

    def per_second(self, now: float) -> float:
        recent = [(at, n) for at, n in self._recent if now - at <= RATE_WINDOW_S]
        # The first step only marks where the window begins: its tokens were made before that moment.
        return sum(n for _, n in recent[1:]) / max(now - recent[0][0], 1e-9) if len(recent) > 1 else 0.0
