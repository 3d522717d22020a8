"""What came from each node, and when. Pure; told the time. Must not know sequences, or what follows from it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from p2p.forgetting import forget_oldest, renewed

LATELY_S = 5.0
"""What came counts for e times less with each so many seconds: a node that turned has ended all that it will by then."""


@dataclass(slots=True)
class _Delivered:
    tokens: float
    """at the time `at`; they fade"""
    at: float


class Deliveries:
    """By node."""

    def __init__(self) -> None:
        self._of: dict[str, _Delivered] = {}

    def came(self, node: str, tokens: int, now: float) -> None:
        """So many tokens came from it."""
        if tokens:
            self._of[node] = _Delivered(self.lately(node, now) + tokens, now)
            renewed(self._of, node)

    def last(self, node: str) -> float:
        """When anything came; minus infinity where nothing did."""
        return self._of[node].at if node in self._of else -math.inf

    def lately(self, node: str, now: float) -> float:
        """Tokens that came, those of the last LATELY_S counting most."""
        of = self._of.get(node)
        return of.tokens * math.exp((of.at - now) / LATELY_S) if of is not None else 0.0

    def forget(self, stays: Callable[[str], bool]) -> None:
        """Where it is of too many: nodes from which nothing came for long, but for those that stay."""
        forget_oldest(self._of, stays=stays)
