"""A node that is of one of several kinds, nobody knows which. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from learner.audit.bets import HonestMeans
from learner.audit.sequential import FALSE_ALARM, NodeTest, Verdict


class KindsTest:
    """Of a node that may be of any of several kinds, nobody knows which: it is caught when none of them would be so. Its evidence
    is the least of the kinds' own, so an honest node of any of them is called wrong as rarely as by its own test."""

    def __init__(
        self, kinds: Mapping[str, HonestMeans], false_alarm: float = FALSE_ALARM, suspects: tuple[str, ...] = ()
    ) -> None:
        self.tests = {name: NodeTest(honest, false_alarm, suspects) for name, honest in kinds.items()}
        self._limit = -math.log(false_alarm)
        self.tokens = 0
        self.caught_at = 0
        """tokens after which it was caught; 0: it was not"""
        self.most_evidence = 0.0
        """the most that the least of the kinds' evidence ever was"""

    def look(
        self, distance: np.ndarray, claimed: np.ndarray, recomputed: np.ndarray, shift: np.ndarray | None = None,
        suspected: Mapping[str, np.ndarray] | None = None, *, again: np.ndarray | None = None, prompts: np.ndarray | None = None,
    ) -> Verdict:  # fmt: skip
        """As `NodeTest.look`."""
        self.log_path(distance, claimed, recomputed, shift, suspected, again=again, prompts=prompts)
        return self.verdict()

    def log_path(
        self, distance: np.ndarray, claimed: np.ndarray, recomputed: np.ndarray, shift: np.ndarray | None = None,
        suspected: Mapping[str, np.ndarray] | None = None, *, again: np.ndarray | None = None, prompts: np.ndarray | None = None,
    ) -> np.ndarray:  # fmt: skip
        """As `NodeTest.log_path`."""
        columns = distance, claimed, recomputed, shift, suspected
        paths = [test.log_path(*columns, again=again, prompts=prompts) for test in self.tests.values()]
        path: np.ndarray = np.minimum.reduce(paths)
        if len(path):
            self.most_evidence = max(self.most_evidence, float(path.max()))
            over = path >= self._limit
            if not self.caught_at and over.any():
                self.caught_at = self.tokens + int(over.argmax()) + 1
        self.tokens += len(path)
        return path

    def verdict(self) -> Verdict:
        """By what was seen so far; why it is none of the kind that it is most like."""
        name, closest = min(self.tests.items(), key=lambda item: item[1].log_evidence)
        why = closest.verdict().why
        notable = closest.verdict().notable
        return Verdict(bool(self.caught_at), self.caught_at or self.tokens, f"{why} ({name})" if why else "", notable)
