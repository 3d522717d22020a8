"""Each node's tests: one for each kind of arithmetic that it had, and one of its last tokens. Pure.

They are kept of gone nodes too, as far as there is room, so that nobody begins anew by coming back. Must not know completions, or
what follows from a test.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from learner.audit.calibration import Calibration, NodeArithmetic
from learner.audit.deviations import Deviations
from learner.audit.sequential import NOTABLE, NodeTest
from p2p.forgetting import forget_oldest, renewed

MAX_KINDS = 4
"""Kinds of arithmetic that one node may have in a run, each with a test of its own: a node comes back with another engine or
device. Its further kinds are judged as the last one."""

MOST_TESTED = 2_000
"""Nodes, gone ones among them, of which tests are kept: each is dozens of small arrays. Of more, those are forgotten that are
gone and were tested longest ago; one that comes back then is tested from the beginning."""

LATELY = 256
"""Tokens after which a node's second test begins anew. What the first one's bets lost on its honest tokens has to be won back
before it is called wrong; this one says soon that something changed, and all of its tokens are looked at."""


def kind_test(calibration: Calibration, kind: NodeArithmetic, false_alarm: float, before: int = 0) -> NodeTest:
    """A node's test of one kind, where it has tests of so many kinds already: together they have the chance of one."""
    return NodeTest(calibration.honest(kind), false_alarm / 2.0 ** min(before + 1, MAX_KINDS - 1))


@dataclass
class NodeTests:
    """`is_here(node)`: whether it is linked; those that are gone are forgotten first. `anew(node)` hears of one that is tested
    from the beginning."""

    calibration: Calibration
    false_alarm: float
    is_here: Callable[[str], bool]
    anew: Callable[[str], None]
    _tests: dict[str, dict[NodeArithmetic, NodeTest]] = field(default_factory=dict, init=False, repr=False)
    _lately: dict[str, NodeTest] = field(default_factory=dict, init=False, repr=False)
    """by node, of its last tokens alone: nobody is called wrong by it"""

    def of(self, node: str) -> list[NodeTest]:
        """Its tests."""
        return list(self._tests.get(node, {}).values())

    def test(self, node: str, kind: NodeArithmetic) -> NodeTest:
        """Its test of this kind. All of a node's tests together have the chance of a false alarm that one may have."""
        tests = self._tests.setdefault(node, {})
        renewed(self._tests, node)
        for gone in forget_oldest(self._tests, MOST_TESTED, lambda one: one == node or self.is_here(one)):
            self._lately.pop(gone, None)
        if kind not in tests and len(tests) >= MAX_KINDS:
            kind = list(tests)[-1]
        test, honest = tests.get(kind), self.calibration.honest(kind)
        if test is None or (test.caught_at and test.honest != honest):  # it was proven wrong by bounds that are none
            before = len(tests) if test is None else list(tests).index(kind)
            if test is not None:
                self.anew(node)
            test = tests[kind] = kind_test(self.calibration, kind, self.false_alarm, before)
        test.honest = honest
        return test

    def notable(self, node: str, test: NodeTest, deviations: Deviations, again: np.ndarray) -> bool:
        """Whether its last tokens say something against it, whatever those before said for it, and be they of one prompt."""
        lately = self._lately.get(node)
        if lately is None or lately.tokens >= LATELY or lately.honest != test.honest:
            lately = self._lately[node] = NodeTest(test.honest, test.false_alarm)
        lately.look(*deviations, again=again)
        found = lately.most_evidence >= -NOTABLE * math.log(lately.false_alarm)
        if found:
            del self._lately[node]  # told once
        return found

    def not_expelled(self, node: str) -> None:
        """It was never expelled, or the operator forgave it: if its tests had found it wrong, they begin anew."""
        tests = self._tests.get(node, {})
        if any(test.caught_at for test in tests.values()):
            tests.clear()
            self._lately.pop(node, None)
            self.anew(node)

    def __len__(self) -> int:
        """Nodes of which tests are kept."""
        return max(len(self._tests), len(self._lately))
