"""Judges the tokens that the bench made: what honest nodes come to, and after how many tokens cheats are found. Pure, but for the
files that it reads. Must not know engines, models or what is printed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from learner.audit.bets import HonestMeans
from learner.audit.calibration import Calibration, NodeArithmetic, widest
from learner.audit.kinds import KindsTest
from learner.audit.measuring import measure
from learner.audit.node_tests import kind_test
from learner.audit.sequential import FALSE_ALARM, NodeTest
from netem.bench.audit.store import Column

CALIBRATION = 32_768
"""Tokens of each kind that are its calibration: the first ones. The others are judged."""

NODE_TOKENS = 1_000_000
"""Tokens of one honest node in a run: the promise is made for so many."""

FIRST_PART, PART = 128, 8_192
"""Tokens that are looked at together, at first and at most: most cheats are caught in the first ones. Evidence is known after
each token all the same."""

KNOWN, AMONG, UNKNOWN = "kind known", "of a known kind", "kind never measured"
"""How much is known of a node: its kind; that it is of one of those that were measured; nothing."""

NOBODY_TRUSTED = "nobody trusted"
"""A run in which nobody is trusted: the node says its kind, and only the auditor measured, its own rounding. It has production's
own test."""

ELSEWHERE = "nobody trusted, says cuda"
"""The same of a node that says that it has a GPU, which nobody measured: a node's kind is its own word."""

LATE, HONEST_FIRST = "nobody trusted, late", 100_000
"""The same of a node of which so many honest tokens were checked before it began to cheat."""

Test = NodeTest | KindsTest
Suspected = Mapping[str, np.ndarray]


class Sample(NamedTuple):
    """Tokens, and of some suspects what log probabilities these tokens have under their weights."""

    column: Column
    suspected: Suspected

    def part(self, first: int, stop: int) -> Sample:
        return Sample(self.column.part(first, stop), {name: values[first:stop] for name, values in self.suspected.items()})

    def rolled(self, first: int) -> Sample:
        """From another token on, the ones before it at the end."""
        return Sample(
            Column(*(np.roll(values, -first) for values in self.column)),
            {name: np.roll(values, -first) for name, values in self.suspected.items()},
        )


def calibrate(samples: Mapping[NodeArithmetic, Sample]) -> dict[NodeArithmetic, HonestMeans]:
    """Of each kind, from its first tokens."""
    made = {}
    for kind, sample in samples.items():
        first = sample.part(0, calibration_tokens(sample))
        column = first.column
        made[kind] = measure(*column.scored, suspected=first.suspected, repeated=column.repeated, prompts=column.prompts)
    return made


def calibration_tokens(sample: Sample) -> int:
    """How many of a sample's tokens, the first ones, are its kind's calibration."""
    return min(CALIBRATION, sample.column.tokens // 2)


def ways(
    means: Mapping[NodeArithmetic, HonestMeans], kind: NodeArithmetic, suspects: tuple[str, ...] = (),
    own: Calibration | None = None,
) -> dict[str, Callable[[], Test]]:  # fmt: skip
    """What makes a test of a node of that kind, by what is known of it. `own`: what the auditor measured itself."""
    shipped = own if own is not None else Calibration()
    every = {str(k): m for k, m in means.items()}
    return {
        KNOWN: lambda: NodeTest(means[kind], suspects=suspects), AMONG: lambda: KindsTest(every, suspects=suspects),
        UNKNOWN: lambda: NodeTest(widest(means), suspects=suspects),
        NOBODY_TRUSTED: lambda: kind_test(shipped, kind, FALSE_ALARM),
        ELSEWHERE: lambda: kind_test(shipped, replace(kind, device="cuda"), FALSE_ALARM),
    }  # fmt: skip


def _feed(test: Test, sample: Sample, until_caught: bool) -> None:
    first, size = 0, FIRST_PART
    while first < sample.column.tokens and not (until_caught and test.caught_at):
        part = sample.part(first, first + size)
        test.log_path(*part.column.scored, suspected=part.suspected, again=part.column.again, prompts=part.column.prompts)
        first, size = first + size, min(2 * size, PART)


def honest_row(sample: Sample, make: Callable[[], Test], per_node: int = NODE_TOKENS) -> dict[str, Any]:
    """The tokens as those of nodes of so many each, looked at after every one."""
    nodes = caught = 0
    most = 0.0
    for first in range(0, sample.column.tokens, per_node):
        test, nodes = make(), nodes + 1
        _feed(test, sample.part(first, first + per_node), until_caught=False)
        most, caught = max(most, test.most_evidence), caught + bool(test.caught_at)
    return {"nodes": nodes, "caught": caught, "most_evidence": round(math.exp(min(most, 50.0)), 3)}


def facts(column: Column) -> dict[str, float]:
    """What a sample is like."""
    off = np.clip(np.abs(column.claimed - column.recomputed), 0, 1)
    return {
        "tokens": column.tokens, "repeated": float(column.repeated.mean()),
        "exact": float((column.distance == 0).mean()), "near": float((column.distance > 0.005).mean()),
        "far": float((column.distance > 0.05).mean()), "off": float(off.mean()), "nats": float(-column.recomputed.mean()),
    }  # fmt: skip


def detected(sample: Sample, make: Callable[[], Test], repeats: int, before: Sample | None = None) -> dict[str, Any]:
    """Tokens until it is caught: median and 90th percentile over repeats that begin at other tokens of the sample; None where all
    its tokens do not suffice. `before`: honest tokens of the node that were checked first, and are not counted."""
    found: list[int | None] = []
    why, fresh = "", make()
    if before is not None:
        _feed(fresh, before, until_caught=False)
    for repeat in range(repeats):
        test = copy.deepcopy(fresh)
        _feed(test, sample.rolled(repeat * sample.column.tokens // repeats), until_caught=True)
        found.append(test.caught_at - fresh.tokens if test.caught_at else None)
        why = why or test.verdict().why
        if not test.caught_at and repeat == 0:
            break  # one that lasts through all of them says it for all
    return {"median": percentile(found, 0.5), "p90": percentile(found, 0.9), "of": sample.column.tokens, "why": why}


def percentile(found: Sequence[int | None], share: float) -> int | None:
    """The least number of tokens that suffices for this share of the runs; None when it was not found in so many."""
    ranked = sorted(n for n in found if n is not None)
    at = max(0, math.ceil(share * len(found)) - 1)
    return ranked[at] if at < len(ranked) else None
